"""What ``analyze`` prints first: all that decides, in one screen of 80 by 24.

Verdict, plan, the findings that weigh most, and what bounds them. Whatever is left out or cut (``…``)
stands in ``analysis_text``, which ``--verbose`` prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from mpdiag.display.wording import counted, scale_text
from mpdiag.reports.text.analysis import kept_in_fp32, settling_command
from mpdiag.reports.text.findings import COLOURS
from mpdiag.reports.text.tables import Clipped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from mpdiag.analysis.analyzer import Analysis

FINDINGS = 3
"""Findings that are shown."""


def summary_text(analysis: Analysis) -> Iterator[RenderableType]:
    """What to print, part by part; at most 22 lines in 80 columns."""
    level = analysis.verdict.level
    bad = level == "cannot" or any(f.severity == "error" for f in analysis.findings)
    tone = "bold red" if bad else "bold green" if level == "shown" else "bold"
    yield Clipped(Text(analysis.verdict.text, tone), 3)
    yield Clipped(_provenance(analysis), 1)
    yield Text("")
    rows = _grid()
    if analysis.advises:
        for title, words, lines in _plan(analysis):
            rows.add_row(title, Clipped(Text(words), lines))
        rows.add_row("", "")
    for i, finding in enumerate(analysis.findings[:FINDINGS]):
        severity = Text(finding.severity, COLOURS[finding.severity])
        rows.add_row(severity, Clipped(Text(finding.message), 1 if i else 2))
        if finding.fix:
            rows.add_row("", Clipped(Text(f"→ {finding.fix}", "dim"), 1))
    more = len(analysis.findings) - FINDINGS
    if more > 0:
        rows.add_row("", Text(f"and {counted(more, 'finding')} more: -v", "dim"))
    if analysis.findings:
        codes = dict.fromkeys(f.code for f in analysis.findings[:FINDINGS])
        rows.add_row(
            Text("mpdiag explain", "not bold dim"), Clipped(Text(" | ".join(codes), "dim"), 1)
        )
    bounds = analysis.verdict.not_examined
    if bounds:
        rows.add_row("", "")
        rows.add_row("Not looked at", Clipped(Text("; ".join(bounds)), 2))
    if level == "expected":
        command = " ".join(map(str, settling_command(analysis.run)))
        rows.add_row("To settle it", Clipped(Text(command), 1))
    yield rows


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    return grid


def _provenance(analysis: Analysis) -> Text:
    meta = analysis.run.meta
    recorded, seen = meta.get("steps_recorded", 0), meta.get("steps_seen", 0)
    words = f"{analysis.run.folder}: {recorded} of {seen} steps recorded, {meta.get('state')}"
    return Text(words, "dim")


def _plan(analysis: Analysis) -> Iterator[tuple[str, str, int]]:
    """The plan's decisions: title, words, and the lines they may take."""
    plan = analysis.plan
    scale = plan.loss_scale
    if scale.need == "unknown":
        words = "not known"
    else:
        words = f"{scale_text(scale.recommended)} ({scale.method}), {scale.need}"
        if analysis.loss_scale.fits and scale.upper is not None and scale.upper > scale.lower:
            words += f"; any from {scale_text(scale.lower)} to {scale_text(scale.upper)} works"
    yield "Loss scale", words, 2
    needed = "needed" if plan.master_weights.needed else "not needed"
    yield "Master weights", f"{needed}: {plan.master_weights.reason}", 2
    proven = [c for c in plan.fp32_operations if not c.evidence.get("policy")]
    named = dict.fromkeys(" in ".join(filter(None, (c.op, c.module))) for c in proven)
    names = f": {', '.join(named)}" if named else ""
    yield "Stay in FP32", kept_in_fp32(analysis) + names, 2
