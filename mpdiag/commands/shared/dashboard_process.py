"""Streamlit's own command line, in a process that meanwhile loads what the dashboard's pages import.

A page's imports take longer than its figures. They are loaded while the server starts and while the
browser loads Streamlit's own scripts, so that the first view does not wait for them.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from threading import Thread

PAGES_NEED = (
    "pandas",
    "plotly.graph_objects",
    "mpdiag.analysis.analyzer",
    "mpdiag.reports.registry",
    "mpdiag.reports.contents",
)
"""What takes long to import; each page imports the rest itself."""


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
