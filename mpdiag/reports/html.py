"""The HTML report: one file that opens offline, the verdict first, the evidence below.

plotly.js is embedded once; light or dark follows the reader's system, and print is light. Every name
that comes from a run goes through ``html.escape``, and no figure's data can end its script.
"""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.analyzer import Analysis, analyze
from mpdiag.errors import RunNotFound, UsageError
from mpdiag.formats import FP16
from mpdiag.places import place
from mpdiag.reports import markdown, pictures
from mpdiag.reports.frames import tensorcores
from mpdiag.reports.frames.gradients import in_model_order
from mpdiag.reports.frames.operations import operations_frame
from mpdiag.reports.frames.sensitivity import ranking
from mpdiag.reports.frames.training import norms_frame
from mpdiag.reports.frames.verdict import facts, formats_frame, levels_frame
from mpdiag.reports.page import STYLE, THEMING
from mpdiag.reports.words import percent, sentence
from mpdiag.training_log import FILE, read_log
from mpdiag.whole_files import atomic_path

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pandas as pd

    from mpdiag.reports.pictures import Picture

REPORT = "report.html"
SHORT = 12
"""Characters of a cell up to which it stays in one line."""


def write_report(run: str | os.PathLike[str], output: Path | None = None) -> Path:
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
    try:
        with atomic_path(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path} ({error.strerror}): give another place with -o"
        raise UsageError(message) from error
    return path


def render(analysis: Analysis) -> str:
    """The whole document."""
    from plotly.offline import get_plotlyjs

    figures = list(report_pictures(analysis))
    title = html.escape(f"{analysis.run.name} – mpdiag")
    body = "\n".join([*_verdict(analysis), *map(_picture, figures), *_provenance(analysis)])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{THEMING}</script>\n</body>\n</html>\n"
    )


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
    cards = "".join(
        f'<div class="card" title="{escape(f.meaning)}"><span>{escape(f.label)}</span>'
        f"<strong>{escape(f.value)}</strong>"
        f"<small>{escape(f.note)}</small></div>"
        for f in facts(analysis)
    )
    yield f'<div class="cards">{cards}</div>'
    plan = analysis.plan
    yield "<h2>Why</h2>"
    yield f"<p><b>Loss scale.</b> {escape(sentence(plan.loss_scale.reason))}</p>"
    yield f"<p><b>Master weights.</b> {escape(sentence(plan.master_weights.reason))}</p>"
    if analysis.findings:
        yield "<h2>Findings</h2>"
        yield from (
            f'<div class="finding {f.severity}"><b>{f.severity}</b> {escape(sentence(f.message))}'
            f"<br>→ {escape(sentence(f.fix))} <code>{escape(f.code)}</code></div>"
            for f in analysis.findings
        )
    operations = operations_frame(analysis)
    if len(operations):
        yield f"<details><summary>{len(operations)} modules stay in FP32</summary>"
        yield _table(operations) + "</details>"
    if plan.levels:
        yield "<h2>What it wins</h2>" + _table(levels_frame(plan))
    formats = formats_frame(analysis.formats).map(lambda x: "–" if x != x else percent(x))
    yield "<h2>Values lost, by format</h2>" + _table(formats.reset_index())
    yield "<h2>Evidence</h2>"


def _picture(picture: Picture) -> str:
    document = picture.figure.to_plotly_json()
    text = json.dumps(document, cls=_encoder(), allow_nan=False)
    # A name may hold "</script>": inside a script element no "<" may stand as such.
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    escape = html.escape
    return (
        f'<section id="{picture.key}"><h3>{escape(picture.title)}</h3>\n'
        f'<div class="figure" role="img" aria-label="{escape(picture.title)}" '
        f'data-key="{picture.key}"></div>\n'
        f'<script type="application/json" id="data-{picture.key}">{text}</script>\n'
        f"<p class='caption'>{escape(picture.caption)}</p>\n"
        f"<details><summary>Receipt: these numbers in plain pandas</summary>"
        f"<pre>{escape(picture.receipt)}</pre></details></section>"
    )


def _encoder() -> Any:
    from plotly.utils import PlotlyJSONEncoder

    class Finite(PlotlyJSONEncoder):  # type: ignore[misc]
        """NaN becomes null, as plotly.js wants it."""

    return Finite


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


def _table(frame: pd.DataFrame) -> str:
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in frame.columns)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in frame.itertuples(index=False))
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"


def _cells(row: Iterable[Any]) -> str:
    return "".join(f"<td>{html.escape(_word(value))}</td>" for value in row)


def _word(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace(" ", "\u00a0") if len(text) <= SHORT else text
