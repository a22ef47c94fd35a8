"""Layers over the steps: tables of all of them, and the tables and pictures of one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.figures import at_scale
from mpdiag.analysis.layers import Layers, countable_rows, share
from mpdiag.analysis.scaling.windows import by_step
from mpdiag.display.colors import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from mpdiag.display.wording import layer_name, magnitude, percent, sentence
from mpdiag.numerics.formats import FloatFormat
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.reports import plotting
from mpdiag.reports.picture import Picture
from mpdiag.reports.receipts import Rows
from mpdiag.reports.views.gradients import figure
from mpdiag.reports.views.gradients.figure import Range
from mpdiag.reports.views.gradients.frame import some_layers
from mpdiag.runs.records import Records
from mpdiag.runs.schema import Kind

POINTS = 60
"""Points of a small curve in a table, at most: each merges neighbouring recorded steps."""


def layers_named(layers: Layers, text: str) -> Layers:
    """Layers with a text in their name. Upper and lower case count alike."""
    wanted = text.strip().lower()
    names = [layer_name(str(name)).lower() for name in layers.names]
    return some_layers(layers, np.flatnonzero(np.array([wanted in name for name in names], bool)))


def course_frame(
    records: Records, kind: Kind, fmt: FloatFormat, exponent: int = 0, most: int = POINTS
) -> pd.DataFrame:
    """Every layer over the steps, neighbouring recorded steps merged into ``most`` points at most.

    Returns:
        ``layer``; ``first``, ``last``: the steps of a point; ``lost_share`` of the non-zero values
        and ``sum_share`` of Σ|x|, an estimate, that become 0 at the scale 2^exponent; ``absmax``.
    """
    names = np.unique(records.name[records.of_kind(kind)])
    words = np.array(records.words["name"], dtype=object)[names]
    place = np.full(len(records.words["name"]) + 1, -1)
    place[names] = np.arange(len(names))
    parts = []
    for first, last, rows in _spans(records, kind, most):
        group = np.full(len(records), -1)
        group[rows] = place[records.name[rows]]
        h = records.merged(group, len(names))
        part = _losses(h, fmt, exponent).assign(layer=words, first=first, last=last)
        parts.append(part[h.numel > 0])
    columns = ["layer", "first", "last", "lost_share", "sum_share", "absmax"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def update_course_frame(records: Records, most: int = POINTS) -> pd.DataFrame:
    """How small each module's updates are beside its weights, over the steps.

    Returns:
        ``layer``, ``first``, ``last``, ``changed``: elements; ``update_ratio``: the mean of log2 of
        |Δw| / |w| over them, each taken at the middle of its power of two.
    """
    owners, owner = _owners(records)
    parts = []
    for first, last, rows in _spans(records, "update", most):
        h = records.select(rows).ratios(owner[records.name[rows]], len(owners))
        changed = h.counts.sum(axis=1)
        ratio = -(_mean_exponent(h) + 0.5)
        part = pd.DataFrame({"layer": owners, "changed": changed, "update_ratio": ratio})
        parts.append(part.assign(first=first, last=last)[changed > 0])
    columns = ["layer", "first", "last", "changed", "update_ratio"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def _owners(records: Records) -> tuple[NDArray[np.object_], NDArray[np.int64]]:
    """The modules that parameters belong to, and the module of each word for a name."""
    modules = [str(word).rpartition(".")[0] for word in records.words["name"]]
    known, owner = np.unique(np.array([*modules, ""], dtype=object), return_inverse=True)
    return known, owner.reshape(-1)


def _spans(records: Records, kind: Kind, most: int) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """The first and the last step of each point, and its rows."""
    rows = np.flatnonzero(records.of_kind(kind) & countable_rows(records))
    rows = rows[np.argsort(records.step[rows], kind="stable")]
    steps, begins = np.unique(records.step[rows], return_index=True)
    for some in np.array_split(np.arange(len(steps)), min(most, len(steps)) or 1):
        if len(some):
            end = begins[some[-1] + 1] if some[-1] + 1 < len(steps) else len(rows)
            yield int(steps[some[0]]), int(steps[some[-1]]), rows[begins[some[0]] : end]


def _losses(h: ExponentHistogram, fmt: FloatFormat, exponent: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "lost_share": share(h.lost_to_zero(fmt, exponent).value, h.nonzero),
            "sum_share": share(h.abs_sum(fmt.zero_exponent - exponent).value, h.abs_sum().value),
            "absmax": h.absmax,
        }
    )


def _mean_exponent(h: ExponentHistogram) -> NDArray[np.float64]:
    """The mean exponent of the values of each histogram; NaN where there is none."""
    counted = h.counts.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: NDArray[np.float64] = (h.counts * h.exponents).sum(axis=-1) / counted
    return mean


def overview_frame(
    analysis: Analysis,
    layers: Layers,
    course: pd.DataFrame,
    updates: pd.DataFrame,
    types: Mapping[str, str],
) -> pd.DataFrame:
    """All layers, one row each, with their course over the steps.

    Args:
        analysis: Of the run: its target and its scale.
        layers: The layers, in the order of the rows, with the steps that are judged.
        course: ``course_frame`` at scale 1.
        updates: ``update_course_frame``.
        types: The type of each module.

    Returns:
        ``layer``, ``type``; ``sum_share``, ``sum_share_scaled``, ``lost_share``: of Σ|x| and of the
        non-zero values, without a loss scale and with the plan's; ``absmax``; ``update_ratio`` of the
        last point; ``lost_course``, ``largest_course`` (log2), ``update_course``: lists.
    """
    h, fmt = layers.histograms, analysis.target
    exponent = int(np.log2(analysis.plan.loss_scale.recommended))
    plain, scaled = _losses(h, fmt, 0), _losses(h, fmt, exponent)
    lost, largest = (_lists(course, column) for column in ("sum_share", "absmax"))
    ratios = _lists(updates, "update_ratio")
    names = [str(name) for name in layers.names]
    frame = pd.DataFrame(
        {
            "layer": names,
            "type": [types.get(name, "") for name in names],
            "sum_share": plain["sum_share"],
            "sum_share_scaled": scaled["sum_share"],
            "lost_share": plain["lost_share"],
            "absmax": h.absmax,
            "update_ratio": [ratios[name][-1] if name in ratios else np.nan for name in names],
        }
    )
    frame["lost_course"] = [lost.get(name, []) for name in names]
    logs = {
        name: [float(np.log2(v)) if v > 0 else None for v in vs] for name, vs in largest.items()
    }
    frame["largest_course"] = [logs.get(name, []) for name in names]
    frame["update_course"] = [ratios.get(name, []) for name in names]
    return frame


def _lists(frame: pd.DataFrame, column: str) -> dict[str, list[float]]:
    return {str(name): part[column].tolist() for name, part in frame.groupby("layer", sort=False)}


def layer_course_frame(
    records: Records, kind: Kind, layer: str, fmt: FloatFormat, exponent: int
) -> pd.DataFrame:
    """One layer at each recorded step.

    Returns:
        ``step``; ``lost_share``, ``sum_share`` at scale 1; ``lost_share_scaled``, ``sum_share_scaled``
        at the scale 2^exponent; ``absmax``.
    """
    steps, h = _by_step(records, kind, layer)
    scaled = _losses(h, fmt, exponent).add_suffix("_scaled")
    frame = pd.concat([_losses(h, fmt, 0), scaled.drop(columns="absmax_scaled")], axis=1)
    frame.insert(0, "step", steps)
    return frame


def time_frame(records: Records, kind: Kind, layer: str) -> pd.DataFrame:
    """One layer over time: ``step``, ``exponent``, ``count``."""
    steps, h = _by_step(records, kind, layer)
    rows, columns = np.nonzero(h.counts)
    return pd.DataFrame(
        {
            "step": steps[rows],
            "exponent": h.exponents[columns],
            "count": h.counts[rows, columns],
        }
    )


def _by_step(records: Records, kind: Kind, layer: str) -> tuple[Any, ExponentHistogram]:
    mine = records.name == records.code("name", layer)
    rows = mine & records.of_kind(kind) & countable_rows(records)
    steps = np.unique(records.step[rows].astype(np.int64))
    return steps, by_step(records, rows, steps)


def layer_updates_frame(records: Records, layer: str) -> pd.DataFrame:
    """The updates of one module's parameters at each recorded step: ``step``, ``update_ratio``."""
    frame = update_course_frame(_parameters_of(records, layer), most=len(records) or 1)
    return frame[frame["layer"] == layer][["first", "update_ratio"]].rename(
        columns={"first": "step"}
    )


def _parameters_of(records: Records, layer: str) -> Records:
    words = records.words["name"]
    codes = [i for i, word in enumerate(words) if str(word).rpartition(".")[0] == layer]
    return records.select(np.isin(records.name, codes) & records.of_kind("update"))


# -- one layer -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer at each recorded step: its pictures in a format, at a loss scale.

    Attributes:
        run: The run folder.
        records: The recording.
        kind: Of which tensors.
        name: The layer's.
        fmt: The format.
        exponent: log2 of the loss scale.
    """

    run: str
    records: Records
    kind: Kind
    name: str
    fmt: FloatFormat
    exponent: int

    @cached_property
    def over_steps(self) -> pd.DataFrame:
        """Its values in each power of two, step by step."""
        return time_frame(self.records, self.kind, self.name)

    @property
    def scale(self) -> str:
        """The loss scale, as a phrase."""
        return at_scale(2.0**self.exponent)

    def over_time(self, *, log: bool = True) -> Picture:
        """Steps × powers of two."""
        held = figure.window(self.fmt, self.exponent)
        return Picture(
            "over-time",
            f"{layer_name(self.name)} over time",
            f"Each column is a recorded step. The lines mark {self.fmt.label}'s range {self.scale}. "
            f"{_moved(self.over_steps)}".rstrip(),
            over_time_figure(self.over_steps, held, log=log),
            self.over_steps,
            Rows(self.run, self.kind, self.name).bins("step", "exponent"),
        )

    def course(self) -> Picture:
        """What it loses, its largest value and its updates, step by step."""
        frame = layer_course_frame(self.records, self.kind, self.name, self.fmt, self.exponent)
        updates = layer_updates_frame(self.records, self.name)
        return Picture(
            "layer-course",
            "Share lost, largest value, updates",
            _course_words(frame, updates, self.fmt, self.exponent),
            course_figure(frame, updates, self.fmt, self.scale),
            frame,
            Rows(self.run, self.kind, self.name).course(self.fmt, self.exponent),
        )


def _course_words(
    frame: pd.DataFrame, updates: pd.DataFrame, fmt: FloatFormat, exponent: int
) -> str:
    if frame.empty:
        return ""
    text = ""
    for column, scale in (("sum_share", 1.0), ("sum_share_scaled", 2.0**exponent)):
        if column == "sum_share_scaled" and exponent == 0:
            continue
        at = int(frame[column].to_numpy().argmax())
        most = float(frame[column].iloc[at])
        where = f", at step {frame['step'].iloc[at]:,}" if most > 0 else ""
        said = sentence(at_scale(scale))[:-1]
        text += f"{said} {fmt.label} loses at most {percent(most)} of its sum in a step{where}. "
    top = int(frame["absmax"].to_numpy().argmax())
    text += (
        f"Its largest value is {magnitude(float(frame['absmax'].iloc[top]))}, at step "
        f"{frame['step'].iloc[top]:,}"
    )
    if len(updates):
        first, last = (2.0 ** float(updates["update_ratio"].iloc[i]) for i in (0, -1))
        text += (
            f"; an update of its parameters is {magnitude(first)} of the weight in the first "
            f"recorded step and {magnitude(last)} in the last (geometric means, estimated)"
        )
    return f"{text}."


def _moved(frame: pd.DataFrame) -> str:
    """How far the mean exponent moved from the first to the last step of a ``time_frame``."""
    steps = sorted(int(s) for s in frame["step"].unique())
    if not steps:
        return ""
    means = []
    for step in (steps[0], steps[-1]):
        part = frame[frame["step"] == step]
        means.append(float((part["exponent"] * part["count"]).sum() / part["count"].sum()))
    moved = means[1] - means[0]
    way = "larger" if moved > 0 else "smaller"
    return (
        f"From step {steps[0]:,} to step {steps[-1]:,} the values become {way} by "
        f"{abs(moved):.1f} powers of two (means of their exponents)."
        if abs(moved) >= 0.05
        else f"The mean of the exponents is the same at step {steps[0]:,} and at step {steps[-1]:,}."
    )


WORDS_GROUND = "rgba(255, 255, 255, 0.75)"
"""Behind words that lie on cells, in dark as in light; their ink is ``WORDS_INK``."""
WORDS_INK = "#1c2430"


def course_figure(
    frame: pd.DataFrame, updates: pd.DataFrame, fmt: FloatFormat, scale: str
) -> go.Figure:
    """What one layer loses, its largest value and its updates, at each recorded step.

    Args:
        frame: ``layer_course_frame``.
        updates: ``layer_updates_frame``; may be empty.
        fmt: The format.
        scale: The selected scale, as a phrase.
    """
    if frame.empty:
        return plotting.empty("not recorded in any step")
    rows = 3 if len(updates) else 2
    fig = plotting.figure(170 * rows + 50, hovermode="x")
    lines = [
        ("sum_share", f"sum lost in {fmt.label}, without a loss scale", VERMILION, "solid"),
        ("lost_share", f"values lost in {fmt.label}, without a loss scale", ORANGE, "dot"),
    ]
    if not np.allclose(frame["sum_share"], frame["sum_share_scaled"]):
        lines.append(("sum_share_scaled", f"sum lost in {fmt.label}, {scale}", GREEN, "dash"))
    for column, name, colour, dash in lines:
        _line(fig, frame["step"], frame[column], name, colour, "y", dash)
    with np.errstate(divide="ignore"):
        largest = np.log2(frame["absmax"].to_numpy(float))
    largest = np.where(np.isfinite(largest), largest, np.nan)
    _line(fig, frame["step"], largest, "largest |x|", BLUE, "y2")
    if len(updates):
        words = "|Δw| / |w| of its parameters"
        _line(fig, updates["step"], updates["update_ratio"], words, PURPLE, "y3")
    gap, height = 0.07, (1 - 0.07 * (rows - 1)) / rows
    base: dict[str, Any] = fig.layout.yaxis.to_plotly_json()
    titles = ("lost", "largest |x|", "|Δw| / |w|")
    for i in range(rows):
        top = 1 - i * (height + gap)
        domain = [max(0.0, top - height), top]
        fig.layout["yaxis" if i == 0 else f"yaxis{i + 1}"] = base | {
            "domain": domain,
            "title": titles[i],
            "anchor": "x",
            "nticks": 5,
            **({"tickformat": ".2~%", "rangemode": "tozero"} if i == 0 else _POWERS),
        }
    fig.update_xaxes(title="step", anchor=f"y{rows}")
    return fig


_POWERS = {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "tickformat": "d"}
"""An axis of log2, labelled as powers of two."""


def _line(
    fig: plotting.Drawing, x: Any, y: Any, name: str, colour: str, axis: str, dash: str = "solid"
) -> None:
    hover = "%{y:.2%}" if axis == "y" else "2^%{y:.1f}"
    dots: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 4}, "yaxis": axis}
    fig.line(x, y, name, colour, hover, width=2, dash=dash, **dots)


def over_time_figure(frame: pd.DataFrame, held: Range, *, log: bool) -> go.Figure:
    """Steps × exponents of one layer (``time_frame``), values upward, with the format's window."""
    if frame.empty:
        return plotting.empty("no non-zero values in any recorded step")
    low, high = figure.exponents_shown(frame, held)
    steps = sorted(frame["step"].unique())
    counts = figure.matrix(frame, "step", steps, low, high)
    labels = np.repeat([[str(s) for s in steps]], counts.shape[1], axis=0)
    fig = plotting.figure(440, hovermode="closest")
    hover = "step %{text}<br>from 2^%{y:.0f}: %{customdata:,} values"
    cells = {"y": np.arange(low, high) + 0.5, "customdata": counts.T, "text": labels}
    fates = figure.fates_of(counts, low, held)
    for name, part in figure.shades(counts, fates, log=log):
        said = f"{hover}<extra>{figure.FATE_WORDS[name]}</extra>"
        figure.add_cells(fig, name, counts, part, z=part.T, hovertemplate=said, **cells)
    places = list(range(0, len(steps), max(1, len(steps) // 10)))
    plotting.exponent_axis(fig, low, high, figure.VALUES)
    fig.update_yaxes(fig.layout.xaxis.to_plotly_json())
    fig.layout.xaxis = {
        "title": "recorded step",
        "tickmode": "array",
        "tickvals": places,
        "ticktext": [str(steps[i]) for i in places],
        "gridcolor": plotting.GRID,
        "range": [-0.5, len(steps) - 0.5],
    }
    for place, words, colour in (
        (held.zero, "↓ 0", VERMILION),
        (held.normal, "↓ subnormal", GREY),
        (held.top, "↑ ∞", PURPLE),
    ):
        if low < place < high:
            font = {"size": 12, "color": WORDS_INK}
            label = {"text": words, "font": font, "bgcolor": WORDS_GROUND}
            line = {"color": colour, "width": 1.5, "dash": "dot"}
            fig.add_hline(place, annotation=label, annotation_position="top right", line=line)
    return fig
