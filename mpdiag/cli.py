"""The ``mpdiag`` command: its commands in the order of the help, and errors as exit codes.

Each command lies in a file of its own in ``mpdiag/commands/``, which is imported when the command is
asked for. Only typer and light modules are imported here and at the top of those files; what a command
needs, it imports when it runs, so that ``mpdiag --help`` and shell completion answer at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mpdiag.commands.shared.command_table import CommandTable
from mpdiag.commands.shared.failures import asked_for_json, error_document, value_sentence
from mpdiag.commands.shared.plain_values import read_plainly
from mpdiag.errors import ExitCode, MpdiagError
from mpdiag.version import __version__

INTERRUPTED = 130
PIPE_CLOSED = 141  # what a shell reports of a program that SIGPIPE ended


_WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's error for a call that makes no sense, which it does not export."""
_JSON = "mpdiag.json"


class _ErrorsAsExitCodes(TyperGroup):
    """The commands, and the one place where errors become exit codes, or JSON if that was asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": CommandTable()})

    def get_params(self, ctx: Any) -> list[Any]:
        """The options before a command."""
        return [read_plainly(parameter) for parameter in super().get_params(ctx)]

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - as typer has it
        """Their names, in the order of the help."""
        return list(self.commands)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before the command, and note whether any word asks for JSON."""
        ctx.meta[_JSON] = asked_for_json(args)
        try:
            return super().parse_args(ctx, args)
        except _WrongUsage as error:
            _explain(error, as_json=ctx.meta[_JSON])
            raise

    def invoke(self, ctx: Any) -> Any:
        as_json = ctx.meta[_JSON]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except MpdiagError as error:
            raise _failure(error, str(error), error.exit_code, as_json=as_json) from None
        except BrokenPipeError:
            # The reader has gone. What is still buffered must not fail at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:
            if error.filename is None:
                raise
            message = f"cannot use {error.filename}: {error.strerror}"
            raise _failure(error, message, ExitCode.INPUT, as_json=as_json) from None
        except _WrongUsage as error:
            _explain(error, as_json=as_json)
            raise
        except KeyboardInterrupt as error:
            if as_json:
                _show_error(error, "interrupted", INTERRUPTED)
            raise typer.Exit(INTERRUPTED) from None
        return result


def _failure(error: Exception, message: str, code: int, *, as_json: bool) -> typer.Exit:
    from mpdiag.reports.terminal import complain

    if as_json:
        _show_error(error, message, code)
    complain(message)
    return typer.Exit(code)


def _explain(error: Any, *, as_json: bool) -> None:
    """Put an error of typer's into our words; typer prints it, and exits with 2."""
    if isinstance(error, typer.BadParameter) and error.message:
        checked = getattr(error.__cause__, "errors", None)
        error.message = value_sentence(error.message, checked() if checked is not None else ())
    if as_json:
        _show_error(error, error.format_message(), ExitCode.USAGE)


def _show_error(error: BaseException, message: str, code: int) -> None:
    from mpdiag.reports.terminal import show_json

    show_json(error_document(type(error).__name__, message, code))


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


def main() -> None:
    """Run the command; the entry point of the installed script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
