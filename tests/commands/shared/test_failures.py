"""What is said of a call that fails, to a person and as JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mpdiag import cli
from mpdiag.cli import app, asked_for_json, command, value_sentence
from mpdiag.errors import ExitCode

COMMANDS = {name: command(name) for name in cli.COMMANDS}
SPEAKERS = sorted(name for name, c in COMMANDS.items() if any("--json" in p.opts for p in c.params))


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("analyze", "r", "--target", "fp61"),
            "'fp61' is unknown (did you mean fp16?): choose one",
        ),
        (("board", "r", "--to", "Tensorbord"), "(did you mean tensorboard?)"),
        (("train", "--plan", "p", "--backend", "emulate", "--", "s"), "(did you mean emulated?)"),
        (("replay", "r", "--scaler", "backof"), "(did you mean backoff?)"),
        (("export", "p", "--to", "tensorfow"), "there is no plan at p"),
        (("demo", "digit"), "(did you mean digits?)"),
        (("demo", "gpt", "--size", "lage"), "(did you mean large?)"),
        (("search", "digit"), "(did you mean digits?)"),
        (("search", "vti"), "(did you mean vit?)"),
        (("profile", "t", "--steps", "x"), "'x' is not a whole number"),
        (("profile", "t", "--steps", "0"), "0 is too small: the least is 1"),
        (("dashboard", "--port", "99999"), "99999 is too large: the most is 65535"),
        (("search", "gpt", "--budget", "long"), "'long' is not a number"),
    ],
)
def test_a_wrong_value_is_said_in_our_words_with_the_one_that_was_meant(words, sentence):
    said = run(*words).stderr
    assert sentence in said
    assert not {"Value error", "Input should be", "pydantic", "Traceback"} & set(said.split(": "))


def test_the_words_of_older_libraries_are_understood_too():
    assert value_sentence("'fp61' is not one of 'fp16', 'bf16'.").endswith(
        "choose one of fp16, bf16"
    )
    assert value_sentence("Value error, too long") == "too long"
    assert value_sentence("anything else") == "anything else"


# -- JSON ------------------------------------------------------------------------------------------

MISSING = {
    "compare": ("compare", "no/such", "no/such"),
    "demo": ("demo", "nonsense"),
    "doctor": ("doctor", "nonsense"),
    "export": ("export", "no/such", "--to", "torch"),
    "search": ("search", "nonsense"),
}


@pytest.mark.parametrize("name", SPEAKERS)
def test_a_failure_under_json_is_one_document_and_the_same_exit_code(name):
    words = MISSING.get(name, (name, "no/such"))
    plain, told = run(*words), run(*words, "--json")
    assert plain.exit_code == told.exit_code != ExitCode.OK
    assert plain.stdout == ""
    document = json.loads(told.stdout)
    assert document["schema_version"] == 1
    assert document["error"]["exit_code"] == told.exit_code
    assert document["error"]["message"] in " ".join(told.stderr.split())
    assert document["error"]["kind"]


@pytest.mark.parametrize(
    "words",
    [
        ("analyse", "run", "--json"),  # no such command
        ("analyze", "run", "--json", "--target", "fp61"),
        ("analyze", "--json"),
        ("record", "--json", "--", "x.py"),  # no such option
        ("--json", "analyze", "run"),
    ],
)
def test_a_call_that_makes_no_sense_is_a_document_too(words):
    told = run(*words)
    assert told.exit_code == ExitCode.USAGE
    assert json.loads(told.stdout)["error"]["exit_code"] == ExitCode.USAGE
    assert "Error: " in told.stderr


def test_what_a_script_is_called_with_asks_for_nothing():
    assert not asked_for_json(["record", "--", "train.py", "--json"])
    assert not asked_for_json(["train", "--plan", "p", "train.py", "--json"])
    assert asked_for_json(["profile", "--json", "--", "train.py"])
    assert not asked_for_json([])
