"""What is refused: in one sentence of our words, with the exit code, as JSON too, and nothing done."""

import json
from pathlib import Path

import pytest
from calls import COMMANDS, run

from mpdiag.cli import asked_for_json, value_sentence
from mpdiag.errors import ExitCode

ROWS = [
    line.split("\t")
    for line in Path(__file__).with_name("refusals.tsv").read_text(encoding="utf-8").splitlines()
]
"""Words (+ is a space in a name), exit code, and what is said of them."""
SPEAKERS = {name for name, c in COMMANDS.items() if any("--json" in p.opts for p in c.params)}


@pytest.fixture
def places(trained, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1  # precious")
    return {
        "runs": trained,
        "samples": root / "sample_runs",
        "file": tmp_path / "mine.py",
        "new": tmp_path / "new",
    }


@pytest.mark.parametrize(("line", "code", "sentence"), ROWS)
def test_a_refusal_says_why(places, line, code, sentence):
    words = [word.format(**places).replace("+", " ") for word in line.split()]
    done = run(*words)
    said = " ".join(done.stderr.split())
    assert (done.exit_code, done.stdout) == (int(code), "")
    assert sentence.format(**places) in said
    assert not [w for w in ("Value error", "Input should be", "pydantic", "Traceback") if w in said]
    assert done.exit_code == ExitCode.USAGE or done.stderr.count("\n") == 1
    if words[0] in SPEAKERS:
        told = run(words[0], "--json", *words[1:])
        error = json.loads(told.stdout)["error"]
        assert error["exit_code"] == told.exit_code == done.exit_code
        assert error["kind"]
        assert error["message"] in " ".join(told.stderr.split())
    assert [path.name for path in places["file"].parent.iterdir()] == ["mine.py"]
    assert "precious" in places["file"].read_text()


@pytest.mark.parametrize(
    "words", ["--scaler constant --init-scale 8", "--init-scale 1e9 --max-scale 1e10"]
)
def test_settings_that_a_scaler_has_are_taken(trained, words):
    assert run("replay", trained / "first run", *words.split()).exit_code == ExitCode.OK


def test_every_command_that_speaks_json_is_refused_something():
    assert {row[0].split()[0] for row in ROWS} >= SPEAKERS


@pytest.mark.parametrize(
    "words",
    [
        ("analyse", "run", "--json"),
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


def test_the_words_of_older_libraries_are_understood_too():
    choice = value_sentence("'fp61' is not one of 'fp16', 'bf16'.")
    assert choice.endswith("choose one of fp16, bf16")
    assert value_sentence("Value error, too long") == "too long"
    assert value_sentence("anything else") == "anything else"
