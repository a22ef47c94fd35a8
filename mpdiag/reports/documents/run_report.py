"""The HTML report of a run: one file that opens offline, the verdict first, the evidence below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import percent, sentence
from mpdiag.reports.documents.page import findings, frame_table, page
from mpdiag.reports.registry import reported_pictures
from mpdiag.reports.views.operations import operations_frame
from mpdiag.reports.views.verdict import facts, formats_frame, formats_note, grounds, levels_frame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.reports.contents import RunContents


def run_page(contents: RunContents) -> str:
    """The whole document."""
    analysis = contents.analysis
    plan = analysis.plan
    severities = {finding.severity for finding in analysis.findings}
    return page(
        "run.html.j2",
        analysis.run.name,
        reported_pictures(contents),
        tone=next((s for s in ("error", "warning") if s in severities), "fine"),
        verdict=analysis.verdict.text,
        grounds=[(title, sentence(clauses)) for title, clauses in grounds(analysis.verdict)],
        facts=facts(analysis),
        loss_scale=sentence(plan.loss_scale.reason),
        master_weights=sentence(plan.master_weights.reason),
        findings=findings((f.severity, f.message, f.fix, f.code) for f in analysis.findings),
        operations=frame_table(operations_frame(analysis)),
        levels=frame_table(levels_frame(plan)),
        formats=frame_table(formats_frame(analysis.formats).map(percent).reset_index()),
        formats_note=formats_note(analysis),
        provenance=list(_provenance(analysis)),
    )


def _provenance(analysis: Analysis) -> Iterator[tuple[str, Any]]:
    """What meta.json says of the recording: names and values; those without a value left out."""
    meta = analysis.run.meta
    wanted = ("created", "updated", "state", "steps_seen", "steps_recorded", "world_size")
    rows: list[tuple[str, Any]] = [(name, meta.get(name)) for name in wanted]
    for name in ("model", "device", "versions", "seeds", "cadence"):
        part = meta.get(name)
        if isinstance(part, dict):
            rows.append((name, ", ".join(f"{k} {v}" for k, v in part.items() if v is not None)))
    argv = meta.get("argv")
    rows.append(("command", " ".join(map(str, argv)) if isinstance(argv, list) else argv))
    rows.append(("folder", analysis.run.folder))
    for name, value in rows:
        if value not in (None, ""):
            yield name.replace("_", " "), value
