"""The HTML report of a run: one file that opens offline, the verdict first, the evidence below."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.figures import Key, at_scale
from mpdiag.display.wording import counted, percent, sentence
from mpdiag.errors import MpdiagError
from mpdiag.files.paths import is_remote
from mpdiag.numerics.formats import half_of
from mpdiag.plan import FILE, PrecisionPlan
from mpdiag.precision.audit import Audit
from mpdiag.precision.half_choice import fp16_or_bf16
from mpdiag.reports.contents import RunContents
from mpdiag.reports.documents.page import figure_data, findings, frame_table, page
from mpdiag.reports.picture import Picture
from mpdiag.reports.registry import reported_pictures
from mpdiag.reports.text.analysis import after_analysis, grounds
from mpdiag.reports.text.audit import sources
from mpdiag.reports.views.gradients.frame import in_model_order
from mpdiag.reports.views.gradients.pictures import Gradients, share_axis
from mpdiag.reports.views.operations import operations_frame
from mpdiag.reports.views.precision import answers_frame, precision_frame
from mpdiag.reports.views.verdict import MEMORY, facts, formats_frame, formats_note, levels_frame

KEY = "heat-map"
"""Of the picture that the report's other figures leave out, as it stands here."""
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(\+00:00|Z)?")


@dataclass(frozen=True, eq=False)
class BeforeAfter:
    """Pictures of one subject, of which a page shows one at a time.

    Attributes:
        title: Of all of them.
        labels: What each shows, for the switch.
        figures: Each with its data, as a template takes them.
    """

    title: str
    labels: tuple[str, ...]
    figures: tuple[tuple[Picture, Markup], ...]


def run_page(contents: RunContents) -> str:
    """The whole document."""
    analysis = contents.analysis
    severities = [finding.severity for finding in analysis.findings]
    # Green is for what a training has shown.
    fine = "fine" if analysis.verdict.level == "shown" else "info"
    switched = _before_after(contents)
    return page(
        "run.html.j2",
        analysis.run.name,
        [p for p in reported_pictures(contents) if switched is None or p.key != KEY],
        counts=_counts(severities),
        tone=next((s for s in ("error", "warning") if s in severities), fine),
        verdict=analysis.verdict.text,
        command=next_command(analysis),
        before_after=switched,
        grounds=[(title, sentence(clauses)) for title, clauses in grounds(analysis.verdict)],
        facts=facts(analysis),
        why=reasons(analysis),
        findings=findings(f.to_json() for f in analysis.findings),
        choice=fp16_or_bf16(analysis),
        precision=_precision(contents.audit),
        operations=frame_table(operations_frame(analysis)),
        levels=frame_table(levels_frame(analysis.plan)),
        levels_note=MEMORY,
        formats=frame_table(formats_frame(analysis.formats).map(percent).reset_index()),
        formats_note=formats_note(analysis),
        provenance=list(_provenance(analysis)),
    )


def _precision(audit: Audit | None) -> dict[str, Any] | None:
    """What the page says of the training's precision; None where that is not known."""
    if audit is None:
        return None
    return {
        "line": sentence(audit.line),
        "table": frame_table(precision_frame(audit)),
        "sources": [f"{title}: {words}." for title, words in sources(audit)],
        "findings": findings(f.to_json() for f in audit.findings),
        "answers": frame_table(answers_frame(audit.answers)),
    }


def next_command(analysis: Analysis) -> str:
    """The command to run next, as the terminal names it; by the plan beside it for this very format."""
    folder, plan = analysis.run.folder, None
    with suppress(MpdiagError, OSError):
        if not is_remote(folder) and PrecisionPlan.load(str(folder)).aim == analysis.plan.aim:
            plan = Path(str(folder)) / FILE
    return shlex.join(map(str, after_analysis(analysis, folder, plan)))


def reasons(analysis: Analysis) -> list[tuple[str, str]]:
    """Why the plan decides as it does: titles and sentences; what a finding says is said there.

    Nothing where the recording allows no answer.
    """
    if not analysis.advises:
        return []
    plan = analysis.plan
    found = (("Loss scale", plan.loss_scale.reason), ("Master weights", plan.master_weights.reason))
    said = {finding.message for finding in analysis.findings}
    return [(title, sentence(why)) for title, why in found if why and why not in said]


def heat_maps(contents: RunContents) -> list[tuple[str, Picture]]:
    """The gradients without a loss scale and at the plan's, each with a label.

    Returns:
        One alone where the plan has no scale; none where no activation gradient was recorded.
    """
    analysis = contents.analysis
    layers = in_model_order(analysis.layers.of_kind("activation_grad"), contents.modules)
    if not len(layers):
        return []
    fmt = half_of(analysis.target)
    gradients = Gradients(str(contents.folder), "activation_grad", layers, fmt)
    planned = int(np.log2(analysis.plan.loss_scale.recommended))
    keys: dict[int, Key] = {0: "all-values"}
    if planned:
        keys[planned] = "all-values-scaled"
    found: list[tuple[str, Picture]] = []
    for exponent, key in keys.items():
        picture = gradients.heat_map(exponent)
        phrase = at_scale(2.0**exponent)
        said = analysis.figures.find(key)
        lost = "" if said is None else f": {said.said} become 0"
        label = f"{phrase[:1].upper()}{phrase[1:]}{lost}"
        found.append((label, replace(picture, key=f"{KEY}-{len(found)}")))
    share_axis([picture for _, picture in found])
    return found


def _before_after(contents: RunContents) -> BeforeAfter | None:
    """The switch between the heat maps; None where there is nothing to switch between."""
    found = heat_maps(contents)
    if len(found) < 2:
        return None
    labels, pictures = zip(*found, strict=True)
    drawn = tuple((picture, figure_data(picture)) for picture in pictures)
    return BeforeAfter(pictures[0].title, labels, drawn)


def _counts(severities: Sequence[str]) -> str:
    """How many findings of each severity, in words."""
    words = (("error", "error"), ("warning", "warning"), ("info", "note"))
    said = [counted(severities.count(s), w) for s, w in words if s in severities]
    return ", ".join(said) or "no findings"


def _provenance(analysis: Analysis) -> Iterator[tuple[str, Any]]:
    """What meta.json says of the recording: names and values; those without a value left out."""
    meta = analysis.run.meta
    wanted = ("created", "updated", "state", "steps_seen", "steps_recorded", "world_size")
    rows: list[tuple[str, Any]] = [(name, _value(meta.get(name))) for name in wanted]
    for name in ("model", "device", "versions", "seeds", "cadence"):
        part = meta.get(name)
        if isinstance(part, dict):
            rows.append((name, _value(part)))
    argv = meta.get("argv")
    rows.append(("command", " ".join(map(str, argv)) if isinstance(argv, list) else argv))
    rows.append(("folder", analysis.run.folder))
    for name, value in rows:
        if value not in (None, ""):
            yield name.replace("_", " "), value


def _value(value: Any) -> Any:
    """A number with its thousands apart, a time without parts of a second, a document in words."""
    if isinstance(value, Mapping):
        known = ((k, v) for k, v in value.items() if v not in (None, []))
        return ", ".join(f"{str(k).replace('_', ' ')} {_value(v)}" for k, v in known)
    if isinstance(value, list):
        return "; ".join(str(_value(v)) for v in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, str) and (time := _TIME.fullmatch(value)):
        return f"{time[1]} {time[2]}{' UTC' if time[3] else ''}"
    return value
