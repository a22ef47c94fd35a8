"""Receipts of the tables of layers: the lines of pandas that give the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdiag.reports.receipts import BINS, counted_rows
from mpdiag.reports.views.gradients.receipt import SUM_BINS

if TYPE_CHECKING:
    from mpdiag.analysis.scaling.windows import Window
    from mpdiag.numerics.formats import FloatFormat


def _losses(key: str, fmt: FloatFormat, exponents: dict[str, int]) -> str:
    """Lines that leave what is lost at some scales in ``frame``, by a column; after ``SUM_BINS``.

    Args:
        key: The column to group by.
        fmt: The format.
        exponents: log2 of each scale, by what its columns end in.
    """
    text = f"""\
small = rows.groupby({key!r})["subnormals"].sum()  # below 2^-126, of which only the number is known
def added(bins, column):
    return bins.groupby({key!r})[column].sum().reindex(small.index, fill_value=0)
nonzero, whole = added(bins, "counts") + small, added(bins, "sum") + small * 2.0**-126 / 2
frame = pd.DataFrame({{"absmax": (rows["absmax"] / rows["scale"]).groupby(rows[{key!r}]).max()}})
"""
    for ending, exponent in exponents.items():
        zero = fmt.zero_exponent - exponent
        few = " + small" if zero >= -126 else ""
        text += f"""\
below = bins[bins["exponent"] < {zero}]  # {fmt.label} at scale 2^{exponent}: |x| ≤ 2^{zero} becomes 0
frame["lost_share{ending}"] = ((added(below, "counts"){few}) / nonzero).fillna(0)
gone = added(below, "sum") + small * 2.0 ** {min(-126, zero)} / 2
frame["sum_share{ending}"] = (gone / whole).fillna(0)
"""
    return text


def lost_by_layer(run: str, kind: str, fmt: FloatFormat, window: Window | None = None) -> str:
    """Receipt of the shares lost in an ``overview_frame``, without a loss scale."""
    return (
        counted_rows(run, kind, None, window)
        + SUM_BINS
        + _losses("name", fmt, {"": 0})
        + 'frame = frame.rename_axis("layer").reset_index()\n'
    )


def layer_course(run: str, kind: str, layer: str, fmt: FloatFormat, exponent: int) -> str:
    """Receipt of ``layer_course_frame``."""
    return (
        counted_rows(run, kind, layer)
        + SUM_BINS
        + _losses("step", fmt, {"": 0, "_scaled": exponent})
        + "frame = frame.reset_index()\n"
    )


def movement(run: str, kind: str, step: int, fmt: FloatFormat, before: int) -> str:
    """Receipt of ``movement_frame``."""
    return (
        counted_rows(run, kind)
        + BINS
        + f"""\
recorded = np.unique(rows["step"])
parts = {{"": [{step}], "_before": recorded[recorded < {step}][-{before}:]}}
frame = pd.DataFrame(index=np.unique(rows["name"]))
for ending, steps in parts.items():
    some, few = bins[bins["step"].isin(steps)], rows[rows["step"].isin(steps)]
    counts = some.groupby("name")["counts"].sum()
    small = few.groupby("name")["subnormals"].sum()
    lost = some[some["exponent"] < {fmt.zero_exponent}].groupby("name")["counts"].sum()
    lost = lost.reindex(small.index, fill_value=0){" + small" if fmt.zero_exponent >= -126 else ""}
    mean = (some["exponent"] * some["counts"]).groupby(some["name"]).sum() / counts
    frame["mean" + ending] = mean
    frame["absmax" + ending] = (few["absmax"] / few["scale"]).groupby(few["name"]).max()
    frame["lost_share" + ending] = lost / (counts.reindex(small.index, fill_value=0) + small)
frame["shift"] = frame.pop("mean") - frame.pop("mean_before")
frame = frame.dropna(subset=["shift"]).rename_axis("layer").reset_index()
"""
    )


def losses(run: str) -> str:
    """Receipt of the loss of a recording's own log."""
    return f"""\
import pandas as pd

log = pd.read_json({run!r} + "/training.jsonl", lines=True)
log = log[log["step"].notna()].drop_duplicates("step", keep="last").sort_values("step")
frame = log[["step", "loss"]].astype({{"step": int, "loss": float}}).dropna()
frame = frame[frame["loss"].abs() < float("inf")]
"""
