"""The app without a browser and in one."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import made_runs as hand
import pytest
from browsing import PATIENCE, browser
from drawn_runs import analysis

__all__ = ["analysis", "browser"]


@pytest.fixture
def opened(root, monkeypatch):
    """Open the app on a folder of runs, with query parameters."""

    testing = pytest.importorskip("streamlit.testing.v1", reason="needs the extra `app`")

    def open_app(folder=root / "sample_runs", view="runs", **query):
        monkeypatch.setenv("MPDIAG_RUNS", str(folder))
        test = testing.AppTest.from_file(str(root / "app" / "main.py"), default_timeout=60)
        for name, value in query.items():
            test.query_params[name] = value
        return test.switch_page(f"views/{view}.py").run()

    return open_app


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """A folder with two sample runs of one model, a hostile one and a damaged one."""
    folder = tmp_path_factory.mktemp("browser") / "runs"
    for name in ("ssd", "ssd-2"):
        shutil.copytree(root / "sample_runs" / name, folder / name)
    hand.write_run(folder / "hostile")
    (folder / "torn").mkdir()
    (folder / "torn" / "meta.json").write_text('{"schema_')
    return folder


@contextmanager
def served(runs, root, *words):
    """The dashboard, served as a user serves it: the address that it prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mpdiag", "dashboard", str(runs), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    server = subprocess.Popen(
        [*command, "--no-browser", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        address = server.stdout.readline().removeprefix("The dashboard is at ").strip()
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://localhost:{port}/_stcore/health", timeout=2)
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)
        server.stdout.close()


@pytest.fixture(scope="module")
def address(browser, runs, root):
    """Without a token, which each new context of a browser would have to show."""
    with served(runs, root, "--no-token") as printed:
        yield printed.rstrip("/")


@pytest.fixture
def locked(browser, runs, root):
    """The address of a dashboard with its token."""
    with served(runs, root) as printed:
        yield printed


@pytest.fixture
def page(browser):
    """A page that notes each error, and each request that leaves this machine."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.troubles = []
    # Of every page of the context: a test may open a second one.
    context.on("weberror", lambda found: page.troubles.append(str(found.error)))
    context.on("console", lambda message: _note(page, message))
    context.on("request", lambda request: _leaves(page, request.url))
    yield page
    context.close()
    assert page.troubles == []


def _note(page, message):
    # Streamlit asks for its health below each page's path first, and then where it is.
    if message.type == "error" and "/_stcore/" not in message.location.get("url", ""):
        page.troubles.append(message.text)


def _leaves(page, url):
    if not url.startswith(("http://localhost:", "data:", "blob:", "file:", "ws://localhost:")):
        page.troubles.append(f"asked for {url}")
