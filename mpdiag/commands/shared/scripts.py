"""What the commands that run a training script share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mpdiag.files.paths import AnyPath, is_remote

SCRIPT_SETTINGS: dict[str, Any] = {"allow_interspersed_args": False}
"""Settings of a command that a script follows: the script's options are not the command's."""

ScriptWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- SCRIPT ARGS…", help="What you would type after `python`."),
]


def shortest_path(folder: AnyPath) -> AnyPath:
    """A path relative to the working folder where it lies inside it; others as they are."""
    if is_remote(folder):
        return folder
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
