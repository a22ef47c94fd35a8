"""The ``mpdiag`` command: its commands in the order of the help, and errors as exit codes.

Each command lies in a file of its own in ``mpdiag/commands/``, which is imported when the command is
asked for. Only typer and light modules are imported here and at the top of those files; what a command
needs, it imports when it runs, so that ``mpdiag --help`` and shell completion answer at once.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mpdiag.commands.shared.examples import epilog
from mpdiag.commands.shared.options import PlainCommand
from mpdiag.display.wording import did_you_mean
from mpdiag.errors import ExitCode, MpdiagError
from mpdiag.version import __version__

COMMANDS = (
    "record", "analyze", "train", "compare", "diff", "fingerprint", "mismatch", "profile", "why",
    "explain", "replay", "audit", "search", "report", "dashboard", "runs", "export", "board", "doctor",
    "demo",
)  # fmt: skip
"""In the order of the help. Each is the function of that name in a module of that name; a module whose
command needs a class of its own has it as ``COMMAND_CLASS``."""
RUNS_A_SCRIPT = ("record", "train")
"""Commands that a script follows, with or without ``--`` before it: its options are not theirs."""
SCHEMA_VERSION = 1
INTERRUPTED = 130
PIPE_CLOSED = 141  # what a shell reports of a program that SIGPIPE ended
_CHOICE = re.compile(r"'(.*)' is not one of ('.*')\.?", re.DOTALL)
_NUMBERS = {
    "int_parsing": "{input!r} is not a whole number",
    "int_from_float": "{input!r} is not a whole number",
    "float_parsing": "{input!r} is not a number",
    "greater_than_equal": "{input} is too small: the least is {ge}",
    "less_than_equal": "{input} is too large: the most is {le}",
}
"""What typer's library for values finds wrong with a number, by its name for it."""
_WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's error for a call that makes no sense, which it does not export."""
_JSON = "mpdiag.json"


class _ErrorsAsExitCodes(TyperGroup):
    """The commands, and the one place where errors become exit codes, or JSON if that was asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - as typer has it
        """A command by its name; None for a name that none has."""
        return command(cmd_name) if cmd_name in COMMANDS else None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before the command, and note whether any word asks for JSON."""
        ctx.meta[_JSON] = asked_for_json(args)
        try:
            with _output_told():
                return super().parse_args(ctx, args)
        except _WrongUsage as error:
            _explain(error, as_json=ctx.meta[_JSON])
            raise

    def invoke(self, ctx: Any) -> Any:
        as_json = ctx.meta[_JSON]
        with _output_told():
            return self._invoke(ctx, as_json=as_json)

    def _invoke(self, ctx: Any, *, as_json: bool) -> Any:
        try:
            return super().invoke(ctx)
        except MpdiagError as error:
            raise _failure(error, str(error), error.exit_code, as_json=as_json) from None
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


_UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing what is printed."""


@contextmanager
def _output_told() -> Iterator[None]:
    """Whatever happens inside, write what was printed; a full disk and a closed pipe are exit codes."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _UNWRITTEN or error.filename is not None:
            raise  # of a file, or of a connection: not of what is printed
        # What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has gone
            raise typer.Exit(PIPE_CLOSED) from None
        message = f"cannot write the output: {error.strerror}"
        raise _failure(error, message, ExitCode.INPUT, as_json=False) from None


@cache
def command(name: str) -> Any:
    """The typer command of a name in ``COMMANDS``, whose module is imported now."""
    module = import_module(f"mpdiag.commands.{name}")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {"allow_interspersed_args": False} if name in RUNS_A_SCRIPT else None
    own = getattr(module, "COMMAND_CLASS", PlainCommand)
    alone.command(cls=own, context_settings=settings, epilog=epilog(name))(getattr(module, name))
    return typer.main.get_command(alone)


def asked_for_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON; what follows ``--`` is a script's own."""
    if "--" in words:
        return "--json" in words[: words.index("--")]
    return "--json" in words and words[0] not in RUNS_A_SCRIPT


def value_sentence(message: str, found: Sequence[Mapping[str, Any]] = ()) -> str:
    """What is wrong with the value of an option, without the words of the library that checks it.

    Args:
        message: As typer has it.
        found: What pydantic found, where typer asked it.
    """
    first = found[0] if found else {}
    if first.get("type") in _NUMBERS:
        bounds = first.get("ctx") or {}
        return _NUMBERS[first["type"]].format(input=first.get("input"), **bounds)
    message = message.removeprefix("Value error, ")
    choice = _CHOICE.fullmatch(message)
    if choice is None:
        return message
    names = [name.strip().strip("'") for name in choice[2].split(",")]
    hint = did_you_mean(choice[1], names)
    return f"{choice[1]!r} is unknown{hint}: choose one of {', '.join(names)}"


def _failure(error: Exception, message: str, code: int, *, as_json: bool) -> typer.Exit:
    from mpdiag.reports.terminal import complain

    if as_json:
        _show_error(error, message, code)
    complain(message)
    return typer.Exit(code)


def _explain(error: Any, *, as_json: bool) -> None:
    """Put an error of typer's into our words; typer prints it, and exits with 2."""
    if isinstance(error, typer.BadParameter) and not error.message:  # it is missing: say what it is
        error.message = getattr(error.param, "help", None) or ""
    elif isinstance(error, typer.BadParameter):
        checked = getattr(error.__cause__, "errors", None)
        error.message = value_sentence(error.message, checked() if checked is not None else ())
    if as_json:
        _show_error(error, error.format_message(), ExitCode.USAGE)


def _show_error(error: BaseException, message: str, code: int) -> None:
    """Print the document of a command that fails under ``--json``."""
    from mpdiag.reports.terminal import show_json

    told = {"kind": type(error).__name__, "message": message, "exit_code": int(code)}
    show_json({"schema_version": SCHEMA_VERSION, "error": told})


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
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):
            if stream.encoding == "utf-8":  # a path that is no UTF-8 is printed as it is
                stream.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
