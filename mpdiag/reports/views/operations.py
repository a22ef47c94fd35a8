"""What stays in FP32, how sensitive each operation is, and the format each layer could have.

The ranking of operations rests on the best of three sources that the run folder holds:
``sensitivity.json`` (each operation was run in the format and compared), ``search.json`` (a backward
pass estimated each, and trainings decided), and the recording itself (what rounding its values costs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.figures import at_scale
from mpdiag.analysis.operations.rounding_error import operation_errors, rounding_error
from mpdiag.display.colors import BLUE, PURPLE, VERMILION
from mpdiag.display.wording import in_figure, layer_name
from mpdiag.numerics.autocast_lists import CALLED_AS, LAYERS, LISTS, policy_name
from mpdiag.numerics.formats import FORMATS, FP16, FloatFormat
from mpdiag.reports import plotting, receipts
from mpdiag.reports.contents import RunContents
from mpdiag.reports.picture import Picture
from mpdiag.reports.receipts import Rows
from mpdiag.runs.operations import Operation
from mpdiag.runs.results import MAY, MUST, Sensitivities, by_weight, or_infinite

OUTSIDE = "(outside)"
"""How ``tracing`` names the module of what is computed outside of every module."""
NOT_KEPT = "not kept in FP32"
"""What is said of an operation of which no training has shown that it is safe."""
MOST = 30  # operations that a figure draws
Source = Literal["measured", "searched", "recorded"]
_LISTED = "on autocast's own list: runs in FP32 at level O1"
# What a user calls, by the ATen operation that is recorded of it.
_CALLED_AS = CALLED_AS | {below: (above,) for below, above in LAYERS.items()}
Lines = dict[tuple[str, str], str]
"""The user's line of each (module, operation): the first where there are several."""


def operations_frame(analysis: Analysis) -> pd.DataFrame:
    """What stays in FP32, as the plan has it: ``module``, ``operation``, ``why``, ``line``."""
    rows = [
        {
            "module": layer_name(choice.module),
            "operation": choice.op or "all of it",
            "why": choice.reason,
            "line": _line(choice.evidence),
            "largest |x|": choice.evidence.get("absmax"),
            "values that overflow": choice.evidence.get("overflow"),
        }
        for choice in analysis.plan.fp32_operations
    ]
    columns = ["module", "operation", "why", "line", "largest |x|", "values that overflow"]
    frame = pd.DataFrame(rows, columns=columns)
    # A column that is empty throughout is left out.
    filled = [c for c in columns[3:] if (frame[c].notna() & (frame[c] != "")).any()]
    return frame[columns[:3] + filled]


def _line(evidence: Mapping[str, Any]) -> str:
    where, code = str(evidence.get("line") or ""), str(evidence.get("code") or "")
    return f"{where}: {code}" if where and code else where


# -- sensitivity -----------------------------------------------------------------------------------


def lines_of(operations: Sequence[Operation]) -> Lines:
    """Where each recorded operation of each module was called."""
    found: Lines = {}
    for op in operations:
        if op.where and not op.node:
            line = f"{op.where}: {op.code}" if op.code else op.where
            for name in (policy_name(op.op), *_CALLED_AS.get(op.op, ())):
                found.setdefault((op.module or "", name), line)
    return found


@dataclass(frozen=True, eq=False)
class Ranking:
    """Operations, the most sensitive first.

    Attributes:
        source: What the ranking rests on.
        format: The narrow format's name.
        scale: The loss scale of gradients; None where the source does not say.
        frame: ``module``, ``operation``; ``value``, which ranks (infinite where a value leaves the
            range); ``trained`` (what trainings decided, empty where none did), ``plan`` (why the
            plan keeps it in FP32), ``line``; and what else the source knows.
        value: What ``value`` is, in words.
        by_operation: False where modules stand for their operations, which were not recorded.
    """

    source: Source
    format: str
    scale: float | None
    frame: pd.DataFrame
    value: str
    by_operation: bool = True


def ranking(contents: RunContents) -> Ranking:
    """Rank a run's operations by the best source that its folder holds."""
    analysis, operations, search = contents.analysis, contents.operations, contents.search
    fmt = FP16 if analysis.target.needs_tensor_scale else analysis.target
    if contents.sensitivities is not None:
        measured = contents.sensitivities
        words = "relative error of weight gradients"
        frame = _frame(_measured(measured), contents)
        return Ranking("measured", measured.format, measured.scale, frame, words)
    if search is not None and search.weights:
        rows = [
            {"module": module, "operation": op, "value": weight}
            for (module, op), weight in search.weights.items()
        ]
        words = "change of the loss, as a share of it"
        return Ranking("searched", fmt.name, None, _frame(rows, contents), words)
    scale = analysis.plan.loss_scale.recommended
    exponent = int(np.log2(scale))
    rows = (
        _operations(operations, fmt, exponent) if operations else _layers(contents, fmt, exponent)
    )
    return Ranking(
        "recorded",
        fmt.name,
        scale,
        _frame(rows, contents),
        "relative rounding error of a result",
        by_operation=bool(operations),
    )


def _measured(measured: Sensitivities) -> list[dict[str, Any]]:
    """What running each operation in the narrow format changed."""
    return [
        {
            "module": row.module,
            "operation": row.op,
            "value": math.inf if not row.finite else or_infinite(row.gradient_error),
            "loss error": row.loss_error,
            "output error": row.output_error,
            "gradient cosine": row.gradient_cosine,
            "worst gradient": row.worst_gradient,
            "estimate": or_infinite(row.estimate),
        }
        for row in by_weight(measured.operations)
    ]


def _operations(
    operations: Sequence[Operation], fmt: FloatFormat, exponent: int
) -> list[dict[str, Any]]:
    """What rounding the recorded operations' results costs."""
    return [
        {
            "module": error.module or "",
            "operation": error.op,
            "value": error.worst,
            "forward": error.forward,
            "backward": error.backward,
            "line": f"{error.where}: {error.text}" if error.text else error.where,
        }
        for error in operation_errors(operations, fmt, exponent)
    ]


def _layers(contents: RunContents, fmt: FloatFormat, exponent: int) -> list[dict[str, Any]]:
    """Where no operations were recorded: the outputs of modules, and their gradients."""
    kinds = {str(m["name"]): str(m["type"]) for m in contents.modules}
    errors: dict[str, dict[str, float]] = {}
    for kind, column, shift in (
        ("activation", "forward", 0),
        ("activation_grad", "backward", exponent),
    ):
        layers = contents.analysis.layers.of_kind(kind)  # type: ignore[arg-type]
        for name, error in zip(
            layers.names, rounding_error(layers.histograms, fmt, shift), strict=True
        ):
            errors.setdefault(str(name), {})[column] = float(error)
    rows = [
        {
            "module": name,
            "operation": kinds.get(name, ""),
            "value": max(own.values()),
            "forward": own.get("forward"),
            "backward": own.get("backward"),
        }
        for name, own in errors.items()
    ]
    return sorted(rows, key=lambda row: -row["value"])


def _frame(rows: list[dict[str, Any]], contents: RunContents) -> pd.DataFrame:
    """The common columns; operations that by training must stay in FP32 come first."""
    decisions = contents.search.decisions if contents.search is not None else {}
    lines = lines_of(contents.operations)
    plan = contents.analysis.plan
    choices = plan.fp32_operations
    kept = {(c.module, c.op): c.reason for c in choices}
    # A module chosen for its kind, such as a normalisation, is named by its type.
    whole = {c.module: c.reason for c in choices if c.evidence.get("type") == c.op}
    whole |= {c.module: c.reason for c in plan.fp32_modules}
    for row in rows:
        key = (row["module"], row["operation"])
        row["trained"] = decisions.get(key, decisions.get((row["module"], ""), ""))
        listed = _LISTED if LISTS.get(row["operation"]) == "fp32" else ""
        row["plan"] = kept.get(key) or whole.get(row["module"]) or listed
        inside = "" if row["module"] == OUTSIDE else row["module"]
        row.setdefault("line", lines.get((inside, row["operation"]), ""))
    rows = sorted(rows, key=lambda row: row["trained"] != MUST)
    first = ["module", "operation", "value", "line", "trained", "plan"]
    frame = pd.DataFrame(rows, columns=[*first, *(k for k in (rows or [{}])[0] if k not in first)])
    frame["value"] = frame["value"].astype(float)
    return frame


def shown(found: Ranking) -> pd.DataFrame:
    """The ranking as a person reads it: names, and no column that is empty throughout."""
    frame = found.frame.copy()
    frame["module"] = [layer_name(str(name)) for name in frame["module"]]
    blank = [c for c in frame.columns if ((frame[c] == "") | frame[c].isna()).all()]
    label = FORMATS[found.format].label if found.format in FORMATS else found.format
    names = {
        "value": found.value,
        "trained": "by training",
        "plan": "why the plan keeps it in FP32",
        "forward": f"{label} error, forward",
        "backward": f"{label} error, backward",
    }
    return frame.drop(columns=blank).rename(columns=names)


def sensitivity_figure(frame: pd.DataFrame, value: str) -> go.Figure:
    """A mark for each of ``MOST`` operations (``Ranking.frame``), the most sensitive on top."""
    moved = frame[frame["value"] > 0]  # what changes nothing has no place on a log scale
    top = (moved if len(moved) else frame).head(MOST).reset_index(drop=True)
    if top.empty:
        return plotting.empty("no operation was recorded")
    names = [
        f"{layer_name(str(m))} · {op}" if op else layer_name(str(m))
        for m, op in zip(top["module"], top["operation"], strict=True)
    ]
    fig = plotting.figure(plotting.row_height(len(names)))
    known = top["value"].where(np.isfinite(top["value"]) & (top["value"] > 0))
    low, high = (known.min(), known.max()) if known.notna().any() else (1e-3, 1.0)
    edge, floor = high * 4, low / 2
    kept = (top["plan"] != "") | top["trained"].astype(str).str.startswith("must")
    beyond, shown_safe = np.isinf(top["value"]), top["trained"] == MAY
    places = np.where(beyond, edge, known.fillna(floor))
    for mask, name, colour, symbol in (
        (beyond, "overflows to infinity", PURPLE, "star"),
        (~beyond & kept, "stays in FP32", VERMILION, "circle"),
        (~beyond & ~kept & shown_safe, MAY, BLUE, "circle-open"),
        (~beyond & ~kept & ~shown_safe, NOT_KEPT, BLUE, "diamond-open"),
    ):
        rows = np.flatnonzero(mask)
        if rows.size == 0:
            continue
        fig.add_bar(
            x=places[rows] - floor,
            base=floor,
            y=rows,
            orientation="h",
            width=0.12,
            marker={"color": colour, "opacity": 0.5},
            showlegend=False,
            hoverinfo="skip",
        )
        fig.add_scatter(
            x=places[rows],
            y=rows,
            mode="markers",
            name=name,
            marker={"color": colour, "symbol": symbol, "size": 11, "line": {"width": 2}},
            customdata=[_hover(names[i], top.loc[i].to_dict(), value) for i in rows],
            hovertemplate="%{customdata}<extra>" + name + "</extra>",
        )
    plotting.layer_axis(fig, names, 40)
    plotting.log10_axis(fig, [floor, edge], "x")
    ends = [math.log10(floor), math.log10((edge if beyond.any() else high) * 1.5)]
    fig.update_xaxes(type="log", title=value, range=ends)
    return fig


def _hover(name: str, row: Mapping[Any, Any], value: str) -> str:
    """The text under the pointer."""
    number = float(str(row["value"]))
    lines = [
        f"<b>{in_figure(name)}</b>",
        in_figure(str(row["line"])) if row["line"] else "",
        f"{value}: {number:.3g}" if math.isfinite(number) else "a value overflows",
        f"by training: {row['trained']}" if row["trained"] else "",
        in_figure(str(row["plan"])) if row["plan"] else "",
    ]
    return "<br>".join(line for line in lines if line)


def _decided(trained: pd.Series[str]) -> str:
    """Whether trainings decided anything yet."""
    if {MUST, MAY} & set(trained):
        return "Trainings have shown which of them must stay in FP32."
    return "No training has shown yet which of them must stay in FP32."


def sensitivity(run: str, found: Ranking) -> Picture:
    """Operations by how sensitive they are, each beside what the plan does with it."""
    label = FORMATS[found.format].label if found.format in FORMATS else found.format
    scaled = at_scale(1.0 if found.scale is None else found.scale)
    caption = {
        "measured": f"Measured: each operation ran once in {label}, with the rest in FP32, {scaled}.",
        "searched": "Estimated from one backward pass: the rounding error of each result times "
        f"its adjoint. {_decided(found.frame['trained'])}",
        "recorded": f"Estimated from the recorded values: the rounding error of each result in "
        f"{label}, gradients {scaled}. To measure the effect on the loss, use mpdiag search or "
        "mpdiag.measure_sensitivity.",
    }[found.source]
    return Picture(
        "sensitivity",
        "The most sensitive operations first",
        f"{caption} Filled marks stay in FP32, by the plan or by training.",
        sensitivity_figure(found.frame, found.value),
        found.frame,
        _receipt(run, found),
    )


def _receipt(run: str, found: Ranking) -> str:
    """The receipt of a ranking, whatever it rests on."""
    if found.source == "measured":
        return receipts.of_run("measured_errors", run)
    if found.source == "searched":
        return receipts.of_run("searched_errors", run)
    fmt = FORMATS.get(found.format, FP16)
    if found.by_operation:
        return receipts.operation_errors(run, fmt)
    return Rows(run, "activation").errors(fmt)


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows: operations by sensitivity."""
    if len(contents.analysis.layers.of_kind("activation")):
        yield sensitivity(str(contents.folder), ranking(contents))
