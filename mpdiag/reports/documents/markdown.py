"""The report of a run as Markdown, for a pull request or a wiki: the same numbers, no figures.

Every name that comes from a run is escaped, so that none can end a table's cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdiag.display.wording import in_markdown, layer_name, percent, sentence
from mpdiag.numerics.formats import FORMATS
from mpdiag.reports.views.operations import operations_frame
from mpdiag.reports.views.verdict import facts, formats_frame, formats_note, grounds, levels_frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd

    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.analysis.figures.figure import Key
    from mpdiag.reports.documents.page import PageTable

TOP = 8
"""Layers and shapes shown; the plan has them all."""


def run_markdown(analysis: Analysis) -> str:
    """The whole document."""
    return "\n\n".join(_parts(analysis)) + "\n"


def _parts(analysis: Analysis) -> Iterator[str]:
    plan = analysis.plan
    yield f"## {in_markdown(analysis.verdict.text)}"
    for title, clauses in grounds(analysis.verdict):
        yield f"**{title}.** {in_markdown(sentence(clauses))}"
    yield _rows(("", "", ""), [(f.label, f.value, f.note) for f in facts(analysis)])
    yield f"**Loss scale.** {in_markdown(sentence(plan.loss_scale.reason))}"
    yield f"**Master weights.** {in_markdown(sentence(plan.master_weights.reason))}"
    if analysis.findings:
        yield "### Findings"
        yield "\n".join(
            f"- **{f.severity}** {in_markdown(f.message)} → {in_markdown(f.fix)} (`{f.code}`)"
            for f in analysis.findings
        )
    yield from _layers(analysis)
    operations = operations_frame(analysis)
    if len(operations):
        yield "### Stays in FP32"
        yield _table(operations[["module", "operation", "why"]])
    if plan.shapes:
        yield "### Shapes to pad for Tensor Cores"
        shapes = [
            (s.module or "(the model)", s.dimension, f"{s.size} → {s.padded}", s.reason)
            for s in plan.shapes[:TOP]
        ]
        yield _rows(("module", "dimension", "size", "why"), shapes)
    yield "### Levels, in the order to try them"
    yield _table(levels_frame(plan))
    yield "### Values lost, by format"
    yield in_markdown(formats_note(analysis))
    frame = formats_frame(analysis.formats)
    yield _table(frame.map(percent).reset_index())
    meta = analysis.run.meta
    versions = meta.get("versions") or {}
    yield in_markdown(
        f"{analysis.run.name}: {meta.get('steps_recorded', 0)} of {meta.get('steps_seen', 0)} steps "
        f"recorded, {meta.get('state', 'unknown')}; mpdiag {meta.get('mpdiag', '?')}, "
        f"torch {versions.get('torch', '?')}; `mpdiag analyze`."
    )


def _layers(analysis: Analysis) -> Iterator[str]:
    """The layers that lose most, by the figures that the verdict is made of."""
    figures = analysis.figures
    first, scaled = figures.find("layer-sum"), figures.find("layer-values-scaled")
    if first is None:
        return
    label = FORMATS[first.format].label
    yield f"### Layers that lose most in {label} {first.at_scale}, {in_markdown(first.where)}"
    keys: list[Key] = ["layer-sum", "layer-values"]
    head = ["layer", "Σ|g| lost", "values lost"]
    if scaled is not None:
        keys.append("layer-values-scaled")
        head.append(f"values lost {scaled.at_scale}")
    rows = [
        (layer_name(layer), *(figures.said(key, layer) for key in keys))
        for layer in figures.layers()[:TOP]
    ]
    yield _rows(head, rows)


def _table(frame: pd.DataFrame) -> str:
    body = [
        tuple("" if v is None else str(v) for v in row) for row in frame.itertuples(index=False)
    ]
    return _rows(tuple(map(str, frame.columns)), body)


def page_table(table: PageTable) -> str:
    """A table that the HTML page has, too."""
    return _rows(table.columns, table.rows)


def _rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    cells = [tuple(map(in_markdown, row)) for row in (head, *body)]
    lines = [cells[0], ("---",) * len(head), *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
