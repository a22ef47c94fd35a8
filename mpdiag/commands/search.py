"""``mpdiag search``: the smallest set of operations that must stay in FP32."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from mpdiag.commands.shared.examples import WORKLOADS
from mpdiag.commands.shared.options import JsonOption, ScriptApart, refuse_file
from mpdiag.errors import UsageError
from mpdiag.files.paths import place

_HIGHER = "--higher-is-better"


COMMAND_CLASS = ScriptApart


def search(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="WORKLOAD|FILE.py|-- SCRIPT ARGS…",
            autocompletion=lambda: list(WORKLOADS),
            help="A built-in workload, a file that defines one, or a script, with --metric.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        Option(metavar="NAME", help="The metric that a script logs with `log_metric`, or `loss`."),
    ] = None,
    higher_is_better: Annotated[
        bool, Option(_HIGHER, help="A higher metric is better. Default: as it was logged.")
    ] = False,
    run: Annotated[
        Path | None,
        Option(
            metavar="RUN", parser=place, help="Folder of the search. The same command continues it."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        Option(
            metavar="PLAN", help="The plan for level and loss scale. Default: from a recording."
        ),
    ] = None,
    budget: Annotated[float, Option(min=0.01, metavar="MINUTES", help="Time budget.")] = 30.0,
    seeds: Annotated[
        int | None,
        Option(
            min=2,
            metavar="N",
            help="FP32 seeds; the tolerance is their spread. Default: 5, or 2 without {seed}.",
        ),
    ] = None,
    steps: Annotated[
        int | None, Option(min=1, metavar="N", help="For a workload: steps of each training.")
    ] = None,
    no_lists: Annotated[
        bool,
        Option(
            "--no-lists",
            help="For a workload: keep only what is found in FP32, not autocast's own list.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find, by training, what must stay in FP32."""
    from mpdiag.demo.script_search import search_script
    from mpdiag.demo.search import run_search, show_search
    from mpdiag.launching.script import parse
    from mpdiag.reports import next_commands, terminal
    from mpdiag.workloads import DamagedWorkload

    refuse_file(run or Path("runs"), "--run")
    script_words = context.meta["script"]
    words = [*(words or []), *(script_words or [])]
    if not words:
        raise UsageError("there is nothing to search: name a workload, or write -- script.py ARGS")
    if metric is None:
        words, metric, last = _trailing(words)
        higher_is_better |= last
    again: list[object] = ["--budget", budget]
    for option, value in (("--plan", plan), ("--seeds", seeds), ("--steps", steps)):
        again += [] if value is None else [option, value]
    if metric is None:
        if len(words) > 1 or script_words is not None:  # a script, which may not be imported
            raise UsageError(
                "--metric NAME is missing: name what the script logs with mpdiag.log_metric, or loss"
            )
        folder = run or Path("runs") / f"search-{Path(words[0]).stem}"
        try:
            result = run_search(
                words[0],
                folder,
                plan=plan,
                budget=budget,
                seeds=5 if seeds is None else seeds,
                steps=steps,
                lists=not no_lists,
            )
        except DamagedWorkload as error:
            message = f"{error}; add --metric NAME to search a training script"
            raise DamagedWorkload(message) from error
        again = [*words, "--run", folder, *again, *(["--no-lists"] if no_lists else [])]
        script: tuple[str, ...] = ()
    else:
        if steps is not None or no_lists:
            raise UsageError("--steps and --no-lists need a workload: leave them out for a script")
        folder = run or Path("runs") / f"search-{parse(words).name}"
        result = search_script(
            words,
            metric,
            folder,
            higher_is_better=higher_is_better,
            plan=plan,
            budget=budget,
            seeds=seeds,
        )
        more = [_HIGHER] if higher_is_better else []
        again = ["--metric", metric, *more, "--run", folder, *again, "--", *words]
        script = tuple(words)
    show_search(result, as_json=as_json)
    if not as_json:
        continued = ("mpdiag", "search", *again)
        terminal.name_next(*next_commands.after_search(result.answer, continued, folder, script))


def _trailing(words: list[str]) -> tuple[list[str], str | None, bool]:
    """The words of a script without ``--metric NAME`` and ``--higher-is-better`` at their end."""
    rest, metric, higher = list(words), None, False
    while len(rest) > 1:
        if rest[-1] == _HIGHER:
            higher, rest = True, rest[:-1]
        elif rest[-2] == "--metric" and metric is None and len(rest) > 2:
            metric, rest = rest[-1], rest[:-2]
        else:
            break
    return (list(words), None, False) if metric is None else (rest, metric, higher)
