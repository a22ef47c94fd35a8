"""What ``mpdiag demo`` prints at the end: the ways to train side by side, and the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mpdiag.analysis.comparison.compare import DEFAULT_MARGIN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from mpdiag.analysis.analyzer import Analysis


@dataclass(frozen=True)
class Outcome:
    """The result of one way to train.

    Attributes:
        title: Its name.
        run: Its run folder; None if it never began.
        metric: On held-out data; None if it never began.
        loss: Of the last step.
        skipped, steps: Steps skipped, and all of them.
        seconds: Wall time of the steps.
        stopped: Why it stopped early or never began; empty if it finished.
    """

    title: str
    run: Path | None
    metric: float | None
    loss: float | None
    skipped: int
    steps: int
    seconds: float
    stopped: str = ""


def demo_text(
    metric: str, higher_is_better: bool, outcomes: Sequence[Outcome], analysis: Analysis
) -> RenderableType:
    """The ways to train as a table, and the verdict.

    Args:
        metric: Its name, with the unit.
        higher_is_better: Whether more is better.
        outcomes: FP32 first, then without a scale, then by the plan, then others.
        analysis: The analysis of the recording.
    """
    table = Table(title="Trained from the same seed", title_justify="left", title_style="bold")
    table.add_column("")
    for column in (metric, "last loss", "skipped", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("run")
    for o in outcomes:
        table.add_row(
            o.title,
            _figure(o.metric),
            _figure(o.loss),
            f"{o.skipped} of {o.steps}" if o.steps else "–",
            f"{o.seconds:.1f}",
            Text(str(o.run)) if o.run else "–",
        )
    verdict, style = judge(metric, higher_is_better, outcomes, analysis)
    notes = [Text(f"{o.title}: {o.stopped}", style="yellow") for o in outcomes if o.stopped]
    return Group(table, *notes, Text(""), Text(verdict, style=style))


def judge(
    metric: str, higher_is_better: bool, outcomes: Sequence[Outcome], analysis: Analysis
) -> tuple[str, str]:
    """The verdict from one seed in a few sentences, and its style."""
    fp32, bare, planned = outcomes[:3]
    hurt, kept = (not _as_good(o, fp32, higher_is_better) for o in (bare, planned))
    kept = not kept
    scale = analysis.plan.loss_scale
    full, plan = _figure(fp32.metric), _figure(planned.metric)
    figures = f"{metric} {_figure(bare.metric)} against {full}"
    if hurt and kept:
        first = f"FP16 without a loss scale loses: {figures}. The plan restores it: {plan}."
    elif not hurt and kept:
        first = f"FP16 loses nothing here, with a loss scale or without: {figures}."
    elif hurt:
        first = f"FP16 loses with the plan as well: {metric} {plan} against {full}."
    else:
        first = f"FP16 trains without a scale, and not by the plan: {plan}."
    said = {
        "needed": "The recording had called a loss scale needed",
        "advisable": "The recording had called a loss scale advisable, not needed",
        "not needed": "The recording had said that none is needed",
        "unknown": "The recording could not say whether one is needed",
    }[scale.need]
    right = hurt == (scale.need == "needed")
    second = f"{said}{'' if right else ', which this training does not confirm'}."
    third = "One seed is no proof: train several, then mpdiag compare."
    return f"{first} {second} {third}", "bold green" if kept and right else "bold yellow"


def _as_good(one: Outcome, reference: Outcome, higher_is_better: bool) -> bool:
    if one.metric is None or reference.metric is None or not math.isfinite(one.metric):
        return False
    margin = DEFAULT_MARGIN * abs(reference.metric)
    worse = reference.metric - one.metric if higher_is_better else one.metric - reference.metric
    return worse <= margin


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
