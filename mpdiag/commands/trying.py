"""``demo`` and ``search``: built-in workloads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mpdiag.commands.base import JsonOption, app
from mpdiag.files.paths import place


@app.command()
def demo(
    workload: Annotated[str, typer.Argument(help="The workload to train.")] = "ssd",
    folder: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    seed: Annotated[int, typer.Option(help="Decides weights and batches.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each training; fewer show less.")
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
        list[str] | None, typer.Option(help="With --all: only this workload; may be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="With --all: how many, from 0.")] = 3,
    done: Annotated[
        bool, typer.Option("--done", help="With --all: train nothing, show what is done.")
    ] = False,
    size: Annotated[
        str, typer.Option(help="small (two CPU cores) or large (a GPU).", metavar="SIZE")
    ] = "small",
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1 …")] = "cpu",
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --all: as Markdown.")] = False,
) -> None:
    """Try it: record in FP32, analyze, train by the plan, compare. Takes a minute or two."""
    # Threads that wait sleep instead of spinning: on a busy machine that is five times as fast. It
    # is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if everything:
        from mpdiag.demo.families import run_table, show_table

        rows = run_table(
            folder,
            only=only or (),
            seeds=seeds,
            steps=steps,
            options={"size": size},
            done_only=done,
            device=device,
        )
        show_table(rows, folder, as_json=as_json, markdown=markdown)
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


@app.command()
def search(
    workload: Annotated[str, typer.Argument(help="A built-in workload, or gallery/NAME.")],
    run: Annotated[
        Path | None,
        typer.Option(parser=place, help="Where the search is kept; the same again goes on."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Level and loss scale; default: recorded.")
    ] = None,
    budget: Annotated[float, typer.Option(min=0.01, help="Minutes.")] = 30.0,
    seeds: Annotated[int, typer.Option(min=2, help="FP32 seeds, whose spread decides.")] = 5,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each training.")] = None,
    no_lists: Annotated[
        bool, typer.Option("--no-lists", help="Everything in FP16 but what is found.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find, by training, what must stay in FP32."""
    from mpdiag.demo.search import run_search, show_search
    from mpdiag.reports import terminal

    folder = run or Path("runs") / f"search-{workload.replace('/', '-')}"
    result = run_search(
        workload, folder, plan=plan, budget=budget, seeds=seeds, steps=steps, lists=not no_lists
    )
    show_search(result, as_json=as_json)
    terminal.name_next("less", folder / "plan.json")
