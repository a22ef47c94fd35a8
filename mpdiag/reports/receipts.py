"""Receipts: the lines of pandas that reproduce a figure's numbers from the run folder alone.

Each receipt is a complete script that does not import this package and leaves its numbers in ``frame``;
tests run every one and compare. A receipt reads the rows that count, and makes the columns of its table:
``COLUMNS`` has how each is computed. Receipts are exact where a bin is exact; shares of Σ|x| are
estimates, as they are in the tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mpdiag.analysis.scaling.windows import Window
from mpdiag.numerics.formats import FP16, FloatFormat

_ROWS = """\
import numpy as np
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
_SUM_BINS = """\
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
COLUMNS = {
    "absmax": '(rows["absmax"] / rows["scale"]).groupby(rows[key]).max()',
    "nonzero": 'added(bins, "counts") + small',
    "lost": 'added(below, "counts") + (small if zero >= -126 else 0)  # without them a lower bound',
    "lost_share": '(frame["lost"] / frame["nonzero"]).fillna(0)',
    "whole": 'added(bins, "sum") + small * 2.0**-126 / 2',
    "gone": 'added(below, "sum") + small * 2.0 ** min(-126, zero) / 2',
    "sum_share": '(frame["gone"] / frame["whole"]).fillna(0)',
    "overflows": 'frame["absmax"] {reached} {threshold!r} / 2.0**k',
    # The bin that holds the limit says no more than whether its largest value is over.
    "overflow": 'added(bins[bins["exponent"] > {holding} - k], "counts").clip(lower=frame["overflows"])',
    "mean": '(bins["exponent"] * bins["counts"]).groupby(bins[key]).sum() / added(bins, "counts")',
}
"""Of a group of rows: how each column is computed. What is lost becomes 0, at the scale 2^k."""
_AT_SCALE = """\
key = {key!r}
def at_scale(k, rows=rows, bins=bins):  # {label} at a loss scale of 2**k
    small = rows.groupby(key)["subnormals"].sum()  # below 2^-126, of which only the number is known
    def added(bins, column):
        return bins.groupby(key)[column].sum().reindex(small.index, fill_value=0)
    zero = {zero} - k  # |x| up to 2**zero becomes 0
    below, frame = bins[bins["exponent"] < zero], pd.DataFrame(index=small.index)
"""
_LAYERS = '.rename_axis("layer").reset_index()\n'
_SHARES = ("nonzero", "lost", "lost_share", "whole", "gone", "sum_share")
_UPDATES = """\
facts = rows[["changed"]].assign(
    swallowed_fp16=fact("swallowed", "fp16"), swallowed_bf16=fact("swallowed", "bf16"),
    vanished_fp16=fact("vanished", "fp16"),
)
frame = facts.groupby(rows[{key!r}]).sum().astype(int)
for fmt in ("fp16", "bf16"):
    frame[f"{{fmt}}_share"] = (frame[f"swallowed_{{fmt}}"] / frame["changed"]).fillna(0)
{more}frame = frame.reset_index()
"""
_BEYOND = """\
pairs = zip(rows["ratio_first_exponent"], rows["ratio_counts"])
beyond = [sum(counts[max(0, 11 - int(first)):]) for first, counts in pairs]
beyond = pd.Series(beyond, rows.index).groupby(rows["name"]).sum()
frame["beyond_2048"] = (beyond / frame["changed"]).fillna(0)  # |w| / |Δw| above 2^11
frame = frame.rename_axis("parameter")
"""
_RATIOS = """\
pairs = zip(rows["ratio_first_exponent"].astype(int), rows["ratio_counts"])
rows = rows.assign(exponent=[list(range(e, e + len(c))) for e, c in pairs])
bins = rows[["exponent", "ratio_counts"]].explode(["exponent", "ratio_counts"]).dropna()
bins = bins.astype(int).rename(columns={"ratio_counts": "count"})
frame = bins[bins["count"] > 0].groupby("exponent")["count"].sum().reset_index()
"""
_RANGES = """\
rows = rows.assign(absmax=rows["absmax"] / rows["scale"], absmin=rows["absmin"] / rows["scale"])
frame = rows.groupby("name").agg(absmin=("absmin", "min"), absmax=("absmax", "max")).reset_index()
"""
_OUTPUT_ERRORS = """\
bins["sum"] /= 2.0 ** bins["exponent"]
bins = bins.groupby(["name", "exponent"], as_index=False)[["counts", "sum"]].sum()
bins = bins[bins["counts"] > 0]
bins["mean"] = (bins["sum"] / bins["counts"]).clip(1, 2)  # in units of 2^exponent
absmax = (rows["absmax"] / rows["scale"]).groupby(rows["name"]).max()
forward = {
    name: error(of["exponent"], of["counts"], of["mean"], absmax[name])
    for name, of in bins.groupby("name")
}
frame = pd.DataFrame(forward.items(), columns=["module", "forward"])
"""


@dataclass(frozen=True)
class Rows:
    """The rows of a run's statistics that a table is of: receipts begin by reading them.

    Attributes:
        run: The run folder.
        kind: The kind of tensors.
        layer: Of one layer alone.
        window: Of its steps alone.
    """

    run: str
    kind: str
    layer: str | None = None
    window: Window | None = None

    @property
    def read(self) -> str:
        """Lines that leave the rows that count in ``rows``."""
        which = f'stats["kind"] == {self.kind!r}'
        if self.kind == "update":
            which = f'({which}) & ~stats["skipped"]'
        if self.layer is not None:
            which = f'({which}) & (stats["name"] == {self.layer!r})'
        if self.window is not None:
            which = f"({which}) & {_inside('stats', self.window)}"
        totals = _TOTALS if self.kind == "weight_grad" else ""
        return _ROWS.format(run=self.run, which=which, totals=totals)

    def bins(self, *keys: str) -> str:
        """Receipt of the values by ``name``, ``step`` or ``exponent``: how many are in each."""
        renamed = {"counts": "count", **({"name": "layer"} if "name" in keys else {})}
        grouped = f'bins.groupby({list(keys)!r})["counts"].sum().reset_index()'
        return self.read + _BINS + f"frame = {grouped}.rename(columns={renamed!r})\n"

    def losses(self, fmt: FloatFormat, exponent: int) -> str:
        """Receipt of ``scale_frame``: counts and shares; all but Σ|x|."""
        columns = ("absmax", "nonzero", "lost", "lost_share", "overflows", "overflow")
        exact = ""
        if fmt == FP16 and exponent == 0:  # what overflows without a scale was counted
            over = 'fact("overflow", "fp16").groupby(rows["name"]).sum()'
            exact = f'{_FACT}frame["overflow"] = {over}\n'
        table = f"frame = at_scale({exponent})\n{exact}frame = frame{_LAYERS}"
        return self.read + _BINS + _at_scale(fmt, "name", columns) + table

    def every_scale(self, fmt: FloatFormat, scales: range, *, by_layer: bool) -> str:
        """Receipt of the losses of the window at every scale, and of the overflow in any step.

        Args:
            fmt: The format.
            scales: Exponents of the scales.
            by_layer: Of each layer, Σ|x| too (``layer_scales_frame``); else of all layers together
                (``every_scale_frame``, all but Σ|x|).
        """
        limit = f"{'>=' if fmt.tie_overflows else '>'} {fmt.overflow_threshold!r} / 2.0**k"
        chosen = "" if self.window is None else f"rows = rows[{_inside('rows', self.window)}]\n"
        together = f"""\
table = []
for k in {scales!r}:
    lost, nonzero = at_scale(k)[["lost", "nonzero"]].sum()
    table.append((k, lost / nonzero, (largest {limit}).sum()))
frame = pd.DataFrame(table, columns=["scale_exponent", "lost_share", "overflow_layers"])
"""
        each = f"""\
table = [at_scale(k).assign(scale_exponent=k, overflows=largest {limit}) for k in {scales!r}]
frame = pd.concat(table){_LAYERS}"""
        return (
            replace(self, window=None).read
            + 'largest = (rows["absmax"] / rows["scale"]).groupby(rows["name"]).max()\n'
            + chosen
            + (_SUM_BINS if by_layer else _BINS)
            + _at_scale(fmt, "name", _SHARES if by_layer else ("nonzero", "lost"))
            + (each if by_layer else together)
        )

    def lost_by_layer(self, fmt: FloatFormat) -> str:
        """Receipt of the shares lost in an ``overview_frame``, without a loss scale."""
        table = f"frame = at_scale(0){_LAYERS}"
        return self.read + _SUM_BINS + _at_scale(fmt, "name", ("absmax", *_SHARES)) + table

    def course(self, fmt: FloatFormat, exponent: int) -> str:
        """Receipt of ``layer_course_frame``."""
        join = f'at_scale(0).join(at_scale({exponent}).add_suffix("_scaled"))'
        columns = _at_scale(fmt, "step", ("absmax", *_SHARES))
        return f"{self.read}{_SUM_BINS}{columns}frame = {join}.reset_index()\n"

    def movement(self, fmt: FloatFormat, step: int, before: int) -> str:
        """Receipt of ``movement_frame``."""
        columns = ("absmax", "nonzero", "lost", "lost_share", "mean")
        table = f"""\
def at_steps(steps):
    return at_scale(0, rows[rows["step"].isin(steps)], bins[bins["step"].isin(steps)])
recorded = np.unique(rows["step"])
earlier = recorded[recorded < {step}][-{before}:]
frame = at_steps([{step}]).join(at_steps(earlier).add_suffix("_before"))
frame["shift"] = frame.pop("mean") - frame.pop("mean_before")
frame = frame.dropna(subset=["shift"]){_LAYERS}"""
        return self.read + _BINS + _at_scale(fmt, "name", columns) + table

    def updates(self, key: str) -> str:
        """Receipt of the updates that 16-bit weights would round away, by ``name`` or by ``step``."""
        return self.read + _FACT + _UPDATES.format(key=key, more=_BEYOND if key == "name" else "")

    def ratios(self) -> str:
        """Receipt of ``ratio_frame``."""
        return self.read + _RATIOS

    def ranges(self) -> str:
        """Receipt of ``output_ranges_frame``: ``name``, ``absmin``, ``absmax``."""
        return self.read + _RANGES

    def errors(self, fmt: FloatFormat) -> str:
        """Receipt of a ranking by the modules' outputs, where no operations were recorded."""
        return self.read + _SUM_BINS + _error(fmt) + _OUTPUT_ERRORS


def _inside(rows: str, window: Window) -> str:
    """The condition that rows are of the steps of a window."""
    return f'({rows}["step"] >= {window.first:g}) & ({rows}["step"] < {window.end:g})'


def _at_scale(fmt: FloatFormat, key: str, columns: Collection[str]) -> str:
    """Lines after the bins that define ``at_scale``: a table by ``key`` of some of ``COLUMNS``."""
    mantissa, top = math.frexp(fmt.overflow_threshold)
    facts = {
        "reached": ">=" if fmt.tie_overflows else ">",
        "threshold": fmt.overflow_threshold,
        "holding": top - 2 if mantissa == 0.5 else top - 1,
    }
    lines = [
        f'    frame["{name}"] = {expression.format(**facts)}\n'
        for name, expression in COLUMNS.items()
        if name in columns
    ]
    head = _AT_SCALE.format(key=key, label=fmt.label, zero=fmt.zero_exponent)
    return f"{head}{''.join(lines)}    return frame\n"


# -- operations ------------------------------------------------------------------------------------


def _error(fmt: FloatFormat) -> str:
    """Lines that define the relative error of storing one tensor in a format."""
    return f"""\
def error(e, n, m, absmax):  # of values in {fmt.label}; 2^e < |x| <= 2^(e+1) of n, whose mean is m 2^e
    energy = n * (m * m + 3 * m - 2) / 2 * 4.0**e  # of x * x
    spacing = 2.0 ** (np.maximum(e, {fmt.min_exponent}) - {fmt.mantissa_bits})
    moved = np.where(e < {fmt.zero_exponent}, energy, n * spacing**2 / 12)
    if absmax >= {fmt.overflow_threshold!r}:
        return np.inf
    return min(1.0, np.sqrt(moved.sum() / energy.sum())) if energy.sum() else 0.0
"""


def operation_errors(run: str, fmt: FloatFormat) -> str:
    """Receipt of a ranking by recorded operations: the forward error, by module and line."""
    return f"""\
import numpy as np
import pandas as pd

{_error(fmt)}
def of_tensor(t):
    counts = np.asarray(t["counts"], float)
    m = 1 + np.frombuffer(t["means"], np.uint8) / 255
    return error(t["first_exponent"] + np.arange(len(counts)), counts, m, t["absmax"])

operations = pd.read_parquet(f"{{{run!r}}}/operations")
operations = operations[operations["node"].astype(str) == ""]  # the forward pass
frame = operations[["module", "op", "file", "line"]].astype({{"module": object}})
frame["forward"] = [
    max([of_tensor(t) for t in tensors if t["counted"]], default=0.0)
    for tensors in operations["outputs"]
]
frame["module"] = frame["module"].fillna("")
"""


def measured_errors(run: str) -> str:
    """Receipt of a ranking by ``sensitivity.json``."""
    return f"""\
import json
from pathlib import Path
import pandas as pd

frame = pd.DataFrame(json.loads(Path({run + "/sensitivity.json"!r}).read_text())["operations"])
error = frame["gradient_error"].astype(float).fillna(float("inf"))  # null: not finite
frame["value"] = error.where(frame["finite"], float("inf"))
frame = frame.rename(columns={{"op": "operation"}})[["module", "operation", "value"]]
"""


def searched_errors(run: str) -> str:
    """Receipt of a ranking by ``search.json``."""
    return f"""\
import json
from pathlib import Path
import pandas as pd

candidates = json.loads(Path({run + "/search.json"!r}).read_text())["candidates"]
frame = pd.DataFrame(candidates, columns=["module", "operation", "value"])
frame["value"] = frame["value"].astype(float).fillna(float("inf"))  # null: leaves the range
"""


# -- trainings -------------------------------------------------------------------------------------


def training_logs(
    folder: str, runs: Sequence[str], columns: Sequence[str], *, known: bool = False
) -> str:
    """A receipt of columns of several training logs.

    Args:
        folder: The folder that holds the runs.
        runs: Their names.
        columns: Numbers, and ``skipped``.
        known: Whether steps without one of them are left out.
    """
    types = ", ".join(f'"{name}": {"bool" if name == "skipped" else "float"}' for name in columns)
    return f"""\
import pandas as pd

columns = {{"step": int, {types}}}
parts = []
for run in {list(runs)!r}:
    log = pd.read_json({folder!r} + f"/{{run}}/training.jsonl", lines=True)
    log = log[log["step"].notna()].drop_duplicates("step", keep="last").sort_values("step")
    parts.append(log[list(columns)].astype(columns).assign(run=run))
frame = pd.concat(parts, ignore_index=True){".dropna()" if known else ""}
"""


def loss_of_recording(run: str) -> str:
    """Receipt of the loss of a recording's own log."""
    return f"""\
import pandas as pd

log = pd.read_json({run!r} + "/training.jsonl", lines=True)
log = log[log["step"].notna()].drop_duplicates("step", keep="last").sort_values("step")
frame = log[["step", "loss"]].astype({{"step": int, "loss": float}}).dropna()
frame = frame[frame["loss"].abs() < float("inf")]
"""


def compared_losses(paths: Mapping[str, str]) -> str:
    """Receipt of the losses of sides: the logs of trainings, or of those in folders of seeds."""
    return f"""\
from pathlib import Path
import pandas as pd

parts = []
for side, place in {dict(paths)!r}.items():
    here = Path(place)
    for run in [here] if (here / "meta.json").is_file() else sorted(here.iterdir()):
        if not (run / "training.jsonl").is_file():
            continue
        log = pd.read_json(run / "training.jsonl", lines=True)
        log = log[log["step"].notna()].drop_duplicates("step", keep="last").sort_values("step")
        log = log[log["loss"].notna() & (log["skipped"] != True)]
        columns = {{"side": side, "run": run.name, "step": log["step"].astype(int)}}
        parts.append(pd.DataFrame({{**columns, "loss": log["loss"].astype(float)}}))
frame = pd.concat(parts, ignore_index=True)
"""


def compared_metrics(a: str, b: str) -> str:
    """Receipt of ``metric_frame``: it runs the command that prints the same."""
    return f"""\
import json, subprocess
import pandas as pd

words = ["mpdiag", "compare", {a!r}, {b!r}, "--json"]
found = json.loads(subprocess.run(words, capture_output=True, text=True).stdout)
frame = pd.DataFrame(found["metrics"])[["metric", "verdict", "difference", "low", "high", "margin"]]
"""


def largest_values(a: str, b: str, kind: str) -> str:
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


def command(words: str) -> str:
    """A receipt for numbers that a command prints: it runs the command."""
    return f"""\
import json, subprocess

frame = json.loads(subprocess.run({words.split()!r}, capture_output=True, text=True).stdout)
"""
