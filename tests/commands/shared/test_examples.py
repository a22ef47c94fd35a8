"""The end of each command's help: examples that parse, and names that exist."""

import re
import shlex

import pytest
from calls import COMMANDS, run

from mpdiag import workloads
from mpdiag.commands.shared.examples import EXAMPLES, FRAMEWORKS, NAMES, WORKLOADS
from mpdiag.exports.registry import EXPORTERS


def test_each_command_has_examples():
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_is_a_call_that_makes_sense(line):
    program, name, *words = shlex.split(line)
    assert program == "mpdiag"
    assert line in EXAMPLES[name]
    with COMMANDS[name].make_context(name, words):
        pass


def test_the_names_are_those_of_the_registries():
    assert set(FRAMEWORKS) == set(EXPORTERS)
    assert workloads.names() == WORKLOADS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_shows_them_within_80_columns_in_names_that_people_know(name):
    shown = run(name, "--help", COLUMNS="80").stdout
    assert all(f"    {line}\n" in shown for line in EXAMPLES[name])
    for word in NAMES.get(name, ("", ()))[1]:
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80
    # Python's types say nothing of what is meant; names between bars are what can be typed.
    assert re.findall(r"<[^|>]*>", shown) == []
    typed = shown.replace("{seed}", "SEED")  # what search replaces in a script's arguments
    assert not re.search(r"\b(INTEGER|TEXT|PATH|FLOAT)\b|[{}]|…\]\.", typed)
    assert "[[" not in shown.partition("\n\n")[0]  # what may be left out
