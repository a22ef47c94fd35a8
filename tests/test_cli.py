"""The command: its help, its exit codes, and what goes to stdout and to stderr."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import mpdiag.runs.run
from mpdiag import cli
from mpdiag.cli import app, command
from mpdiag.errors import DamagedRun, ExitCode, NewerSchema, RunExists, RunNotFound, UsageError
from mpdiag.version import __version__

COMMANDS = {name: command(name) for name in cli.COMMANDS}


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


def test_help_fits_a_terminal_without_cutting_a_sentence():
    assert "..." not in run("--help").stdout.partition("Commands:")[2]


def test_version():
    assert run("--version").stdout == f"mpdiag {__version__}\n"


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "mpdiag", "--version"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert child.stdout == f"mpdiag {__version__}\n"


def test_the_help_of_record_fits_a_terminal_of_24_lines():
    """With the line that was typed."""
    assert len(run("record", "-h").stdout.splitlines()) < 24


def test_each_command_is_a_function_in_a_file_of_its_name(root):
    homes = {name: command.callback.__module__ for name, command in COMMANDS.items()}
    assert homes == {name: f"mpdiag.commands.{name}" for name in COMMANDS}
    places = [root / "mpdiag" / "commands"]
    assert {m.name for m in pkgutil.iter_modules(map(str, places))} == {"shared", *COMMANDS}


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
        ["why"],
        ["runs", "a", "b"],
    ],
)
def test_a_call_that_makes_no_sense_exits_with_2(words):
    result = run(*words)
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert "Error: " in result.stderr


@pytest.mark.parametrize("command", [["record"], ["train", "--plan", "plan.json"]])
def test_no_script_is_run_for_a_run_folder_that_is_a_file(tmp_path, command):
    place, script = tmp_path / "runs.txt", tmp_path / "script.py"
    place.write_text("kept")
    script.write_text("raise SystemExit('the script was run')")
    result = CliRunner().invoke(app, [*command, "--out", str(place), "--", str(script)])
    assert result.exit_code == 2
    assert result.stderr.strip() == f"error: {place} is a file: name a folder with --out"
    assert place.read_text() == "kept"


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
