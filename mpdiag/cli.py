"""The ``mpdiag`` command: its commands in the order of the help, and errors as exit codes.

Each command lies in a file of its own in ``mpdiag/commands/``. Only typer and light modules are
imported here and at the top of those files; what a command needs, it imports when it runs, so that
``mpdiag --help`` and shell completion answer at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mpdiag.commands import (
    analyze,
    board,
    compare,
    dashboard,
    demo,
    doctor,
    export,
    profile,
    record,
    replay,
    report,
    runs,
    search,
    train,
    why,
)
from mpdiag.commands.shared.scripts import SCRIPT_SETTINGS
from mpdiag.errors import ExitCode, MpdiagError
from mpdiag.version import __version__

INTERRUPTED = 130
PIPE_CLOSED = 141  # what a shell reports of a program that SIGPIPE ended


class _ErrorsAsExitCodes(TyperGroup):
    """The one place where errors become exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except MpdiagError as error:
            raise _failure(str(error), error.exit_code) from None
        except BrokenPipeError:
            # The reader has gone. What is still buffered must not fail at exit.
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
    cls=_ErrorsAsExitCodes,
    no_args_is_help=True,
    rich_markup_mode=None,  # help in rich takes longer than everything else together
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


# The help lists the commands in this order.
app.command()(demo.demo)
app.command()(search.search)
app.command(context_settings=SCRIPT_SETTINGS)(record.record)
app.command(context_settings=SCRIPT_SETTINGS)(train.train)
app.command(cls=profile.ProfileCommand)(profile.profile)
app.command()(analyze.analyze)
app.command()(why.why)
app.command()(replay.replay)
app.command()(compare.compare)
app.command()(report.report)
app.command()(dashboard.dashboard)
app.command()(runs.runs)
app.command()(doctor.doctor)
app.command()(export.export)
app.command()(board.board)


def main() -> None:
    """Run the command; the entry point of the installed script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
