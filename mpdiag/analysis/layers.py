"""One histogram for each kind and name: what the rest of the analysis reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.formats import FP16
from mpdiag.records import TOTAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpdiag.columns import Records
    from mpdiag.histogram import ExponentHistogram
    from mpdiag.records import Kind


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


def share(part: Any, whole: Any) -> NDArray[np.float64]:
    """part / whole, 0 where there is nothing."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    result: NDArray[np.float64] = np.divide(
        part, whole, out=np.zeros(np.broadcast(part, whole).shape), where=whole > 0
    )
    return result


def countable_rows(records: Records) -> NDArray[np.bool_]:
    """Rows that count: a replicated tensor once, weight gradients as totals where there are any.

    An update of a step that the optimizer skipped is no update.
    """
    keep = np.ones(len(records), bool)
    replicated = records.placement == records.code("placement", "replicated")
    if replicated.any():
        keep &= ~replicated | _first_copies(records, replicated)
    gradients = records.of_kind("weight_grad")
    totals = gradients & (records.micro == TOTAL)
    if totals.any():
        known = np.zeros(len(records.words["name"]) + 1, bool)
        known[records.name[totals]] = True
        keep &= ~(gradients & ~totals & known[records.name])
    return keep & ~(records.of_kind("update") & records.skipped)


def _first_copies(records: Records, replicated: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of replicated rows, those of the lowest rank that has one of their kind and name.

    Where other ranks hold shards of the tensor, replicated rows are copies of those and none counts.
    """
    key = records.kind.astype(np.int64) * (len(records.words["name"]) + 1) + records.name
    size = int(key.max(initial=0)) + 1
    lowest = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(lowest, key[replicated], records.rank[replicated])
    lowest[key[records.placement == records.code("placement", "sharded")]] = -1
    first: NDArray[np.bool_] = replicated & (records.rank == lowest[key])
    return first


def merge_layers(records: Records, rows: NDArray[np.bool_] | None = None) -> Layers:
    """Merge the rows of each kind and name, in the order in which they first appear."""
    keep = np.flatnonzero(
        countable_rows(records) if rows is None else countable_rows(records) & rows
    )
    width = len(records.words["name"]) + 1
    keys, first, found = np.unique(
        records.kind[keep].astype(np.int64) * width + records.name[keep],
        return_index=True,
        return_inverse=True,
    )
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    group = np.full(len(records), -1)
    group[keep] = rank[found.reshape(-1)]
    keys = keys[order]
    kind_words = np.array(records.words["kind"], dtype=object)
    name_words = np.array(records.words["name"], dtype=object)
    last = int(records.step.max(initial=0)) + 1
    pairs = np.unique(group[keep] * last + records.step[keep])
    return Layers(
        kinds=kind_words[keys // width],
        names=name_words[keys % width],
        histograms=records.merged(group, len(keys)),
        steps=np.bincount(pairs // last, minlength=len(keys)),
    )
