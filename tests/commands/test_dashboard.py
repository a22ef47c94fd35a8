"""``mpdiag dashboard``: what it starts, for whom, and what it refuses."""

import signal
import socket
import subprocess
import sys
from functools import partial

import click
import pytest
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.commands import dashboard
from mpdiag.installation import bundled, extras
from mpdiag.launching.processes import own_process


@pytest.fixture
def started(monkeypatch):
    calls = []

    def call(command, env):
        calls.append((command, env))
        return 0

    monkeypatch.setattr(dashboard, "run_server", call)
    monkeypatch.setattr(extras, "find_spec", lambda name: name == "streamlit")
    return calls


def test_it_serves_this_machine_alone_and_sends_nothing(started, tmp_path):
    result = CliRunner().invoke(app, ["dashboard", str(tmp_path), "--port", "8777", "--no-browser"])
    assert result.exit_code == 0
    ((command, environment),) = started
    assert command[:4] == [*own_process(dashboard.PROCESS), "run"]
    assert {
        "--server.address=localhost",
        "--server.port=8777",
        "--server.headless=true",
        "--browser.gatherUsageStats=false",
        "--client.showErrorDetails=none",
        "--server.enableCORS=true",
        "--server.enableXsrfProtection=true",
        "--server.enableAgentApi=false",
        "--server.allowedHosts=localhost",
    } <= set(command)
    assert environment[dashboard.FOLDER_VARIABLE] == str(tmp_path)


def test_each_dashboard_has_a_token_of_its_own_that_no_other_user_sees(started):
    for words in (["dashboard"], ["dashboard"], ["dashboard", "--no-token"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    first, second, none = [environment[dashboard.TOKEN_VARIABLE] for _, environment in started]
    assert len(first) > 40
    assert first != second
    assert none == ""
    assert not any(first in word for command, _ in started for word in command)


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
    assert "pip install streamlit" in "".join(result.stderr.split("\n"))


SERVER = """
import signal, socket, sys, time
server = socket.create_server(("localhost", int(sys.argv[1])))
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import sys
from mpdiag.commands.dashboard import run_server
sys.exit(run_server([sys.executable, "-c", sys.argv[2], sys.argv[1]], None))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_ends_the_command_ends_its_server(number):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    words = [sys.executable, "-c", PARENT, str(port), SERVER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        child.send_signal(number)
        child.wait(20)
    with socket.socket() as probe:
        assert probe.connect_ex(("localhost", port)) != 0
    assert child.returncode > 0


def test_ctrl_c_while_the_server_starts_ends_it(monkeypatch):
    begun = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            begun.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    monkeypatch.setattr(dashboard, "_ended", partial(dashboard._ended, seconds=0.1))
    held = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = dashboard.run_server([sys.executable, "-c", "import time; time.sleep(60)"], None)
    finally:
        signal.signal(signal.SIGINT, held)
    assert (code, begun[0].poll()) == (128 + signal.SIGTERM, -signal.SIGTERM)


def test_a_port_in_use_is_said_with_the_option(started, tmp_path):
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
        result = CliRunner().invoke(app, ["dashboard", str(tmp_path), "--port", port])
    assert (result.exit_code, started) == (2, [])
    assert f"port {port} is in use: choose another one with --port" in result.stderr


def test_places_in_a_clone_and_in_an_install(root, tmp_path, monkeypatch):
    assert bundled.app_folder() == root / "app"
    installed = tmp_path / "site" / "mpdiag"
    (installed / "_app").mkdir(parents=True)
    (installed / "_app" / "main.py").touch()
    monkeypatch.setattr(bundled, "_PACKAGE", installed)
    assert bundled.app_folder() == installed / "_app"
    with pytest.raises(bundled.RunNotFound, match="has no sample_runs"):
        bundled.sample_runs()


def test_streamlit_is_run_while_the_imports_go_on(monkeypatch):
    loaded, called = [], []
    monkeypatch.setattr(dashboard, "import_module", loaded.append)

    def interrupted(prog_name, standalone_mode):
        called.append((prog_name, standalone_mode))
        raise click.Abort  # what a Ctrl-C becomes: it ends the server, and is no failure

    cli = pytest.importorskip("streamlit.web.cli", reason="needs Streamlit, of the extra `app`")
    monkeypatch.setattr(cli, "main", interrupted)
    threads = []
    real = dashboard.Thread

    def thread(**options):
        threads.append(real(**options))
        return threads[0]

    monkeypatch.setattr(dashboard, "Thread", thread)
    dashboard.main()
    threads[0].join(10)
    assert called == [("streamlit", False)]
    assert tuple(loaded) == dashboard.PAGES_NEED
    assert threads[0].daemon


def test_what_cannot_be_imported_is_left_to_the_page(monkeypatch):
    tried = []

    def fail(name):
        tried.append(name)
        raise ImportError(name)

    monkeypatch.setattr(dashboard, "import_module", fail)
    dashboard.load_ahead()
    assert tuple(tried) == dashboard.PAGES_NEED


def test_every_name_exists_and_torch_is_not_among_what_they_load(root):
    code = (
        "import sys; from mpdiag.commands.dashboard import *; "
        "[import_module(name) for name in PAGES_NEED]; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=False, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
