"""The dashboard's server loads what its pages import before a browser asks."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from mpdiag.commands.shared import dashboard_process

cli = pytest.importorskip("streamlit.web.cli", reason="needs Streamlit, of the extra `app`")


def test_streamlit_is_run_while_the_imports_go_on(monkeypatch):
    loaded, called = [], []
    monkeypatch.setattr(dashboard_process, "import_module", loaded.append)

    def interrupted(prog_name, standalone_mode):
        called.append((prog_name, standalone_mode))
        raise click.Abort  # what a Ctrl-C becomes: it ends the server, and is no failure

    monkeypatch.setattr(cli, "main", interrupted)
    threads = []
    real = dashboard_process.Thread

    def thread(**options):
        threads.append(real(**options))
        return threads[0]

    monkeypatch.setattr(dashboard_process, "Thread", thread)
    dashboard_process.main()
    threads[0].join(10)
    assert called == [("streamlit", False)]
    assert tuple(loaded) == dashboard_process.PAGES_NEED
    assert threads[0].daemon


def test_what_cannot_be_imported_is_left_to_the_page(monkeypatch):
    tried = []

    def fail(name):
        tried.append(name)
        raise ImportError(name)

    monkeypatch.setattr(dashboard_process, "import_module", fail)
    dashboard_process.load_ahead()
    assert tuple(tried) == dashboard_process.PAGES_NEED


def test_every_name_exists_and_torch_is_not_among_what_they_load(root):
    code = (
        "import sys; from mpdiag.commands.shared.dashboard_process import *; "
        "[import_module(name) for name in PAGES_NEED]; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=False, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
