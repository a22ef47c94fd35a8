"""``mpdiag compare``: whether one training is as good as another."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mpdiag.commands.shared.options import JsonOption, exit_on_findings
from mpdiag.files.atomic import writing
from mpdiag.files.paths import place


def compare(
    a: Annotated[
        Path,
        Argument(metavar="A", parser=place, help="Reference: a run, a folder of runs, a baseline."),
    ],
    b: Annotated[Path, Argument(metavar="B", parser=place, help="Candidate: a run or a folder.")],
    metric: Annotated[str | None, Option(metavar="NAME", help="Compare only this metric.")] = None,
    margin: Annotated[
        list[str] | None,
        Option(
            metavar="[NAME=]VALUE",
            help="Largest difference that does not matter, in the metric's units; repeatable.",
        ),
    ] = None,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="BASELINE", help="Store A as a baseline here."),
    ] = None,
    strict: Annotated[
        bool, Option("--strict", help="Exit with 1 if B is worse or undecided, or on a warning.")
    ] = False,
    allow_undecided: Annotated[
        bool, Option("--allow-undecided", help="With --strict, let undecided pass.")
    ] = False,
) -> None:
    """Say whether B trains as well as A. Equivalent, different, or how many seeds would decide."""
    from mpdiag.analysis.comparison.compare import compare as compare_sides
    from mpdiag.analysis.comparison.groups import save_baseline
    from mpdiag.analysis.comparison.margins import parse_margins
    from mpdiag.analysis.verdict.trained import keep_comparison
    from mpdiag.reports import next_commands, terminal
    from mpdiag.reports.text.comparison import comparison_text

    comparison = compare_sides(a, b, metric=metric, margin=parse_margins(margin or []))
    try:
        keep_comparison(comparison, a, b)
    except OSError as error:
        terminal.remark(f"cannot store the comparison in {a}: {error.strerror or error}")
    if output is not None:
        with writing(output):
            save_baseline(comparison.a, output)
    if as_json:
        terminal.show_json(comparison.to_json())
    else:
        terminal.show(comparison_text(comparison))
        terminal.name_next(*next_commands.look_beside(b))
    severities = [f.severity for f in comparison.findings if f.code != "metric-inconclusive"]
    if comparison.undecided and not allow_undecided:
        severities.append("warning")
    exit_on_findings(strict, severities)
