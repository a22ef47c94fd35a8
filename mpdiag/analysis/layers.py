"""One histogram for each kind and name: what the rest of the analysis reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.numerics.formats import FP16
from mpdiag.runs.schema import TOTAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpdiag.numerics.histograms import ExponentHistogram
    from mpdiag.runs.records import Records
    from mpdiag.runs.schema import Kind


@dataclass(frozen=True, eq=False)
class Layers:
    """Histograms by kind and name, merged over steps, micro-batches and tensors.

    Attributes:
        kinds, names: object (n,).
        histograms: A stack of batch shape (n,).
        steps: int64 (n,), how many steps each was recorded in.
    """

    kinds: NDArray[np.object_]
    names: NDArray[np.object_]
    histograms: ExponentHistogram
    steps: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def of_kind(self, *kinds: Kind) -> Layers:
        """Those of some kinds."""
        rows = np.flatnonzero(np.isin(self.kinds, kinds))
        return Layers(self.kinds[rows], self.names[rows], self.histograms[rows], self.steps[rows])

    def to_json(self) -> list[dict[str, Any]]:
        """The ``layers`` of ``mpdiag analyze --json``."""
        h = self.histograms
        lost = share(h.lost_to_zero(FP16).value, h.nonzero)
        over = share(h.overflow(FP16).value, h.finite)
        return [
            {
                "name": self.names[i],
                "kind": self.kinds[i],
                "numel": int(h.numel[i]),
                "zeros": int(h.zeros[i]),
                "infs": int(h.infs[i]),
                "nans": int(h.nans[i]),
                "absmax": float(h.absmax[i]),
                "absmin": float(h.absmin[i]) if np.isfinite(h.absmin[i]) else None,
                "underflow": float(lost[i]),
                "overflow": float(over[i]),
                "steps": int(self.steps[i]),
            }
            for i in range(len(self))
        ]


_TABLE = 1 << 26
"""Entries up to which a table of groups by steps is kept, in place of sorting rows."""


def share(part: Any, whole: Any) -> NDArray[np.float64]:
    """part / whole, 0 where there is nothing."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    result: NDArray[np.float64] = np.divide(
        part, whole, out=np.zeros(np.broadcast(part, whole).shape), where=whole > 0
    )
    return result


@dataclass
class Counting:
    """What decides which rows count, known only once all of them are seen; by kind and name.

    Attributes:
        lowest: The lowest rank with a replicated row; -1 where others hold shards of the tensor.
        totals: Names of weight gradients that have rows for the whole step.
    """

    lowest: dict[tuple[int, int], int] = field(default_factory=dict)
    totals: set[int] = field(default_factory=set)


def note_counting(counting: Counting, records: Records) -> None:
    """Take rows into account; codes must mean the same in all records that are noted."""
    width = len(records.words["name"]) + 1
    key = records.kind.astype(np.int64) * width + records.name
    sharded = records.placement == records.code("placement", "sharded")
    for one in np.unique(key[sharded]).tolist():
        counting.lowest[divmod(one, width)] = -1
    replicated = np.flatnonzero(records.placement == records.code("placement", "replicated"))
    if replicated.size:
        keys, group = np.unique(key[replicated], return_inverse=True)
        lowest = np.full(keys.size, np.iinfo(np.int64).max)
        np.minimum.at(lowest, group.reshape(-1), records.rank[replicated])
        for one, rank in zip(keys.tolist(), lowest.tolist(), strict=True):
            place = divmod(one, width)
            counting.lowest[place] = min(rank, counting.lowest.get(place, rank))
    totals = records.of_kind("weight_grad") & (records.micro == TOTAL)
    counting.totals.update(np.unique(records.name[totals]).tolist())


def countable_rows(records: Records, counting: Counting | None = None) -> NDArray[np.bool_]:
    """Rows that count: a replicated tensor once, weight gradients as totals where there are any.

    Of replicated rows those of the lowest rank count that has one of their kind and name; where
    other ranks hold shards of the tensor, they are copies of those and none counts. An update of a
    step that the optimizer skipped is no update.

    Args:
        records: The rows.
        counting: What is known of all rows, where these are some of them.
    """
    if counting is None:
        counting = Counting()
        note_counting(counting, records)
    keep = np.ones(len(records), bool)
    replicated = records.placement == records.code("placement", "replicated")
    if replicated.any():
        width = len(records.words["name"]) + 1
        lowest = np.full((len(records.words["kind"]) + 1) * width, -1)
        for (kind, name), rank in counting.lowest.items():
            lowest[kind * width + name] = rank
        keep &= ~replicated | (records.rank == lowest[records.kind * width + records.name])
    if counting.totals:
        known = np.zeros(len(records.words["name"]) + 1, bool)
        known[list(counting.totals)] = True
        gradients = records.of_kind("weight_grad")
        keep &= ~(gradients & (records.micro != TOTAL) & known[records.name])
    return keep & ~(records.of_kind("update") & records.skipped)


def merge_layers(records: Records, rows: NDArray[np.bool_] | None = None) -> Layers:
    """Merge the rows of each kind and name, in the order in which they first appear."""
    keep = np.flatnonzero(
        countable_rows(records) if rows is None else countable_rows(records) & rows
    )
    width = len(records.words["name"]) + 1
    own = records.kind[keep].astype(np.int64) * width + records.name[keep]
    first = np.full((len(records.words["kind"]) + 1) * width, len(own))
    first[own[::-1]] = np.arange(len(own) - 1, -1, -1)  # the last one written stays: the earliest
    keys = np.flatnonzero(first < len(own))
    keys = keys[np.argsort(first[keys], kind="stable")]
    rank = np.full(len(first), -1)
    rank[keys] = np.arange(len(keys))
    group = np.full(len(records), -1)
    group[keep] = rank[own]
    kind_words = np.array(records.words["kind"], dtype=object)
    name_words = np.array(records.words["name"], dtype=object)
    return Layers(
        kinds=kind_words[keys // width],
        names=name_words[keys % width],
        histograms=records.merged(group, len(keys)),
        steps=_steps_of(group[keep], records.step[keep], len(keys)),
    )


def _steps_of(group: NDArray[np.int64], step: NDArray[np.int32], groups: int) -> NDArray[np.int64]:
    """In how many different steps each group has a row."""
    known, at = np.unique(step, return_inverse=True)
    pairs = group * max(1, known.size) + at.reshape(-1)
    if groups * known.size <= _TABLE:
        seen = np.zeros(groups * max(1, known.size), bool)
        seen[pairs] = True
        counted: NDArray[np.int64] = seen.reshape(groups, -1).sum(axis=1)
        return counted
    return np.bincount(np.unique(pairs) // max(1, known.size), minlength=groups)
