"""Values that are converted without typer's library: as it converts them, or left to it."""

from __future__ import annotations

import copy

import pytest
import typer

from mpdiag.cli import app
from mpdiag.commands.shared.plain_values import NOT_PLAIN, plain_value, plain_values
from mpdiag.files.paths import place

COMMANDS = typer.main.get_command(app).commands
WORDS = [
    "1",
    "0",
    "20",
    "-3",
    "1.5",
    "",
    "fp16",
    "FP16",
    "fp17",
    "runs/x",
    "/",
    "-",
    "٣",
    "0x10",
    " 7",
]
PARAMETERS = [
    pytest.param(parameter, id=f"{name} {parameter.name}")
    for name, command in COMMANDS.items()
    for parameter in command.params
    if hasattr(parameter, "type_descriptor")
]


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_a_plain_value_is_what_typer_makes_of_it(parameter):
    """Each option and argument of each command, with words that fit it and words that do not."""
    own = copy.copy(parameter)
    vars(own).pop("get_runtime_param", None)
    about = parameter.type_descriptor
    many = parameter.multiple or parameter.nargs == -1
    context = typer.Context(COMMANDS["analyze"])
    read = plain_values if many else plain_value
    for word in [*WORDS, None, parameter.default]:
        value = [word] if many and isinstance(word, str) else word
        plain = outcome(lambda: read(value, about.annotation, about.parameter_info))  # noqa: B023
        if plain != (type(NOT_PLAIN), NOT_PLAIN):
            theirs = outcome(lambda: own.get_runtime_param().coerce(value, own, context))  # noqa: B023
            assert plain == theirs, word


def outcome(convert):
    """What a conversion gave, or how it failed, with the type."""
    try:
        found = convert()
    except Exception as error:  # noqa: BLE001 - whatever it is, both have to raise it
        return type(error), str(error)
    return type(found), found


def test_usual_words_are_plain():
    def found(command, name, value):
        parameter = next(p for p in COMMANDS[command].params if p.name == name)
        about = parameter.type_descriptor
        return plain_value(value, about.annotation, about.parameter_info)

    assert found("analyze", "run", "runs/x") == place("runs/x")
    assert str(found("analyze", "output", "plan.json")) == "plan.json"
    assert found("analyze", "target", "bf16") == "bf16"
    assert found("analyze", "shards", "4") == 4
    assert found("analyze", "shards", "0") is NOT_PLAIN  # typer says what the least is
    assert found("analyze", "target", "bf17") is NOT_PLAIN
