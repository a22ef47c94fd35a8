"""Receipts: the lines of pandas that reproduce a figure's numbers from the run folder alone.

Each receipt is a complete script that does not import this package and leaves its numbers in
``frame``; tests run every one and compare. Here is what several receipts begin with; the rest of
each stands in its view. Receipts are exact where a bin is exact; Σ|x| is not a sum of counts, so
they do not compute it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdiag.analysis.scaling.windows import Window

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
FACT = """\
def fact(what, fmt):  # what was counted for a format: in a map, or, in runs of schema 1, in columns
    earlier = f"{fmt}_{what}" if what == "overflow" else f"{what}_{fmt}"
    if earlier in rows:
        return rows[earlier]
    return rows["formats"].map(lambda formats: dict(formats)[fmt][what]).astype("int64")
"""
"""Lines after ``counted_rows`` that define ``fact``: a count of a format, for each of its rows."""
BINS = """\
scale = np.rint(np.log2(rows["scale"])).astype(int)  # what the recorded values carry
rows = rows.assign(exponent=[
    list(range(e, e + len(c))) for e, c in zip(rows["first_exponent"] - scale, rows["counts"])
])
bins = rows.explode(["exponent", "counts"]).dropna(subset=["counts"])
bins = bins.astype({"exponent": int, "counts": int})
bins = bins[bins["counts"] > 0]
"""
"""Lines after ``counted_rows`` that leave ``bins``: its rows by ``exponent``, with ``counts``."""


def counted_rows(
    run: str, kind: str, layer: str | None = None, window: Window | None = None
) -> str:
    """Lines that leave the rows of one kind that count in ``rows``.

    Args:
        run: The run folder.
        kind: The kind.
        layer: Of one layer alone.
        window: Of its steps alone.
    """
    which = f'stats["kind"] == {kind!r}'
    if kind == "update":
        which = f'({which}) & ~stats["skipped"]'
    if layer is not None:
        which = f'({which}) & (stats["name"] == {layer!r})'
    if window is not None:
        which = (
            f'({which}) & (stats["step"] >= {window.first:g}) & (stats["step"] < {window.end:g})'
        )
    text = _COUNTED.format(run=run, which=which, totals=_TOTALS if kind == "weight_grad" else "")
    return text.replace("import pandas", "import numpy as np\nimport pandas", 1)


def grouped_bins(keys: list[str], names: dict[str, str] | None = None) -> str:
    """The line that adds up ``bins`` by some columns, after ``BINS``.

    Args:
        keys: The columns to group by.
        names: New names of columns.
    """
    renamed = {"counts": "count", **(names or {})}
    return f'frame = bins.groupby({keys!r})["counts"].sum().reset_index().rename(columns={renamed!r})\n'


def training_logs(folder: str, runs: list[str], columns: str) -> str:
    """A receipt of columns of several training logs.

    Args:
        folder: The folder that holds the runs.
        runs: Their names.
        columns: Python source of a dict from column to type.
    """
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
    """A receipt for numbers that a command prints: it runs the command."""
    return f"""\
import json, subprocess

frame = json.loads(subprocess.run({words.split()!r}, capture_output=True, text=True).stdout)
"""
