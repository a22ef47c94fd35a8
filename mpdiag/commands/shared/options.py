"""Arguments and options that several commands share, and the exit code of ``--strict``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpdiag.errors import ExitCode, UsageError
from mpdiag.files.paths import AnyPath, is_remote, place
from mpdiag.numerics.formats import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

RunArgument = Annotated[
    AnyPath, typer.Argument(metavar="RUN", parser=place, help="The run's folder, or its URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 1 if there are warnings or errors.")
]
if TYPE_CHECKING:
    Target = str
else:  # the choices are the registry's
    Target = Literal[tuple(fmt.name for fmt in TARGETS)]
Board = Literal["tensorboard", "wandb"]


def refuse_suffix(output: Path, what: str, known: tuple[str, ...]) -> None:
    """Refuse a name that promises another kind of file; one without an ending promises nothing.

    Args:
        output: The file to write.
        what: What is written: ``a report``.
        known: The endings that it can have.

    Raises:
        UsageError: With the endings.
    """
    suffix = output.suffix.lower()
    if suffix and suffix not in known:
        message = f"{what} is written as {' or '.join(known)}, not as {suffix}: name {output} anew"
        raise UsageError(message)


def refuse_file(folder: AnyPath, option: str) -> None:
    """Refuse a file where a folder is to be made, before anything is trained for it.

    Raises:
        UsageError: With the option that names a folder.
    """
    if not is_remote(folder) and folder.exists() and not folder.is_dir():
        message = f"{folder} is a file: name a folder with {option}"
        raise UsageError(message)


def given_words(context: typer.Context) -> dict[str, str]:
    """The options and arguments that were typed, by the name of their parameter."""
    return {
        p.name: p.opts[0]
        for p in context.command.params
        if p.name and getattr(context.get_parameter_source(p.name), "name", "") == "COMMANDLINE"
    }


def exit_on_findings(strict: bool, severities: Iterable[str]) -> None:
    """With ``--strict``, exit with 1 if any finding is a warning or an error."""
    if strict and any(severity != "info" for severity in severities):
        raise typer.Exit(ExitCode.FINDINGS)
