"""Receipts of the gradients' tables: the lines of pandas that give the same numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mpdiag.numerics.formats import FP16
from mpdiag.reports.receipts import BINS, FACT, counted_rows, grouped_bins
from mpdiag.reports.views.gradients.frame import SCALES

if TYPE_CHECKING:
    from mpdiag.analysis.scaling.windows import Window
    from mpdiag.numerics.formats import FloatFormat


SUM_BINS = """\
scale = np.rint(np.log2(rows["scale"])).astype(int)  # what the recorded values carry
begin = rows["first_exponent"] - scale
rows = rows.assign(
    exponent=[list(range(e, e + len(c))) for e, c in zip(begin, rows["counts"])],
    mean=[list(bytes(means)) for means in rows["means"]],  # of each bin's values, in 255 steps
)
bins = rows.explode(["exponent", "counts", "mean"]).dropna(subset=["counts"])
bins = bins.astype({"exponent": int, "counts": int, "mean": int})
bins["sum"] = (bins["counts"] + bins["counts"] * bins["mean"] / 255) * 2.0 ** bins["exponent"]
"""
"""Lines after ``counted_rows`` that leave ``bins`` with the estimated ``sum`` of |x| of each."""

_LARGEST = 'absmax = (rows["absmax"] / rows["scale"]).groupby(rows["name"]).max()\n'


def exponents(run: str, kind: str, window: Window | None = None) -> str:
    """Receipt of ``exponent_frame``."""
    grouped = grouped_bins(["name", "exponent"], {"name": "layer"})
    return counted_rows(run, kind, None, window) + BINS + grouped


def totals(run: str, kind: str, layer: str | None = None, window: Window | None = None) -> str:
    """Receipt of ``total_frame``, of all layers or of one."""
    return counted_rows(run, kind, layer, window) + BINS + grouped_bins(["exponent"])


def over_time(run: str, kind: str, layer: str) -> str:
    """Receipt of ``time_frame``."""
    return counted_rows(run, kind, layer) + BINS + grouped_bins(["step", "exponent"])


def losses_at_scale(
    run: str, kind: str, fmt: FloatFormat, exponent: int, window: Window | None = None
) -> str:
    """Receipt of ``scale_frame``: counts and shares; all but Σ|x|."""
    mantissa, top = math.frexp(fmt.overflow_threshold)
    holding = (top - 2 if mantissa == 0.5 else top - 1) - exponent
    reached = ">=" if fmt.tie_overflows else ">"
    zero = fmt.zero_exponent - exponent
    deep = "" if zero >= -126 else "  # FP32 subnormals below 2^-126 are left out: a lower bound"
    lost = f'counts(bins[bins["exponent"] < {zero}])'
    if zero >= -126:
        lost += ' + by_layer["subnormals"].sum()'
    over = f'over = counts(bins[bins["exponent"] > {holding}])'
    if fmt == FP16 and exponent == 0:
        over = FACT + 'over = fact("overflow", "fp16").groupby(rows["name"]).sum()'
    else:
        over += (
            f"\n# The bin that holds the limit says no more than whether its largest value is over.\n"
            f"over = over.where(~(absmax {reached} {fmt.overflow_threshold!r} / 2.0**{exponent}), "
            f"over.clip(lower=1))"
        )
    return (
        counted_rows(run, kind, None, window)
        + BINS
        + f"""\
by_layer = rows.groupby("name")
def counts(bins):
    return bins.groupby("name")["counts"].sum().reindex(by_layer.groups, fill_value=0)
absmax = (rows["absmax"] / rows["scale"]).groupby(rows["name"]).max()
nonzero = counts(bins) + by_layer["subnormals"].sum()
lost = {lost}  # {fmt.label}: |x| ≤ 2^{fmt.zero_exponent}, at scale 2^{exponent}{deep}
{over}
frame = pd.DataFrame({{
    "nonzero": nonzero, "lost": lost, "lost_share": (lost / nonzero).fillna(0),
    "overflow": over, "absmax": absmax,
}}).rename_axis("layer").reset_index()
"""
    )


def every_scale(run: str, kind: str, fmt: FloatFormat, window: Window | None = None) -> str:
    """Receipt of ``every_scale_frame``: losses of the window, overflow of all steps; all but Σ|x|."""
    reached = ">=" if fmt.tie_overflows else ">"
    deep = fmt.zero_exponent - SCALES[-1] < -126
    note = "  # subnormals are left out where FP32's own reach below: a lower bound" if deep else ""
    chosen = ""
    if window is not None:
        chosen = (
            f'rows = rows[(rows["step"] >= {window.first:g}) & (rows["step"] < {window.end:g})]\n'
        )
    return (
        counted_rows(run, kind)
        + _LARGEST
        + chosen
        + BINS
        + f"""\
nonzero = bins["counts"].sum() + rows["subnormals"].sum()
table = []
for k in range({SCALES[0]}, {SCALES[-1] + 1}):
    lost = bins.loc[bins["exponent"] < {fmt.zero_exponent} - k, "counts"].sum()
    if {fmt.zero_exponent} - k >= -126:
        lost += rows["subnormals"].sum(){note}
    table.append((k, lost / nonzero, (absmax {reached} {fmt.overflow_threshold!r} / 2.0**k).sum()))
frame = pd.DataFrame(table, columns=["scale_exponent", "lost_share", "overflow_layers"])
"""
    )


def layer_scales(run: str, kind: str, fmt: FloatFormat, window: Window | None = None) -> str:
    """Receipt of ``layer_scales_frame``: losses of the window, overflow of all steps."""
    reached = ">=" if fmt.tie_overflows else ">"
    chosen = ""
    if window is not None:
        chosen = (
            f'rows = rows[(rows["step"] >= {window.first:g}) & (rows["step"] < {window.end:g})]\n'
        )
    return (
        counted_rows(run, kind)
        + _LARGEST
        + chosen
        + SUM_BINS
        + f"""\
small = rows.groupby("name")["subnormals"].sum()  # below 2^-126, of which only the number is known
def added(bins, column):
    return bins.groupby("name")[column].sum().reindex(small.index, fill_value=0)
nonzero, whole = added(bins, "counts") + small, added(bins, "sum") + small * 2.0**-126 / 2
table = []
for k in range({SCALES[0]}, {SCALES[-1] + 1}):
    zero = {fmt.zero_exponent} - k  # {fmt.label}: |x| ≤ 2^{fmt.zero_exponent} becomes 0
    below = bins[bins["exponent"] < zero]
    lost = added(below, "counts") + (small if zero >= -126 else 0)
    gone = added(below, "sum") + small * 2.0 ** min(-126, zero) / 2
    over = absmax.reindex(small.index) {reached} {fmt.overflow_threshold!r} / 2.0**k
    table.append(pd.DataFrame({{
        "scale_exponent": k, "lost_share": (lost / nonzero).fillna(0),
        "sum_share": (gone / whole).fillna(0), "overflows": over,
    }}))
frame = pd.concat(table).rename_axis("layer").reset_index()
"""
    )
