"""One histogram for each kind and name: what the rest of the analysis reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.formats import FP16
from mpdiag.records import TOTAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpdiag.histogram import ExponentHistogram
    from mpdiag.records import Kind, Records


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
        keep &= ~replicated | (records.rank == records.rank[replicated].min())
    gradients = records.of_kind("weight_grad")
    totals = gradients & (records.micro == TOTAL)
    if totals.any():
        known = np.zeros(len(records.words["name"]) + 1, bool)
        known[records.name[totals]] = True
        keep &= ~(gradients & ~totals & known[records.name])
    return keep & ~(records.of_kind("update") & records.skipped)


def merge_layers(records: Records, rows: NDArray[np.bool_] | None = None) -> Layers:
    """Merge the rows of each kind and name, in the order in which they first appear."""
    keep = countable_rows(records) if rows is None else countable_rows(records) & rows
    chosen = records if keep.all() else records.select(keep)
    width = len(records.words["name"]) + 1
    keys, first, group = np.unique(
        chosen.kind * width + chosen.name, return_index=True, return_inverse=True
    )
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    group = rank[group.reshape(-1)]
    keys = keys[order]
    kind_words = np.array(records.words["kind"], dtype=object)
    name_words = np.array(records.words["name"], dtype=object)
    last = int(chosen.step.max(initial=0)) + 1
    pairs = np.unique(group * last + chosen.step)
    return Layers(
        kinds=kind_words[keys // width],
        names=name_words[keys % width],
        histograms=chosen.merged(group, len(keys)),
        steps=np.bincount(pairs // last, minlength=len(keys)),
    )
