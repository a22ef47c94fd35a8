"""``mpdiag dashboard``: serve the Streamlit app in ``app/``, on this machine only."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from mpdiag.installation.bundled import app_folder, sample_runs
from mpdiag.installation.extras import EXTRAS
from mpdiag.runs.run import META, list_runs

if TYPE_CHECKING:
    from pathlib import Path

FOLDER_VARIABLE = "MPDIAG_RUNS"
"""The environment variable that names the app's folder of runs."""


def serve(folder: Path | None, port: int, *, browser: bool = True) -> int:
    """Run the dashboard until it is stopped.

    Args:
        folder: A folder of runs, or one run; default: the sample runs.
        port: The port it listens on, at localhost.
        browser: Whether to open it in a browser.

    Returns:
        The exit code of the server.

    Raises:
        MissingExtra: If Streamlit is not installed.
        RunNotFound: If there is no such folder.
    """
    EXTRAS["app"].need("the dashboard (on Python 3.11 or newer)")
    runs = sample_runs() if folder is None else folder
    if not (runs / META).is_file():
        list_runs(runs)  # raises if there is no such folder
    environment = {**os.environ, FOLDER_VARIABLE: str(runs)}
    return subprocess.call(server_command(port, browser=browser), env=environment)


def server_command(port: int, *, browser: bool) -> list[str]:
    """The command that serves the app, with the options it always needs."""
    options = {
        "server.address": "localhost",
        "server.port": port,
        "server.headless": not browser,
        "server.showEmailPrompt": False,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
    }
    words = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    return [sys.executable, "-m", "streamlit", "run", str(app_folder() / "main.py"), *words]
