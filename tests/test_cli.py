"""The command: its help, its exit codes, and what goes to stdout and to stderr."""

import errno
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from calls import COMMANDS, run

import mpdiag.reports.next_commands
import mpdiag.runs.run
from mpdiag import cli
from mpdiag.errors import DamagedRun, ExitCode, NewerSchema, RunExists, RunNotFound, UsageError
from mpdiag.version import __version__


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
    # That of record in 24 lines, with the line that was typed.
    assert len(run("record", "-h").stdout.splitlines()) < 24


def test_version_and_the_module_is_the_command(real, root):
    assert run("--version").stdout == f"mpdiag {__version__}\n"
    assert real("-m", "mpdiag", "--version", cwd=root).out == f"mpdiag {__version__}\n"


def test_each_command_is_a_function_in_a_file_of_its_name(root):
    homes = {name: command.callback.__module__ for name, command in COMMANDS.items()}
    assert homes == {name: f"mpdiag.commands.{name}" for name in COMMANDS}
    places = [root / "mpdiag" / "commands"]
    assert {m.name for m in pkgutil.iter_modules(map(str, places))} == {"shared", *COMMANDS}


@pytest.fixture
def failing(monkeypatch):
    """What ``mpdiag runs`` does where reading a folder raises an error."""
    assert mpdiag.reports.next_commands  # imported later, it would keep the mock

    def call(error):
        monkeypatch.setattr(mpdiag.runs.run, "list_runs", Mock(side_effect=error))
        return run("runs")

    return call


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
def test_errors_become_exit_codes(failing, error, code):
    result = failing(error)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.count("\n") == (0 if code == 130 else 1)


def test_a_bug_is_not_dressed_up_as_an_expected_failure_and_a_message_is_never_markup(failing):
    assert isinstance(failing(ZeroDivisionError()).exception, ZeroDivisionError)
    told = failing(RunNotFound("[bold]a[/bold] [/] \nb")).stderr
    assert told == "error: [bold]a[/bold] [/]  b\n"


FULL = Path("/dev/full")
TELLING = [["runs", "."], ["runs", ".", "--json"], ["runs", "?", "--json"], ["--help"]]
"""Commands that print data, that fail in JSON, and that only print."""


@pytest.mark.parametrize("words", TELLING)
def test_a_reader_who_leaves_is_no_error(tmp_path, words):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "meta.json").write_text('{"schema_version": 1, "state": "finished"}')
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mpdiag", *words]
    child = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
    )
    os.close(write)
    assert (child.returncode, child.stderr) == (141, "")


def test_an_error_of_a_connection_is_not_told_as_one_of_the_output():
    with pytest.raises(ConnectionRefusedError), cli._output_told():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("words", TELLING)
def test_output_that_a_full_disk_takes_not_is_an_error_in_one_sentence(tmp_path, words):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "meta.json").write_text('{"schema_version": 1, "state": "finished"}')
    command = [sys.executable, "-m", "mpdiag", *words]
    with FULL.open("w") as full:
        child = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
        )
    said = "error: cannot write the output: No space left on device\n"
    assert (child.returncode, child.stderr) == (ExitCode.INPUT, said)
    with FULL.open("w") as full:  # nor does a full stderr change an answer
        child = subprocess.run(
            command, stderr=full, stdout=subprocess.PIPE, text=True, check=False, cwd=tmp_path
        )
    assert child.stdout
    assert child.returncode == (ExitCode.INPUT if "?" in words else ExitCode.OK)
