"""``mpdiag dashboard``: what it starts, for whom, and what it refuses."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.installation import bundled, extras
from mpdiag.launching import dashboard


@pytest.fixture
def started(monkeypatch):
    calls = []

    def call(command, env):
        calls.append((command, env))
        return 0

    monkeypatch.setattr(dashboard.subprocess, "call", call)
    monkeypatch.setattr(extras, "find_spec", lambda name: name == "streamlit")
    return calls


def test_it_serves_this_machine_alone_and_sends_nothing(started, tmp_path):
    result = CliRunner().invoke(app, ["dashboard", str(tmp_path), "--port", "8777", "--no-browser"])
    assert result.exit_code == 0
    ((command, environment),) = started
    assert command[:4] == [sys.executable, "-m", "streamlit", "run"]
    assert {
        "--server.address=localhost",
        "--server.port=8777",
        "--server.headless=true",
        "--browser.gatherUsageStats=false",
        "--client.showErrorDetails=none",
    } <= set(command)
    assert environment[dashboard.FOLDER_VARIABLE] == str(tmp_path)


def test_nothing_named_means_the_sample_runs(started, root):
    assert CliRunner().invoke(app, ["dashboard"]).exit_code == 0
    assert started[0][1][dashboard.FOLDER_VARIABLE] == str(root / "sample_runs")


def test_a_folder_that_is_not_there(started, tmp_path):
    result = CliRunner().invoke(app, ["dashboard", str(tmp_path / "nowhere")])
    assert result.exit_code == 3
    assert "there is no folder" in result.stderr
    assert started == []


def test_without_streamlit(started, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["dashboard"])
    assert result.exit_code == 2
    assert "pip install 'mpdiag[app]'" in "".join(result.stderr.split("\n"))


def test_places_in_a_clone_and_in_an_install(root, tmp_path, monkeypatch):
    assert bundled.app_folder() == root / "app"
    installed = tmp_path / "site" / "mpdiag"
    (installed / "_app").mkdir(parents=True)
    (installed / "_app" / "main.py").touch()
    monkeypatch.setattr(bundled, "_PACKAGE", installed)
    assert bundled.app_folder() == installed / "_app"
    with pytest.raises(bundled.RunNotFound, match="has no sample_runs"):
        bundled.sample_runs()
