"""Layers over the steps, as tidy tables: all of them, and one."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.layers import Layers, countable_rows, share
from mpdiag.analysis.scaling.windows import by_step
from mpdiag.numerics.formats import FloatFormat
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.reports.views.gradients.frame import SCALES
from mpdiag.runs.records import Records
from mpdiag.runs.schema import Kind

POINTS = 60
"""Points of a small curve in a table, at most: each merges neighbouring recorded steps."""


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
        layers: The layers, in the order of the rows; the steps whose losses count.
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
    mine = (records.name == records.code("name", layer)) & records.of_kind(kind)
    mine &= countable_rows(records)
    steps = np.unique(records.step[mine].astype(np.int64))
    h = by_step(records, mine, steps)
    scaled = _losses(h, fmt, exponent).add_suffix("_scaled")
    frame = pd.concat([_losses(h, fmt, 0), scaled.drop(columns="absmax_scaled")], axis=1)
    frame.insert(0, "step", steps)
    return frame


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


def scale_exponent(scale: float) -> int:
    """log2 of a scale, within those that a slider shows."""
    return int(np.clip(np.log2(scale), SCALES[0], SCALES[-1]))
