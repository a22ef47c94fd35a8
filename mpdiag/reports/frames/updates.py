"""Weight updates as tidy tables: how small they are beside their weights, and what is swallowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mpdiag.analysis.layers import countable_rows, share

if TYPE_CHECKING:
    from mpdiag.runs.records import Records

BEGINS, CERTAIN = 11, 12
"""|w|/|Δw| of 2^11 = 2048, where a normal FP16 weight begins to swallow updates, and of 2^12 = 4096,
beyond which it swallows them all."""
_FACTS = ("changed", "swallowed_fp16", "swallowed_bf16", "vanished_fp16")


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
    for fact in _FACTS:
        frame[fact] = _added(getattr(records, fact)[rows], group, len(codes))
    h = records.select(rows).ratios(group.reshape(-1), len(codes))
    beyond = h.counts[:, BEGINS - h.first :].sum(axis=1)
    frame["fp16_share"] = share(frame["swallowed_fp16"], frame["changed"])
    frame["bf16_share"] = share(frame["swallowed_bf16"], frame["changed"])
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
    changed, fp16, bf16 = (
        _added(getattr(records, fact)[rows], group, len(steps)) for fact in _FACTS[:3]
    )
    return pd.DataFrame(
        {
            "step": steps,
            "changed": changed,
            "fp16_share": share(fp16, changed),
            "bf16_share": share(bf16, changed),
        }
    )


def _rows(records: Records, parameter: str | None = None) -> Any:
    mask = records.of_kind("update") & countable_rows(records)
    if parameter is not None:
        mask &= records.name == records.code("name", parameter)
    return np.flatnonzero(mask)


def _added(values: Any, group: Any, size: int) -> Any:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, group.reshape(-1), values)
    return sums
