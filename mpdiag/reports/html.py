"""The HTML report of a run: one file that opens offline, the verdict first, the evidence below."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.analyzer import Analysis, analyze
from mpdiag.errors import RunNotFound
from mpdiag.files.paths import place
from mpdiag.numerics.formats import FP16
from mpdiag.reports import markdown, page, pictures
from mpdiag.reports.frames import tensorcores
from mpdiag.reports.frames.gradients import in_model_order
from mpdiag.reports.frames.operations import operations_frame
from mpdiag.reports.frames.sensitivity import ranking
from mpdiag.reports.frames.training import norms_frame
from mpdiag.reports.frames.verdict import facts, formats_frame, levels_frame
from mpdiag.reports.words import percent, sentence
from mpdiag.runs.training_log import FILE, read_log

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import pandas as pd

    from mpdiag.files.paths import AnyPath
    from mpdiag.reports.pictures import Picture

REPORT = "report.html"


def write_report(run: str | os.PathLike[str], output: AnyPath | None = None) -> AnyPath:
    """Write a run's report.

    Args:
        run: The run folder.
        output: Where to write; default: ``report.html`` in the run folder. A name that ends in
            ``.md`` gets Markdown.

    Returns:
        The file.

    Raises:
        InputError: If the run cannot be read.
        UsageError: If the file cannot be written.
    """
    analysis = analyze(run)
    path = output or place(run) / REPORT
    text = markdown.render(analysis) if path.suffix == ".md" else render(analysis)
    return page.save(path, text)


def render(analysis: Analysis) -> str:
    """The whole document."""
    figures = list(report_pictures(analysis))
    parts = (*_verdict(analysis), *map(page.picture, figures), *_provenance(analysis))
    return page.document(f"{analysis.run.name} – mpdiag", parts)


def report_pictures(analysis: Analysis) -> Iterator[Picture]:
    """The report's figures, as far as the run holds what they show."""
    run, folder = str(analysis.run.folder), analysis.run.folder
    plan = analysis.plan.loss_scale
    exponent = int(np.log2(plan.recommended))
    modules, records = analysis.run.modules(), analysis.run.records
    layers = in_model_order(analysis.layers.of_kind("activation_grad"), modules)
    if len(layers):
        yield pictures.heat_map(run, layers, "activation_grad", FP16, exponent)
        yield pictures.every_scale(run, layers, "activation_grad", FP16, exponent, plan)
        yield pictures.consequences(run, layers, "activation_grad", FP16, 0)
    if records.of_kind("update").any():
        yield pictures.ratios(run, records, None, log=False)
        yield pictures.swallowed(run, records)
    outputs = in_model_order(analysis.layers.of_kind("activation"), modules)
    if len(outputs):
        yield pictures.sensitivity(run, ranking(folder, analysis))
        yield pictures.output_ranges(run, outputs)
    if (folder / FILE).is_file():
        log = read_log(folder)
        if log.steps:
            logs = {folder.name: log}
            yield pictures.losses(str(folder.parent), logs, log=True, window=15)
            if len(norms_frame(logs)):
                yield pictures.drift(str(folder.parent), logs)
    try:
        profile = tensorcores.read_profile(folder)
    except RunNotFound:
        return
    yield pictures.verdicts(run, profile)
    yield pictures.kernels(run, profile)
    yield pictures.roofline(run, profile)


# -- the parts of the page -------------------------------------------------------------------------


def _verdict(analysis: Analysis) -> Iterator[str]:
    escape = html.escape
    worst = {finding.severity for finding in analysis.findings}
    tone = "error" if "error" in worst else "warning" if "warning" in worst else "fine"
    yield f'<p class="eyebrow">mpdiag report · {escape(analysis.run.name)}</p>'
    yield f'<h1 class="{tone}">{escape(analysis.verdict)}</h1>'
    yield page.cards((f.label, f.value, f.note, f.meaning) for f in facts(analysis))
    plan = analysis.plan
    yield "<h2>Why</h2>"
    yield f"<p><b>Loss scale.</b> {escape(sentence(plan.loss_scale.reason))}</p>"
    yield f"<p><b>Master weights.</b> {escape(sentence(plan.master_weights.reason))}</p>"
    if analysis.findings:
        yield "<h2>Findings</h2>"
        yield from (page.finding(f.severity, f.message, f.fix, f.code) for f in analysis.findings)
    operations = operations_frame(analysis)
    if len(operations):
        yield f"<details><summary>{len(operations)} modules stay in FP32</summary>"
        yield _frame(operations) + "</details>"
    if plan.levels:
        yield "<h2>What it wins</h2>" + _frame(levels_frame(plan))
    formats = formats_frame(analysis.formats).map(percent)
    yield "<h2>Values lost, by format</h2>" + _frame(formats.reset_index())
    yield "<h2>Evidence</h2>"


def _provenance(analysis: Analysis) -> Iterator[str]:
    meta = analysis.run.meta
    yield "<h2>Provenance</h2>"
    wanted = ("created", "updated", "state", "steps_seen", "steps_recorded", "world_size")
    rows: list[tuple[str, Any]] = [(name, meta.get(name)) for name in wanted]
    for name in ("model", "device", "versions", "seeds", "cadence"):
        part = meta.get(name)
        if isinstance(part, dict):
            rows.append((name, ", ".join(f"{k} {v}" for k, v in part.items() if v is not None)))
    argv = meta.get("argv")
    rows.append(("command", " ".join(map(str, argv)) if isinstance(argv, list) else argv))
    rows.append(("folder", analysis.run.folder))
    cells = (
        f"<tr><th>{html.escape(name.replace('_', ' '))}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows
        if value not in (None, "")
    )
    yield f"<table>{''.join(cells)}</table>"


def _frame(frame: pd.DataFrame) -> str:
    return page.table(frame.columns, frame.itertuples(index=False))
