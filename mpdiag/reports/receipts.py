"""Receipts: the lines of pandas that give a figure's numbers from the run folder alone.

Each is a whole script without this package that leaves its numbers in ``frame``; tests run every one
and compare. They are exact for what a bin says exactly; Σ|x| is no sum of counts and has none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mpdiag.numerics.formats import FORMATS, FP16
from mpdiag.reports import receipts_operations
from mpdiag.reports.frames.gradients import SCALES

if TYPE_CHECKING:
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.reports.frames.sensitivity import Ranking

_COUNTED = """\
import pandas as pd

run = {run!r}
stats = pd.read_parquet(f"{{run}}/stats")
stats = stats.astype({{c: str for c in ("kind", "name", "placement")}})
keys = [stats["kind"], stats["name"]]
# A copy of a replicated tensor counts once; a step's total counts, not its micro-batches.
copy = stats["placement"] == "replicated"
first = stats["rank"].where(copy).groupby(keys).transform("min")
sharded = (stats["placement"] == "sharded").groupby(keys).transform("any")
stats = stats[~copy | ((stats["rank"] == first) & ~sharded)]
{totals}rows = stats[{which}]
"""
_TOTALS = """\
total = stats["micro"] == -1
has_total = total.groupby([stats["kind"], stats["name"]]).transform("any")
stats = stats[(stats["kind"] != "weight_grad") | total | ~has_total]
"""
_FACT = """\
def fact(what, fmt):  # what was counted for a format: in a map, or, in runs of schema 1, in columns
    earlier = f"{fmt}_{what}" if what == "overflow" else f"{what}_{fmt}"
    if earlier in rows:
        return rows[earlier]
    return rows["formats"].map(lambda formats: dict(formats)[fmt][what]).astype("int64")
"""
_BINS = """\
scale = np.rint(np.log2(rows["scale"])).astype(int)  # what the recorded values carry
rows = rows.assign(exponent=[
    list(range(e, e + len(c))) for e, c in zip(rows["first_exponent"] - scale, rows["counts"])
])
bins = rows.explode(["exponent", "counts"]).dropna(subset=["counts"])
bins = bins.astype({"exponent": int, "counts": int})
bins = bins[bins["counts"] > 0]
"""


def exponents(run: str, kind: str) -> str:
    """Receipt of ``exponent_frame``."""
    return _rows(run, kind) + _BINS + _grouped(["name", "exponent"], {"name": "layer"})


def totals(run: str, kind: str, layer: str | None = None) -> str:
    """Receipt of ``total_frame``, of all layers or of one."""
    return _rows(run, kind, layer) + _BINS + _grouped(["exponent"])


def over_time(run: str, kind: str, layer: str) -> str:
    """Receipt of ``time_frame``."""
    return _rows(run, kind, layer) + _BINS + _grouped(["step", "exponent"])


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
        over = _FACT + 'over = fact("overflow", "fp16").groupby(rows["name"]).sum()'
    else:
        over += (
            f"\n# The bin that holds the limit says no more than whether its largest value is over.\n"
            f"over = over.where(~(absmax {reached} {fmt.overflow_threshold!r} / 2.0**{exponent}), "
            f"over.clip(lower=1))"
        )
    return (
        _rows(run, kind)
        + _BINS
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
        _rows(run, kind)
        + _BINS
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


def updates(run: str) -> str:
    """Receipt of ``update_frame``."""
    return (
        _rows(run, "update")
        + _FACT
        + """\
facts = rows[["changed"]].assign(
    swallowed_fp16=fact("swallowed", "fp16"), swallowed_bf16=fact("swallowed", "bf16"),
    vanished_fp16=fact("vanished", "fp16"),
)
frame = facts.groupby(rows["name"]).sum().astype(int)
pairs = zip(rows["ratio_first_exponent"], rows["ratio_counts"])
beyond = [sum(counts[max(0, 11 - int(first)):]) for first, counts in pairs]
beyond = pd.Series(beyond, rows.index).groupby(rows["name"]).sum()
frame["fp16_share"] = (frame["swallowed_fp16"] / frame["changed"]).fillna(0)
frame["bf16_share"] = (frame["swallowed_bf16"] / frame["changed"]).fillna(0)
frame["beyond_2048"] = (beyond / frame["changed"]).fillna(0)  # |w| / |Δw| above 2^11
frame = frame.rename_axis("parameter").reset_index()
"""
    )


def ratios(run: str, parameter: str | None = None) -> str:
    """Receipt of ``ratio_frame``."""
    return (
        _rows(run, "update", parameter)
        + """\
pairs = zip(rows["ratio_first_exponent"].astype(int), rows["ratio_counts"])
rows = rows.assign(exponent=[list(range(e, e + len(c))) for e, c in pairs])
bins = rows[["exponent", "ratio_counts"]].explode(["exponent", "ratio_counts"]).dropna()
bins = bins.astype(int).rename(columns={"ratio_counts": "count"})
frame = bins[bins["count"] > 0].groupby("exponent")["count"].sum().reset_index()
"""
    )


def swallowed_over_time(run: str, parameter: str | None = None) -> str:
    """Receipt of ``swallowed_frame``."""
    return (
        _rows(run, "update", parameter)
        + _FACT
        + """\
facts = rows[["changed"]].assign(fp16=fact("swallowed", "fp16"), bf16=fact("swallowed", "bf16"))
sums = facts.groupby(rows["step"]).sum().astype(int)
frame = pd.DataFrame({
    "changed": sums["changed"],
    "fp16_share": (sums["fp16"] / sums["changed"]).fillna(0),
    "bf16_share": (sums["bf16"] / sums["changed"]).fillna(0),
}).reset_index()
"""
    )


def losses(folder: str, runs: list[str]) -> str:
    """Receipt of ``losses_frame``."""
    return _logs(folder, runs, '{"step": int, "loss": float}')


def scales(folder: str, runs: list[str]) -> str:
    """Receipt of ``scales_frame``: scales and skips."""
    return _logs(folder, runs, '{"step": int, "scale": float, "skipped": bool}')


def norms(folder: str, runs: list[str]) -> str:
    """Receipt of ``norms_frame``."""
    return _logs(folder, runs, '{"step": int, "gradient_norm": float}') + "frame = frame.dropna()\n"


def _logs(folder: str, runs: list[str], columns: str) -> str:
    return f"""\
import pandas as pd

columns = {columns}
parts = []
for run in {runs!r}:
    log = pd.read_json({folder!r} + f"/{{run}}/training.jsonl", lines=True)
    log = log[log["step"].notna()].drop_duplicates("step", keep="last").sort_values("step")
    parts.append(log[list(columns)].astype(columns).assign(run=run))
frame = pd.concat(parts, ignore_index=True)
"""


def command(words: str) -> str:
    """Where the numbers are a replay or a document of their own: the command that prints them."""
    return f"""\
import json, subprocess

frame = json.loads(subprocess.run({words.split()!r}, capture_output=True, text=True).stdout)
"""


def profile(run: str) -> str:
    """Receipt of ``verdict_frame``: kernel time by verdict."""
    return f"""\
import json
from pathlib import Path
import pandas as pd

kernels = pd.DataFrame(json.loads(Path({run + "/profile.json"!r}).read_text())["kernels"])
frame = kernels.groupby("verdict")["time_us"].sum().reset_index()
frame["share"] = frame["time_us"] / frame["time_us"].sum()
"""


def kernels(run: str) -> str:
    """Receipt of ``kernel_frame``: the longest kernels."""
    return f"""\
import json
from pathlib import Path
import pandas as pd

frame = pd.DataFrame(json.loads(Path({run + "/profile.json"!r}).read_text())["kernels"])
frame["share"] = frame["time_us"] / frame["time_us"].sum()
frame = frame[["name", "calls", "time_us", "verdict", "share"]]
frame = frame.sort_values("time_us", ascending=False, kind="stable", ignore_index=True)
"""


def roofline(run: str) -> str:
    """Receipt of ``roofline_frame``: intensity and rate of each matrix operation."""
    return f"""\
import json
from pathlib import Path
import pandas as pd

frame = pd.DataFrame(json.loads(Path({run + "/profile.json"!r}).read_text())["operations"])
frame = frame[(frame["flops"] > 0) & (frame["bytes"] > 0) & (frame["time_us"] > 0)]
frame["intensity"] = frame["flops"] / frame["bytes"]  # FLOP per byte
frame["rate"] = frame["flops"] * frame["calls"] / frame["time_us"] / 1e6  # TFLOP/s
frame = frame[["op", "module", "verdict", "intensity", "rate", "calls", "time_us"]]
frame = frame.sort_values("time_us", ascending=False, kind="stable", ignore_index=True)
"""


def sensitivity(run: str, found: Ranking) -> str:
    """Receipt of a ``Ranking``, whatever it rests on."""
    fmt = FORMATS.get(found.format, FP16)
    if found.source == "measured":
        return receipts_operations.measured(run)
    if found.source == "searched":
        return receipts_operations.searched(run)
    if found.by_operation:
        return receipts_operations.recorded(run, fmt)
    return receipts_operations.outputs(_rows(run, "activation"), fmt)


def layers(run: str, kind: str) -> str:
    """Receipt of each layer's extremes: ``name``, ``absmin``, ``absmax``."""
    return (
        _rows(run, kind)
        + """\
rows = rows.assign(absmax=rows["absmax"] / rows["scale"], absmin=rows["absmin"] / rows["scale"])
frame = rows.groupby("name").agg(absmin=("absmin", "min"), absmax=("absmax", "max")).reset_index()
"""
    )


def comparison(a: str, b: str, kind: str) -> str:
    """Receipt of ``comparison_frame``'s largest values."""
    return f"""\
import numpy as np
import pandas as pd

def largest(run):
    stats = pd.read_parquet(f"{{run}}/stats")
    stats = stats[(stats["kind"].astype(str) == {kind!r}) & (({kind!r} != "update") | ~stats["skipped"])]
    values = stats["absmax"] / stats["scale"]
    return values.groupby(stats["name"].astype(str)).max().rename("absmax").reset_index()

frame = largest({a!r}).merge(largest({b!r}), on="name", suffixes=("_a", "_b"))
frame["octaves"] = np.log2(frame["absmax_b"] / frame["absmax_a"])
"""


def _rows(run: str, kind: str, layer: str | None = None) -> str:
    which = f'stats["kind"] == {kind!r}'
    if kind == "update":
        which = f'({which}) & ~stats["skipped"]'
    if layer is not None:
        which = f'({which}) & (stats["name"] == {layer!r})'
    text = _COUNTED.format(run=run, which=which, totals=_TOTALS if kind == "weight_grad" else "")
    return text.replace("import pandas", "import numpy as np\nimport pandas", 1)


def _grouped(keys: list[str], names: dict[str, str] | None = None) -> str:
    renamed = {"counts": "count", **(names or {})}
    return f'frame = bins.groupby({keys!r})["counts"].sum().reset_index().rename(columns={renamed!r})\n'
