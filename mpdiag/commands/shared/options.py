"""Arguments and options that several commands share, how help shows them, and ``--strict``."""

import os
import sys
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from mpdiag.commands.shared.examples import FRAMEWORKS, WORKLOADS
from mpdiag.errors import ExitCode, UsageError
from mpdiag.files.paths import AnyPath, is_remote, place
from mpdiag.numerics.block_recipes import BLOCK_RECIPES
from mpdiag.numerics.formats import TARGETS

RunArgument = Annotated[
    AnyPath, Argument(metavar="RUN", parser=place, help="The run's folder, or its URL.")
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON document instead.")]
StrictOption = Annotated[
    bool, Option("--strict", help="Exit with 1 if there are warnings or errors.")
]
if TYPE_CHECKING:
    Target = str
    BlockTarget = str
else:  # the choices are the registry's
    BlockTarget = Literal[tuple(BLOCK_RECIPES)]
    Target = Literal[(*(fmt.name for fmt in TARGETS), *BLOCK_RECIPES)]
Board = Literal["tensorboard", "wandb", "mlflow", "jsonl"]
WorkloadArgument = Annotated[
    str,
    Argument(
        metavar="WORKLOAD|FILE.py",
        autocompletion=lambda: list(WORKLOADS),
        help="A built-in workload, or a file that defines one.",
    ),
]
ScriptWords = Annotated[
    list[str] | None,
    Argument(metavar="-- SCRIPT ARGS…", help="What you would type after `python`."),
]


class PlainCommand(TyperCommand):
    """A command whose help shows arguments as declared: ``RUN``, ``[LAYER]``, no ``<Path>`` behind."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments, ``--help`` among them."""
        parameters: list[Any] = super().get_params(ctx)
        for parameter in parameters:
            if parameter.param_type_name == "argument" and parameter.metavar:
                parameter.display_type_rich = lambda ctx: ""  # noqa: ARG005 - as typer calls it
                parameter.get_usage_pieces = partial(_usage, parameter)
        return parameters


class ScriptApart(PlainCommand):
    """Keeps the words after ``--`` apart, as ``meta["script"]``: a script follows them, no input."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before ``--``, and note those after it as they were typed."""
        before = args[: args.index("--")] if "--" in args else args
        ctx.meta["script"] = args[len(before) + 1 :] if "--" in args else None
        return super().parse_args(ctx, before)


def _usage(parameter: Any, ctx: Any) -> list[str]:  # noqa: ARG001 - as typer calls it
    name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
    open_end = parameter.nargs != 1 and "…" not in name
    return [f"{name}..." if open_end else name]


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
        message = f"{what} is written as {' or '.join(known)}, not as {suffix}: choose another name"
        raise UsageError(message)


def refuse_shadow(output: Path) -> None:
    """Refuse a Python file that every script beside it would import in place of a package.

    The frameworks of ``export`` count whether they are installed here or not.

    Raises:
        UsageError: With a name that hides nothing.
    """
    name = output.stem
    if output.suffix != ".py" or not name.isidentifier():
        return
    if name not in (*FRAMEWORKS, *sys.stdlib_module_names):
        found = sys.modules.get(name)
        spec = found.__spec__ if found is not None else find_spec(name)
        if spec is None or spec.origin is None:
            return
        if Path(spec.origin).resolve().parent in (output.resolve().parent, Path.cwd()):
            return  # a script of your own
    raise UsageError(
        f"{output} would hide the package {name} from every script in its folder: "
        f"name it {output.with_name(f'plan_{output.name}')}"
    )


def refuse_file(folder: AnyPath, option: str) -> None:
    """Refuse a place where no folder can be made, before anything is trained for it.

    Raises:
        UsageError: With the option that names a folder.
    """
    if is_remote(folder):
        return
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a folder with {option}")
    near = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(near, os.W_OK):
        raise UsageError(f"{near} cannot be written: name another folder with {option}")


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


def shortest_path(folder: AnyPath) -> AnyPath:
    """A path relative to the working folder where it lies inside it; others as they are."""
    if is_remote(folder):
        return folder
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
