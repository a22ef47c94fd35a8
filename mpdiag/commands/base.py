"""The program, its errors and the options that several commands share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from mpdiag.errors import ExitCode, MpdiagError, UsageError
from mpdiag.files.paths import place
from mpdiag.numerics.loss_scalers import SCALERS, scaler_class
from mpdiag.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

INTERRUPTED = 130
PIPE_CLOSED = 141  # as the shell reports a program that SIGPIPE ended


class _Commands(TyperGroup):
    """The one place where errors become exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except MpdiagError as error:
            raise _failure(str(error), error.exit_code) from None
        except BrokenPipeError:
            # Nobody reads any more. What is still buffered must not fail at exit, either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:
            if error.filename is None:
                raise
            message = f"cannot use {error.filename}: {error.strerror}"
            raise _failure(message, ExitCode.INPUT) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        return result


def _failure(message: str, code: ExitCode) -> typer.Exit:
    from mpdiag.reports.terminal import complain

    complain(message)
    return typer.Exit(code)


app = typer.Typer(
    name="mpdiag",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # help in rich costs more time than all of the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", parser=place, help="The run's folder, or its URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 1 if there are warnings or errors.")
]
Target = Literal["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]
Board = Literal["tensorboard", "wandb"]


def known_scaler(name: str) -> str:
    """Refuse the name of a loss scaler that does not exist, listing those that do."""
    try:
        scaler_class(name)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    return name


# Read when a command runs, not when this file is imported: a scaler may be registered later.
ScalerOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        parser=known_scaler,
        autocompletion=lambda: list(SCALERS),
        help=f"The loss scaler to run: {', '.join(SCALERS)}.",
    ),
]


def exit_on_findings(strict: bool, severities: Iterable[str]) -> None:
    """With ``--strict``: exit with 1 if any finding is more than information."""
    if strict and any(severity != "info" for severity in severities):
        raise typer.Exit(ExitCode.FINDINGS)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mpdiag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    """Record an FP32 training, learn what mixed precision would lose, get a plan."""
