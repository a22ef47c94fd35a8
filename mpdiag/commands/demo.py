"""``mpdiag demo``: the whole workflow on a built-in workload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from mpdiag.commands.shared.examples import WORKLOADS
from mpdiag.commands.shared.options import JsonOption, given_words, refuse_file
from mpdiag.errors import UsageError

_OF_ALL = ("only", "seeds", "done", "markdown", "as_json", "verbose")
_OF_ONE = ("workload", "seed", "no_masters", "record_only")
"""Parameters that mean something with ``--all`` alone, and without it alone."""


def _refuse_strangers(context: typer.Context, everything: bool) -> None:
    """Refuse a parameter that the chosen form of the command would not look at.

    Raises:
        UsageError: Naming it, and the form that takes it.
    """
    given = given_words(context)
    for name in _OF_ONE if everything else _OF_ALL:
        if name not in given:
            continue
        if name == "workload":
            message = "--all trains every workload: choose some with --only NAME"
        elif name == "only":
            chosen = context.params["only"][0]
            message = f"--only chooses among --all: for one workload, mpdiag demo {chosen}"
        else:
            message = f"{given[name]} is for {'one workload' if everything else '--all'}"
            message += ", not for --all" if everything else ": add --all, or leave it out"
        raise UsageError(message)


def demo(
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            autocompletion=lambda: list(WORKLOADS),
            help="The workload to train.",
        ),
    ] = "ssd",
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where runs are kept.")] = Path(
        "runs"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Decides weights and batches.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Steps of each training; fewer show less."),
    ] = None,
    no_masters: Annotated[
        bool, typer.Option("--no-masters", help="Also train FP16 weights without FP32 masters.")
    ] = False,
    record_only: Annotated[
        bool, typer.Option("--record-only", help="Stop after the analysis.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every workload, every way, several seeds: a table.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKLOAD", help="With --all: only this workload; may be repeated."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --all: how many, from 0.")
    ] = 3,
    done: Annotated[
        bool, typer.Option("--done", help="With --all: train nothing, show what is done.")
    ] = False,
    size: Annotated[
        str, typer.Option(help="small (two CPU cores) or large (a GPU).", metavar="SIZE")
    ] = "small",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where to train: cpu, cuda, cuda:1 …")
    ] = "cpu",
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --all: as Markdown.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With --all: every column, and why.")
    ] = False,
) -> None:
    """Try it: record in FP32, analyze, train by the plan, compare. Takes a few minutes."""
    _refuse_strangers(context, everything)
    refuse_file(folder, "--folder")
    # Threads that wait sleep instead of spinning: on a busy machine that is five times as fast. It
    # is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if everything:
        form = _Form(as_json=as_json, markdown=markdown, verbose=verbose)
        _show_all(folder, only or [], seeds, steps, size, device, done=done, form=form)
        return
    from mpdiag.demo.workflow import run_demo

    run_demo(
        workload,
        folder,
        seed=seed,
        steps=steps,
        no_masters=no_masters,
        record_only=record_only,
        size=size,
        device=device,
    )


class _Form(TypedDict):
    """How the table of all workloads is shown."""

    as_json: bool
    markdown: bool
    verbose: bool


def _show_all(
    folder: Path,
    only: list[str],
    seeds: int,
    steps: int | None,
    size: str,
    device: str,
    *,
    done: bool,
    form: _Form,
) -> None:
    """Train every workload, or some, every way, and show the table."""
    from mpdiag.demo.families import run_table, show_table

    options = {"size": size}
    rows = run_table(
        folder, only=only, seeds=seeds, steps=steps, options=options, done_only=done, device=device
    )
    again: list[object] = ["mpdiag", "demo", "--all", "--folder", folder, "--seeds", seeds]
    for name in only:
        again += ["--only", name]
    for option, value in (("--steps", steps), ("--size", size), ("--device", device)):
        again += [] if value is None else [option, value]
    show_table(rows, folder, again, **form)
