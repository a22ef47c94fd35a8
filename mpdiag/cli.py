"""The ``mpdiag`` command. No logic of its own: each command calls into the package and shows it.

Only typer and light modules are imported here; what a command needs, it imports when it runs, so
that ``mpdiag --help`` and shell completion answer at once.
"""

from __future__ import annotations

import sys

# Each import adds its commands to the program; help lists them in this order.
from mpdiag.commands import trying, scripts, judging, looking, handing  # isort: skip
from mpdiag.commands.base import INTERRUPTED, app

__all__ = ["app", "handing", "judging", "looking", "main", "scripts", "trying"]


def main() -> None:
    """Run the command; the entry point of the installed script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
