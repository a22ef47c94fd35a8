"""Two runs beside each other, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from mpdiag.analysis.layers import Layers

_MEASURES = ["absmax", "underflow", "overflow"]


def layers_frame(layers: Layers) -> pd.DataFrame:
    """The ``layers`` of ``mpdiag analyze --json`` as a table."""
    return pd.DataFrame(layers.to_json())


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
