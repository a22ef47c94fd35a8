"""``mpdiag dashboard``: serve the Streamlit app in ``app/``, on this machine and to its user only.

The server is Streamlit's own command line, in a process that runs this module. A page's imports take
longer than its figures. They are loaded while the server starts and while the browser loads Streamlit's
own scripts, so that the first view does not wait for them.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from secrets import token_urlsafe
from threading import Thread
from typing import Annotated, Any

import typer
from typer import Argument, Option

from mpdiag.errors import UsageError
from mpdiag.installation.bundled import app_folder, sample_runs
from mpdiag.installation.extras import EXTRAS
from mpdiag.launching.processes import own_process
from mpdiag.recording.lifecycle import signals_held

FOLDER_VARIABLE = "MPDIAG_RUNS"
"""The environment variable that names the app's folder of runs."""
TOKEN_VARIABLE = "MPDIAG_DASHBOARD_TOKEN"  # noqa: S105 - its name
"""The environment variable that hands the server its token: arguments are seen by every user."""
PROCESS = "mpdiag.commands.dashboard"
"""The module that the server's process runs."""
PAGES_NEED = (
    "pandas",
    "plotly.graph_objects",
    "mpdiag.analysis.analyzer",
    "mpdiag.reports.registry",
    "mpdiag.reports.text.analysis",
)
"""What takes long to import; each page imports the rest itself."""


def dashboard(
    folder: Annotated[
        Path | None, Argument(metavar="RUNS", help="A folder of runs; default: the sample runs.")
    ] = None,
    port: Annotated[
        int, Option(min=1, max=65535, metavar="PORT", help="The port it listens on.")
    ] = 8501,
    browser: Annotated[bool, Option(help="Open it in a browser.")] = True,
    token: Annotated[bool, Option(help="Require the token of the printed address.")] = True,
) -> None:
    """Look at runs in a browser."""
    raise typer.Exit(serve(folder, port, browser=browser, token=token))


def serve(folder: Path | None, port: int, *, browser: bool = True, token: bool = True) -> int:
    """Run the dashboard until it is stopped.

    Args:
        folder: A folder of runs, or one run; default: the sample runs.
        port: The port it listens on, at localhost.
        browser: Whether to open it in a browser.
        token: Whether its address carries a token, without which it shows nothing.

    Returns:
        The exit code of the server.

    Raises:
        MissingExtra: If Streamlit is not installed.
        RunNotFound: If there is no such folder.
        UsageError: If the port is in use.
    """
    from mpdiag.runs.run import META, list_runs

    EXTRAS["app"].need("the dashboard (on Python 3.11 or newer)")
    runs = sample_runs() if folder is None else folder
    if not (runs / META).is_file():
        list_runs(runs)  # raises if there is no such folder
    _refuse_used(port)
    secret = token_urlsafe() if token else ""
    environment = {**os.environ, FOLDER_VARIABLE: str(runs), TOKEN_VARIABLE: secret}
    return run_server(server_command(port, browser=browser), environment)


def run_server(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a server until it ends; a signal that would end this process ends the server first.

    Returns:
        The exit code of the server; of one that a signal ended, what a shell reports.
    """
    try:
        with signals_held():  # Ctrl-C would break the start off, and the server live on
            server = subprocess.Popen(command, env=environment)
        with server, _handing_on(server):
            code = server.wait()
    except KeyboardInterrupt:  # Ctrl-C in a terminal reaches the server too
        code = _ended(server)
    return code if code >= 0 else 128 - code


def _ended(server: subprocess.Popen[bytes], seconds: float = 3.0) -> int:
    """Wait until a server that was interrupted has ended; end it if it does not."""
    try:
        return server.wait(seconds)
    except subprocess.TimeoutExpired:
        server.terminate()
        return server.wait()


@contextmanager
def _handing_on(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hand signals that end a program on to the server, which would otherwise live on."""
    names = ("SIGTERM", "SIGHUP")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]

    def hand_on(number: int, _frame: Any) -> None:
        server.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse_used(port: int) -> None:
    """Refuse a port that another program listens on.

    Raises:
        UsageError: With the option that chooses another one.
    """
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex(("localhost", port)) == 0:
            raise UsageError(f"port {port} is in use: choose another one with --port")


def server_command(port: int, *, browser: bool) -> list[str]:
    """The command that serves the app, with the options it always needs."""
    options = {
        "server.address": "localhost",
        "server.port": port,
        "server.headless": not browser,
        "server.enableCORS": True,
        "server.enableXsrfProtection": True,
        "server.enableAgentApi": False,
        "server.showEmailPrompt": False,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "logger.hideWelcomeMessage": True,  # it has the address without the token
    }
    words = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    words += [f"--server.allowedHosts={host}" for host in ("localhost", "127.0.0.1")]
    return own_process(PROCESS, "run", str(app_folder() / "served.py"), *words)


def load_ahead() -> None:
    """Import what the pages need; what cannot be imported is left to the page, which says so."""
    for name in PAGES_NEED:
        with suppress(Exception):
            import_module(name)


def main() -> None:
    """Serve as ``python -m streamlit`` does; Ctrl-C is the way to end it, and no failure."""
    from click.exceptions import Abort
    from streamlit.web.cli import main as streamlit

    Thread(target=load_ahead, name="load ahead", daemon=True).start()
    with suppress(Abort):
        streamlit(prog_name="streamlit", standalone_mode=False)


if __name__ == "__main__":
    main()
