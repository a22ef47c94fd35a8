"""Trainings side by side: losses, each metric's difference in its margins, how far layers moved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.analysis.comparison.compare import Comparison
from mpdiag.analysis.comparison.comparison_findings import (
    MetricComparison,
    Tone,
    mean_of_finite,
    tone_of,
)
from mpdiag.analysis.comparison.groups import SeedGroup
from mpdiag.analysis.layers import Layers
from mpdiag.display.colors import GREEN, GREY, ORANGE, VERMILION
from mpdiag.display.wording import counted, in_figure, sentence
from mpdiag.numerics.block_recipes import format_label
from mpdiag.reports import plotting, receipts
from mpdiag.reports.picture import Picture
from mpdiag.runs.training_log import FINAL_LOSS, FINAL_WORDS

_MEASURES = ["absmax", "underflow", "overflow"]
STYLES: Mapping[Tone, tuple[str, str]] = {
    "good": (GREEN, "circle"),
    "bad": (VERMILION, "x"),
    "open": (ORANGE, "diamond-open"),
}
"""Colour and mark of an answer on a metric; the mark of one seed is open."""
REACH = 3.0
"""Margins on each side that the figure shows; what lies beyond is drawn at its edge."""
_SMOOTHED = 15  # steps of the running median
_COLUMNS = ["metric", "verdict", "reference", "candidate", "difference", "low", "high", "margin"]


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        name: What it is called.
        words: In which format it trained, and of how many seeds it is.
        group: Its trainings.
    """

    name: str
    words: str
    group: SeedGroup


def trained_in(meta: Mapping[str, Any]) -> str:
    """In which format a run was trained, by its ``meta.json``: ``FP16, level O1``, or ``FP32``."""
    training = meta.get("training")
    if not isinstance(training, dict):
        return "FP32 recording"
    dtype, level = str(training.get("dtype") or ""), str(training.get("level") or "")
    names = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}
    if not dtype or level == "O0":
        return "FP32"
    return f"{names.get(dtype) or format_label(dtype)}{f', level {level}' if level else ''}"


def metric_frame(comparison: Comparison) -> pd.DataFrame:
    """The metrics as ``mpdiag compare`` judges them.

    Returns:
        ``metric``, ``verdict`` (its answer); ``reference``, ``candidate``: means over seeds;
        ``difference`` with the interval ``low`` to ``high`` (infinite with one seed a side),
        ``margin``.
    """
    rows = []
    for m in comparison.metrics:
        r = m.result
        means = (mean_of_finite(m.a), mean_of_finite(m.b))
        rows.append([m.metric, m.answer, *means, r.difference, r.low, r.high, r.margin])
    return pd.DataFrame(rows, columns=_COLUMNS)


def metric_sentence(m: MetricComparison) -> str:
    """What is known of a metric, in one sentence."""
    r = m.result
    if math.isnan(r.difference):
        return f"{m.metric}: not compared, because all trainings of a side diverged"
    share = 100 * (1 - 2 * r.alpha)
    inside = "within" if abs(r.difference) <= r.margin else "beyond"
    margin = signed(r.margin)[1:]
    moved = f"{m.metric} differs by {signed(r.difference)}, {inside} the margin of ±{margin}"
    if not math.isfinite(r.low):
        return f"{moved}: {m.answer}"
    between = f"its {share:.4g} % interval goes from {signed(r.low)} to {signed(r.high)}"
    end = {
        "equivalent": "all of it within the margin: equivalent",
        "different": "all of it beyond the margin: different",
        "inconclusive": "partly within the margin: undecided",
    }[r.verdict]
    if r.verdict == "inconclusive" and m.margin.provisional and abs(r.difference) <= r.margin:
        end = "but the margin was not given: undecided"
    more = f"; {r.seeds_to_decide} seeds per side would decide" if r.seeds_to_decide else ""
    return f"{moved}; {between}, {end}{more}"


def signed(value: float) -> str:
    """A difference with three digits, as people write it: ``+0.0000663``."""
    words = f"{value:+.{decimals(value)}f}"
    return words.rstrip("0").rstrip(".") if "." in words else words


def decimals(value: float) -> int:
    """How many decimals three digits of a number take, at most ten."""
    if not value or not math.isfinite(value):
        return 0
    return min(10, max(0, 2 - math.floor(math.log10(abs(value)))))


_OF_METRICS = ("one-seed", "metric-inconclusive", "metric-different", "margin-unknown")
"""Findings that ``metric_sentence`` says already."""


def remarks(comparison: Comparison) -> list[tuple[str, str]]:
    """What a comparison found besides the metrics, with what to do; then what to do about these.

    Returns:
        Sentences in pairs: what was found ("" where ``metric_sentence`` says it) and the fix, each
        fix once. What hinders the comparison is left out, for that is said before anything else.
    """
    found = comparison.findings[len(comparison.hindrances) :]
    rest = [(sentence(f.message), sentence(f.fix)) for f in found if f.code not in _OF_METRICS]
    fixes = dict.fromkeys(sentence(f.fix) for f in found if f.code in _OF_METRICS and f.fix)
    return [*rest, *(("", fix) for fix in fixes)]


def interval_figure(frame: pd.DataFrame) -> go.Figure:
    """The difference of each metric and its interval, in margins (``metric_frame``).

    Between -1 and +1, the shaded part, a difference does not matter.
    """
    if frame.empty:
        return plotting.empty("the two sides share no metric")
    names = [str(name) for name in frame["metric"]]
    fig = plotting.figure(150 + 44 * len(names), showlegend=True)
    fig.add_vrect(-1, 1, fillcolor=GREEN, opacity=0.13, line_width=0)
    for edge in (-1, 1):
        fig.add_vline(edge, line={"color": GREEN, "width": 1.5, "dash": "dash"})
    fig.add_vline(0, line={"color": GREY, "width": 1})
    for verdict, part in frame[frame["difference"].notna()].groupby("verdict", sort=False):
        colour, mark = STYLES[tone_of(str(verdict))]
        if "one seed" in str(verdict):
            mark = f"{mark.removesuffix('-open')}-open"
        _whiskers(fig, part, colour)
        place = part["difference"] / part["margin"]
        beyond = place.abs() > REACH
        arrows = np.where(place > 0, "triangle-right", "triangle-left")
        fig.add_scatter(
            x=place.clip(-REACH, REACH),
            y=list(part.index),
            mode="markers",
            name=verdict,
            marker={
                "color": colour,
                "symbol": list(np.where(beyond, arrows, mark)),
                "size": 13,
                "line": {"width": 2, "color": colour},
            },
            customdata=[_hover(row) for row in part.to_dict("records")],
            hovertemplate="%{customdata}<extra></extra>",
        )
    plotting.layer_axis(fig, names)
    return fig.update_xaxes(
        title="difference, in margins",
        range=[-REACH - 0.25, REACH + 0.25],
        tickvals=list(range(-3, 4)),
        ticktext=["≤ −3", "−2", "−1", "0", "+1", "+2", "≥ +3"],
    )


def _whiskers(fig: plotting.Drawing, part: pd.DataFrame, colour: str) -> None:
    """The interval of each of these rows; none where it is infinite."""
    x: list[float | None] = []
    y: list[float | None] = []
    for row, low, high, margin in zip(
        part.index, part["low"], part["high"], part["margin"], strict=True
    ):
        if math.isfinite(low) and math.isfinite(high):
            ends = [min(REACH, max(-REACH, end / margin)) for end in (low, high)]
            x += [*ends, None]
            y += [row, row, None]
    fig.add_scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": colour, "width": 5},
        showlegend=False,
        hoverinfo="skip",
    )


def _hover(row: Mapping[Any, Any]) -> str:
    lines = [
        f"<b>{in_figure(str(row['metric']))}</b>: {row['verdict']}",
        f"{row['reference']:.4g} → {row['candidate']:.4g}, difference {signed(row['difference'])}",
        f"margin ±{signed(row['margin'])[1:]}",
        f"interval {signed(row['low'])} to {signed(row['high'])}"
        if math.isfinite(row["low"])
        else "no interval: one seed per side",
    ]
    return "<br>".join(lines)


def intervals(a: str, b: str, comparison: Comparison) -> Picture:
    """The interval of each metric's difference against its margin.

    Args:
        a: The path of the reference, for the receipt.
        b: That of the candidate.
        comparison: What ``mpdiag compare`` says of them.
    """
    frame = metric_frame(comparison)
    first = comparison.metrics[0].result
    counts = first.seeds
    seeds = " and ".join(counted(n, "seed") for n in dict.fromkeys(counts))
    way = "paired by seed" if first.paired else "unpaired"
    one = min(counts) < 2
    caption = (
        f"With {seeds} per side there is a difference but no interval. "
        if one
        else f"Line: the interval of two one-sided t-tests over {seeds} per side, {way}. "
    ) + "Shaded: the margin, within which a difference does not matter."
    if FINAL_LOSS in set(frame["metric"]):
        caption += f" The {FINAL_LOSS} is the {FINAL_WORDS}."
    return Picture(
        "intervals",
        "Metrics against their margins",
        caption,
        interval_figure(frame),
        frame,
        receipts.receipt("compared_metrics", a=repr(a), b=repr(b)),
    )


def standing_frame(
    sides: Sequence[Side], comparisons: Mapping[str, Comparison | None]
) -> pd.DataFrame:
    """All sides in one table, the first as the reference of the others.

    Args:
        sides: The reference first.
        comparisons: Of each other side with it, by name; None where they cannot be compared.

    Returns:
        ``run``, ``trained in``, ``seeds``, a column of means for each metric, ``skipped``,
        ``verdict`` against the first.
    """
    metrics = list(dict.fromkeys(n for s in sides for t in s.group.trainings for n in t.metrics))
    rows: list[dict[str, Any]] = []
    for i, side in enumerate(sides):
        trainings = side.group.trainings
        row: dict[str, Any] = {"run": side.name, "trained in": side.words, "seeds": len(trainings)}
        for name in metrics:
            row[name] = mean_of_finite([t.metrics.get(name, math.nan) for t in trainings])
        row["skipped"] = sum(t.skipped for t in trainings)
        found = comparisons.get(side.name)
        row["against the first"] = "reference" if i == 0 else _standing(found)
        rows.append(row)
    return pd.DataFrame(rows)


def _standing(found: Comparison | None) -> str:
    return "no metric in common" if found is None else found.answer


def loss_frame(sides: Sequence[Side]) -> pd.DataFrame:
    """The losses of all seeds of all sides: ``side``, ``run``, ``step``, ``loss``; skips left out."""
    parts = [
        pd.DataFrame(
            {"side": side.name, "run": t.name, "step": list(t.losses), "loss": t.losses.values()}
        )
        for side in sides
        for t in side.group.trainings
        if t.losses
    ]
    if not parts:
        return pd.DataFrame(columns=["side", "run", "step", "loss"])
    return pd.concat(parts, ignore_index=True)


def loss_figure(frame: pd.DataFrame, places: Mapping[str, int]) -> go.Figure:
    """Loss curves (``loss_frame``), a colour for each side, a line for each seed; log if it can be."""
    known = frame[np.isfinite(frame["loss"].astype(float))]
    if known.empty:
        return plotting.empty("no training log holds a finite loss")
    fig = plotting.figure(360, hovermode="x unified")
    styles = plotting.run_styles(known["side"].unique(), places)
    for side, of_side in known.groupby("side", sort=False):
        name, style = in_figure(str(side)), styles[str(side)]
        for j, (run, part) in enumerate(of_side.groupby("run", sort=False)):
            smooth = part["loss"].rolling(_SMOOTHED, min_periods=1, center=True).median()
            hover = "%{y:.4g}<extra>" + in_figure(str(run)) + "</extra>"
            group: dict[str, Any] = {"legendgroup": name, "showlegend": j == 0}
            fig.line(part["step"], smooth, name, hover=hover, width=2.2, **style, **group)
    fig.update_xaxes(title="step")
    log = bool((known["loss"] > 0).all())
    if log:
        plotting.log10_axis(fig, known["loss"])
    return fig.update_yaxes(title="loss", type="log" if log else "linear")


def side_losses(
    sides: Sequence[Side],
    paths: Mapping[str, str],
    comparison: Comparison | None,
    places: Mapping[str, int] = MappingProxyType({}),
) -> Picture:
    """Loss curves of all sides.

    Args:
        sides: The reference first.
        paths: Each side's place on disk, by name.
        comparison: Of the first two.
        places: Each run's place, which its colour goes by.
    """
    frame = loss_frame(sides)
    caption = f"Running median over {_SMOOTHED} steps, without skipped steps."
    if comparison is not None and comparison.curve.worst_step is not None:
        curve = comparison.curve
        spread = (
            "" if curve.spread is None else f", where seeds spread by {signed(curve.spread)[1:]}"
        )
        caption += (
            f" The largest gap between the first two is {signed(curve.departure)} at step "
            f"{curve.worst_step}{spread} ({counted(curve.steps, 'common step')})."
        )
    drawn, receipt = (
        loss_figure(frame, places),
        receipts.receipt("compared_losses", paths=dict(paths)),
    )
    return Picture("compared-losses", "Losses", caption, drawn, frame, receipt)


def comparison_frame(a: Layers, b: Layers) -> pd.DataFrame:
    """Layers that both runs have.

    Returns:
        ``kind``, ``name``; ``absmax_a``, ``absmax_b``, ``underflow_a`` … (shares in FP16 at scale
        1); ``octaves``: log2 of b's |x|max over a's. Most moved first.
    """
    columns = ["kind", "name", *_MEASURES]
    sides = [
        pd.DataFrame(layers.to_json(), columns=[*columns, "numel"])[columns] for layers in (a, b)
    ]
    frame = sides[0].merge(sides[1], on=["kind", "name"], suffixes=("_a", "_b"))
    known = (frame["absmax_a"] > 0) & (frame["absmax_b"] > 0)
    ratio = (frame["absmax_b"] / frame["absmax_a"].where(known)).astype(float)
    frame["octaves"] = np.log2(ratio)
    order = frame["octaves"].abs().sort_values(ascending=False, kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def apart(a: Layers, b: Layers) -> tuple[int, int]:
    """How many layers only one of the runs has: of a, of b."""
    keys = [set(zip(x.kinds, x.names, strict=True)) for x in (a, b)]
    return len(keys[0] - keys[1]), len(keys[1] - keys[0])
