"""Arguments and options that several commands share, and the exit code of ``--strict``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpdiag.errors import ExitCode
from mpdiag.files.paths import place

if TYPE_CHECKING:
    from collections.abc import Iterable

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", parser=place, help="The run's folder, or its URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 1 if there are warnings or errors.")
]
Target = Literal["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]
Board = Literal["tensorboard", "wandb"]


def exit_on_findings(strict: bool, severities: Iterable[str]) -> None:
    """With ``--strict``, exit with 1 if any finding is a warning or an error."""
    if strict and any(severity != "info" for severity in severities):
        raise typer.Exit(ExitCode.FINDINGS)
