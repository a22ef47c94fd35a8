"""Receipts of the gradients' tables: the lines of pandas that give the same numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mpdiag.numerics.formats import FP16
from mpdiag.reports.receipts import BINS, FACT, counted_rows, grouped_bins
from mpdiag.reports.views.gradients.frame import SCALES

if TYPE_CHECKING:
    from mpdiag.numerics.formats import FloatFormat


def exponents(run: str, kind: str) -> str:
    """Receipt of ``exponent_frame``."""
    return counted_rows(run, kind) + BINS + grouped_bins(["name", "exponent"], {"name": "layer"})


def totals(run: str, kind: str, layer: str | None = None) -> str:
    """Receipt of ``total_frame``, of all layers or of one."""
    return counted_rows(run, kind, layer) + BINS + grouped_bins(["exponent"])


def over_time(run: str, kind: str, layer: str) -> str:
    """Receipt of ``time_frame``."""
    return counted_rows(run, kind, layer) + BINS + grouped_bins(["step", "exponent"])


def losses_at_scale(run: str, kind: str, fmt: FloatFormat, exponent: int) -> str:
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
        counted_rows(run, kind)
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


def every_scale(run: str, kind: str, fmt: FloatFormat) -> str:
    """Receipt of ``every_scale_frame``: all but Σ|x|."""
    reached = ">=" if fmt.tie_overflows else ">"
    deep = fmt.zero_exponent - SCALES[-1] < -126
    note = "  # subnormals are left out where FP32's own reach below: a lower bound" if deep else ""
    return (
        counted_rows(run, kind)
        + BINS
        + f"""\
absmax = (rows["absmax"] / rows["scale"]).groupby(rows["name"]).max()
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
