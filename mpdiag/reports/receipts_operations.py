"""Receipts of the operations' sensitivity; see ``receipts``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdiag.numerics.formats import FloatFormat


def measured(run: str) -> str:
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


def searched(run: str) -> str:
    """Receipt of a ranking by ``search.json``."""
    return f"""\
import json
from pathlib import Path
import pandas as pd

candidates = json.loads(Path({run + "/search.json"!r}).read_text())["candidates"]
frame = pd.DataFrame(candidates, columns=["module", "operation", "value"])
frame["value"] = frame["value"].astype(float).fillna(float("inf"))  # null: leaves the range
"""


def recorded(run: str, fmt: FloatFormat) -> str:
    """Receipt of a ranking by recorded operations: the forward error, by module and line."""
    return f"""\
import numpy as np
import pandas as pd

def error(t):  # of storing one tensor in {fmt.label}, relative
    counts = np.asarray(t["counts"], float)
    e = t["first_exponent"] + np.arange(len(counts))  # bin e holds 2^e < |x| <= 2^(e+1)
    m = 1 + np.frombuffer(t["means"], np.uint8) / 255
    energy = counts * (m * m + 3 * m - 2) / 2 * 4.0**e  # of x * x
    spacing = 2.0 ** (np.maximum(e, {fmt.min_exponent}) - {fmt.mantissa_bits})
    moved = np.where(e < {fmt.zero_exponent}, energy, counts * spacing**2 / 12)
    if t["absmax"] >= {fmt.overflow_threshold!r}:
        return np.inf
    return min(1.0, np.sqrt(moved.sum() / energy.sum())) if energy.sum() else 0.0

operations = pd.read_parquet(f"{{{run!r}}}/operations")
operations = operations[operations["node"].astype(str) == ""]  # the forward pass
frame = operations[["module", "op", "file", "line"]].astype({{"module": object}})
frame["forward"] = [
    max([error(t) for t in tensors if t["counted"]], default=0.0) for tensors in operations["outputs"]
]
frame["module"] = frame["module"].fillna("")
"""


def outputs(rows: str, fmt: FloatFormat) -> str:
    """Receipt of a ranking by the modules' outputs, where no operations were recorded.

    Args:
        rows: The lines that read the rows of activations.
        fmt: The narrow format.
    """
    return (
        rows
        + f"""\
parts = []
for row in rows[["name", "first_exponent", "scale", "counts", "means"]].itertuples():
    e = row.first_exponent - int(np.log2(row.scale)) + np.arange(len(row.counts))
    sums = row.counts * (1 + np.frombuffer(row.means, np.uint8) / 255)
    parts.append(pd.DataFrame({{"module": row.name, "e": e, "n": row.counts, "s": sums}}))
bins = pd.concat(parts).groupby(["module", "e"], as_index=False).sum()
bins = bins[bins["n"] > 0]
m = (bins["s"] / bins["n"]).clip(1, 2)  # mean of the bin, in units of 2^e
energy = bins["n"] * (m * m + 3 * m - 2) / 2 * 4.0 ** bins["e"]
spacing = 2.0 ** (bins["e"].clip(lower={fmt.min_exponent}) - {fmt.mantissa_bits})
moved = energy.where(bins["e"] < {fmt.zero_exponent}, bins["n"] * spacing**2 / 12)
sums = pd.DataFrame({{"module": bins["module"], "moved": moved, "energy": energy}})
sums = sums.groupby("module").sum()
forward = np.sqrt(sums["moved"] / sums["energy"]).clip(upper=1)
absmax = (rows["absmax"] / rows["scale"]).groupby(rows["name"]).max()
over = absmax.reindex(forward.index) >= {fmt.overflow_threshold!r}
frame = forward.where(~over, np.inf).rename("forward").reset_index()
"""
    )
