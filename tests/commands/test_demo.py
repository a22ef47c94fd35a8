"""``mpdiag demo``: a word that the chosen form would not look at is refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.errors import ExitCode


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--only", "digits"], "for one workload, mpdiag demo digits"),
        (["digits", "--only", "vit"], "for one workload, mpdiag demo vit"),
        (["digits", "--seeds", "5"], "--seeds is for --all: add --all"),
        (["--done"], "--done is for --all"),
        (["--markdown"], "--markdown is for --all"),
        (["--json"], "--json is for --all"),
        (["--all", "digits"], "choose some with --only NAME"),
        (["--all", "--seed", "3"], "--seed is for one workload, not for --all"),
        (["--all", "--no-masters"], "--no-masters is for one workload"),
        (["--all", "--record-only"], "--record-only is for one workload"),
    ],
)
def test_what_would_be_ignored_is_refused(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo", *words])
    assert done.exit_code == ExitCode.USAGE
    assert sentence in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [("demo", "digits", "--folder"), ("demo", "--all", "--folder"), ("search", "gpt", "--run")],
)
def test_a_file_for_a_folder_is_refused_before_anything_is_trained(words, tmp_path):
    place = tmp_path / "notes.txt"
    place.write_text("precious")
    done = CliRunner().invoke(app, [*words, str(place)])
    assert done.exit_code == ExitCode.USAGE
    assert done.stderr == f"error: {place} is a file: name a folder with {words[-1]}\n"
