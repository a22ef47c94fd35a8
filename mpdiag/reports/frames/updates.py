"""Weight updates as tidy tables: how small they are beside their weights, and what is swallowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mpdiag.analysis.layers import countable_rows, share
from mpdiag.numerics.formats import FP16, HALVES

if TYPE_CHECKING:
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.runs.records import Records
    from mpdiag.runs.schema import Fact

BEGINS, CERTAIN = 11, 12
"""|w|/|Δw| of 2^11 = 2048, where a normal FP16 weight begins to swallow updates, and of 2^12 = 4096,
beyond which it swallows them all."""
_FACTS: dict[str, tuple[Fact, FloatFormat]] = {
    **{f"swallowed_{fmt.name}": ("swallowed", fmt) for fmt in HALVES},
    "vanished_fp16": ("vanished", FP16),
}


def update_frame(records: Records) -> pd.DataFrame:
    """How many updates 16-bit weights would swallow, by parameter.

    Returns:
        ``parameter``; ``changed``, ``swallowed_fp16``, ``swallowed_bf16``, ``vanished_fp16``:
        counts over all steps; ``fp16_share``, ``bf16_share``: swallowed of the changed;
        ``beyond_2048``: share of the changed whose |w|/|Δw| is above 2048. Most swallowed first.
    """
    rows = _rows(records)
    codes, group = np.unique(records.name[rows], return_inverse=True)
    frame = pd.DataFrame({"parameter": np.array(records.words["name"], dtype=object)[codes]})
    frame["changed"] = _added(records.changed[rows], group, len(codes))
    for column, (fact, fmt) in _FACTS.items():
        frame[column] = _added(records.fact(fact, fmt.name)[rows], group, len(codes))
    h = records.select(rows).ratios(group.reshape(-1), len(codes))
    beyond = h.counts[:, BEGINS - h.first :].sum(axis=1)
    for fmt in HALVES:
        frame[f"{fmt.name}_share"] = share(frame[f"swallowed_{fmt.name}"], frame["changed"])
    frame["beyond_2048"] = share(beyond, frame["changed"])
    return frame.sort_values("fp16_share", ascending=False, kind="stable", ignore_index=True)


def ratio_frame(records: Records, parameter: str | None = None) -> pd.DataFrame:
    """Changed elements by |w|/|Δw|: ``exponent``, ``count``; of one parameter or of all."""
    rows = _rows(records, parameter)
    h = records.select(rows).ratios(np.zeros(len(rows), np.int64), 1)
    columns = np.flatnonzero(h.counts[0])
    return pd.DataFrame({"exponent": h.exponents[columns], "count": h.counts[0, columns]})


def swallowed_frame(records: Records, parameter: str | None = None) -> pd.DataFrame:
    """Shares swallowed at each recorded step: ``step``, ``changed``, ``fp16_share``, ``bf16_share``."""
    rows = _rows(records, parameter)
    steps, group = np.unique(records.step[rows].astype(np.int64), return_inverse=True)
    changed = _added(records.changed[rows], group, len(steps))
    frame = pd.DataFrame({"step": steps, "changed": changed})
    for fmt in HALVES:
        swallowed = _added(records.fact("swallowed", fmt.name)[rows], group, len(steps))
        frame[f"{fmt.name}_share"] = share(swallowed, changed)
    return frame


def _rows(records: Records, parameter: str | None = None) -> Any:
    mask = records.of_kind("update") & countable_rows(records)
    if parameter is not None:
        mask &= records.name == records.code("name", parameter)
    return np.flatnonzero(mask)


def _added(values: Any, group: Any, size: int) -> Any:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, group.reshape(-1), values)
    return sums
