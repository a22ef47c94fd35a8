"""The command: its help, its exit codes, and what goes to stdout and to stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import mpdiag.runs.run
from mpdiag.cli import app
from mpdiag.errors import DamagedRun, ExitCode, NewerSchema, RunExists, RunNotFound, UsageError
from mpdiag.version import __version__

COMMANDS = typer.main.get_command(app).commands


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def folder(tmp_path):
    """A folder of runs: two that list, one that is damaged, one of a newer schema, and no run."""
    metas = {
        "old": {"schema_version": 1, "state": "finished", "created": "2025-01-01T00:00:00+00:00"},
        "[red]new": {"schema_version": 1, "state": "recording", "created": "2025-02-01T00:00:00"},
        "newer": {"schema_version": 99},
        "damaged": None,
    }
    for name, meta in metas.items():
        (tmp_path / name).mkdir()
        text = "{" if meta is None else json.dumps(meta)
        (tmp_path / name / "meta.json").write_text(text)
    (tmp_path / "no run").mkdir()
    return tmp_path


# -- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_help(name):
    command = COMMANDS[name]
    assert command.help
    for parameter in command.params:
        assert parameter.name == "help" or parameter.help, parameter.name
    result = run(name, "--help")
    assert result.exit_code == ExitCode.OK
    assert command.help.split(".")[0] in " ".join(result.stdout.split())


def test_readme_documents_the_commands_and_no_others(root):
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `mpdiag (\w+)", readme, flags=re.MULTILINE)) == set(COMMANDS)


def test_readme_documents_which_commands_speak_json(root):
    readme = (root / "README.md").read_text(encoding="utf-8")
    speakers = {n for n, c in COMMANDS.items() if any("--json" in p.opts for p in c.params)}
    (sentence,) = re.findall(r"With `--json` \((.*?)\)", readme)
    assert set(re.findall(r"`(\w+)`", sentence)) == speakers


def test_help_fits_a_terminal_without_cutting_a_sentence():
    assert "..." not in run("--help").stdout.partition("Commands:")[2]


def test_version():
    assert run("--version").stdout == f"mpdiag {__version__}\n"


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "mpdiag", "--version"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert child.stdout == f"mpdiag {__version__}\n"


# -- exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-command"],
        ["analyze"],
        ["analyze", "run", "--no-such-option"],
        ["analyze", "run", "--target", "fp12"],
        ["replay", "run", "--scaler", "magic"],
        ["replay", "run", "--hysteresis", "many"],
        ["why", "run"],
        ["runs", "a", "b"],
    ],
)
def test_a_call_that_makes_no_sense_exits_with_2(words):
    result = run(*words)
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert "Error: " in result.stderr


def test_a_missing_input_exits_with_3_and_one_sentence(tmp_path):
    result = run("runs", tmp_path / "nowhere")
    assert result.exit_code == ExitCode.INPUT
    assert result.stdout == ""
    sentence = f"there is no folder {tmp_path / 'nowhere'}: give the folder that holds your runs"
    assert result.stderr == f"error: {sentence}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunNotFound("gone"), 3),
        (DamagedRun("broken"), 3),
        (NewerSchema("newer"), 3),
        (UsageError("nonsense"), 2),
        (RunExists("exists"), 2),
        (PermissionError(13, "Permission denied", "secret"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(monkeypatch, error, code):
    def fail(folder):
        raise error

    monkeypatch.setattr(mpdiag.runs.run, "list_runs", fail)
    result = run("runs")
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.count("\n") == (0 if code == 130 else 1)


def test_a_bug_is_not_dressed_up_as_an_expected_failure(monkeypatch):
    def fail(folder):
        raise ZeroDivisionError

    monkeypatch.setattr(mpdiag.runs.run, "list_runs", fail)
    assert isinstance(run("runs").exception, ZeroDivisionError)


def test_a_message_is_one_line_and_never_markup(monkeypatch):
    def fail(folder):
        message = "[bold]a[/bold] [/] \nb"
        raise RunNotFound(message)

    monkeypatch.setattr(mpdiag.runs.run, "list_runs", fail)
    assert run("runs").stderr == "error: [bold]a[/bold] [/]  b\n"


@pytest.mark.parametrize("words", [["runs", "."], ["runs", ".", "--json"]])
def test_a_reader_who_leaves_is_no_error(folder, words):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mpdiag", *words]
    child = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=folder
    )
    os.close(write)
    assert (child.returncode, child.stderr) == (141, "")


# -- runs ------------------------------------------------------------------------------------------


def test_runs_lists_newest_first_and_says_what_cannot_be_read(folder):
    result = run("runs", folder)
    assert result.exit_code == ExitCode.OK
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines if line[0] in {"[red]new", "old", "damaged", "newer"}] == [
        "[red]new",
        "old",
        "damaged",
        "newer",
    ]
    assert "upgrade mpdiag" in " ".join(result.stdout.split())
    assert result.stderr.startswith("next: mpdiag analyze ")


def test_a_locale_without_our_letters_is_no_reason_to_fail(root):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "mpdiag", "analyze", str(root / "sample_runs" / "digits")]
    child = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert child.stdout.isascii()
    assert b"This can train in FP16" in child.stdout


def test_runs_says_how_much_was_recorded_and_when_it_was_last_written(tmp_path):
    meta = {
        "schema_version": 1,
        "state": "recording",
        "created": "2025-02-01T10:00:00.000+00:00",
        "updated": "2025-02-01T10:05:30.250+00:00",
        "model": {"type": "Detector", "parameters": 12},
        "steps_seen": 60,
        "steps_recorded": 22,
    }
    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd" / "meta.json").write_text(json.dumps(meta))
    _, line = run("runs", tmp_path).stdout.splitlines()
    cells = ["ssd", "recording", "Detector", "22 of 60"]
    moments = ["2025-02-01 10:00:00", "2025-02-01 10:05:30"]
    assert re.split(r"\s{2,}", line.strip()) == [*cells, *moments]


def test_runs_json_is_one_document_and_nothing_else(folder):
    result = run("runs", folder, "--json")
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["schema_version"] == 1
    facts = [(r["name"], r["problem"] is None, r["meta"] is None) for r in document["runs"]]
    assert facts == [
        ("[red]new", True, False),
        ("old", True, False),
        ("damaged", False, True),
        ("newer", False, True),
    ]


def test_no_runs_is_no_error(tmp_path):
    result = run("runs", tmp_path)
    assert result.exit_code == ExitCode.OK
    assert result.stderr == "next: mpdiag demo\n"


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_prints_one_json_document():
    result = run("doctor", "--json")
    assert result.exit_code == ExitCode.OK
    assert json.loads(result.stdout)["mpdiag"] == __version__


def test_doctor_for_a_person():
    result = run("doctor")
    words = " ".join(result.stdout.split())
    assert f"python {sys.version.split()[0]}" in words
    assert result.stderr == "next: mpdiag demo\n"
