"""``mpdiag demo`` and ``mpdiag search``: what cannot be trained is refused before anything is."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.errors import ExitCode


@pytest.mark.parametrize(
    "words",
    [("demo", "digits", "--folder"), ("search", "gpt", "--run")],
)
def test_a_file_for_a_folder_is_refused_before_anything_is_trained(words, tmp_path):
    place = tmp_path / "notes.txt"
    place.write_text("precious")
    done = CliRunner().invoke(app, [*words, str(place)])
    assert done.exit_code == ExitCode.USAGE
    assert done.stderr == f"error: {place} is a file: name a folder with {words[-1]}\n"


@pytest.mark.parametrize("command", ["demo", "search"])
def test_a_file_that_defines_no_workload_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1")
    done = CliRunner().invoke(app, [command, "mine.py"])
    assert done.exit_code == ExitCode.INPUT
    assert "mine.py defines no workload" in done.stderr
    done = CliRunner().invoke(app, [command, "yours.py"])
    assert done.exit_code == ExitCode.INPUT
    assert "there is no file yours.py" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_a_device_that_is_not_there_is_refused(tmp_path):
    words = ["demo", "gpt", "--device", "cuda:99", "--folder", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == ExitCode.USAGE
    assert "cannot train on device 'cuda:99'" in done.stderr
    assert not (tmp_path / "runs").exists()
