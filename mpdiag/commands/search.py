"""``mpdiag search``: the smallest set of operations that must stay in FP32."""

from pathlib import Path
from typing import Annotated

from typer import Option

from mpdiag.commands.shared.options import JsonOption, WorkloadArgument, refuse_file
from mpdiag.files.paths import place


def search(
    workload: WorkloadArgument,
    run: Annotated[
        Path | None,
        Option(
            metavar="RUN", parser=place, help="Where the search is kept; the same again goes on."
        ),
    ] = None,
    plan: Annotated[
        Path | None, Option(metavar="PLAN", help="Level and loss scale; default: recorded.")
    ] = None,
    budget: Annotated[float, Option(min=0.01, metavar="MINUTES", help="Time it may take.")] = 30.0,
    seeds: Annotated[int, Option(min=2, metavar="N", help="FP32 seeds; their spread decides.")] = 5,
    steps: Annotated[int | None, Option(min=1, metavar="N", help="Steps of each training.")] = None,
    no_lists: Annotated[
        bool, Option("--no-lists", help="Everything in FP16 but what is found.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find, by training, what must stay in FP32."""
    from mpdiag.demo.search import run_search, show_search
    from mpdiag.reports import next_commands, terminal

    refuse_file(run or Path("runs"), "--run")
    folder = run or Path("runs") / f"search-{Path(workload).stem}"
    result = run_search(
        workload, folder, plan=plan, budget=budget, seeds=seeds, steps=steps, lists=not no_lists
    )
    show_search(result, as_json=as_json)
    again: list[object] = ["mpdiag", "search", workload, "--run", folder, "--budget", budget]
    for option, value in (("--plan", plan), ("--seeds", seeds), ("--steps", steps)):
        again += [] if value is None else [option, value]
    again += ["--no-lists"] if no_lists else []
    if not as_json:
        terminal.name_next(*next_commands.after_search(result.answer, tuple(again), folder))
