"""One histogram for each kind and name: what the rest of the analysis reads."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.numerics.formats import FP16
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs.records import Merger, Records
from mpdiag.runs.schema import TOTAL, Kind


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

    def of_kind(self, *kinds: Kind) -> "Layers":
        """Those of some kinds."""
        return self.select(np.isin(self.kinds, kinds))

    def select(self, mask: NDArray[np.bool_]) -> "Layers":
        """Those under a mask."""
        rows = np.flatnonzero(mask)
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


def keys_of(records: Records) -> NDArray[np.int64]:
    """A number for each row's kind and name, by their codes."""
    return records.kind.astype(np.int64) << 32 | records.name


@dataclass
class Counting:
    """What decides which rows count, known only once all of them are seen.

    Attributes:
        lowest: By ``keys_of``, the lowest rank with a replicated row; -1 where others hold shards.
        totals: Codes of the weight gradients that have rows for the whole step.
    """

    lowest: dict[int, int] = field(default_factory=dict)
    totals: set[int] = field(default_factory=set)

    def note(self, records: Records) -> None:
        """Take rows into account; codes must mean the same in all records that are noted."""
        placed = {what: records.placement == records.code("placement", what) for what in _SHARED}
        for what, rows in placed.items():
            ranks = records.rank[rows] if what == "replicated" else np.full(rows.sum(), -1)
            keys, group = np.unique(keys_of(records)[rows], return_inverse=True)
            lowest = np.full(keys.size, np.iinfo(np.int64).max)
            np.minimum.at(lowest, group.reshape(-1), ranks)
            for key, rank in zip(keys.tolist(), lowest.tolist(), strict=True):
                self.lowest[key] = min(rank, self.lowest.get(key, rank))
        totals = records.of_kind("weight_grad") & (records.micro == TOTAL)
        self.totals.update(np.unique(records.name[totals]).tolist())


_SHARED = ("sharded", "replicated")


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
        counting.note(records)
    keep = ~(records.of_kind("update") & records.skipped)
    copies = np.flatnonzero(records.placement == records.code("placement", "replicated"))
    if copies.size:
        lowest = [counting.lowest[key] for key in keys_of(records)[copies].tolist()]
        keep[copies] &= records.rank[copies] == lowest
    if counting.totals:
        summed = np.isin(records.name, list(counting.totals))
        keep &= ~(records.of_kind("weight_grad") & (records.micro != TOTAL) & summed)
    return keep


class LayerSums:
    """Sums by kind and name of rows that come some at a time.

    Args:
        words: For each text column, its words; codes mean the same in all rows that are added.
        keys: ``keys_of`` all rows that are added, each once, ascending.
        steps: The steps of these rows, each once, ascending.
    """

    def __init__(
        self, words: Mapping[str, Sequence[str]], keys: NDArray[np.int64], steps: NDArray[Any]
    ) -> None:
        self._words, self._keys, self._steps = words, keys, steps
        self._place = np.zeros((len(words["kind"]), len(words["name"])), np.int64)
        self._place[keys >> 32, keys & 0xFFFFFFFF] = np.arange(keys.size)
        self._merger = Merger(keys.size)
        self._seen = np.zeros((keys.size, steps.size), bool)
        self._first = np.full(keys.size, np.iinfo(np.int64).max)  # row that each appears in
        self._rows = 0

    def add(self, records: Records, keep: NDArray[np.bool_]) -> None:
        """Add the rows under a mask."""
        rows = np.flatnonzero(keep)
        place = self._place[records.kind[rows], records.name[rows]]
        group = np.full(len(records), -1, np.int64)
        group[rows] = place
        self._merger.add(records, group)
        self._seen[place, np.searchsorted(self._steps, records.step[rows])] = True
        np.minimum.at(self._first, place, self._rows + rows)
        self._rows += len(records)

    def result(self) -> Layers:
        """The sums, in the order in which kinds and names first appeared."""
        order = np.argsort(self._first, kind="stable")[: int(self._seen.any(axis=1).sum())]
        kind, name = self._keys[order] >> 32, self._keys[order] & 0xFFFFFFFF
        return Layers(
            kinds=np.array(self._words["kind"], dtype=object)[kind],
            names=np.array(self._words["name"], dtype=object)[name],
            histograms=self._merger.result()[order],
            steps=self._seen[order].sum(axis=1),
        )


def merge_layers(records: Records, rows: NDArray[np.bool_] | None = None) -> Layers:
    """Merge the rows of each kind and name, in the order in which they first appear."""
    keep = countable_rows(records)
    if rows is not None:
        keep &= rows
    keys, steps = np.unique(keys_of(records)[keep]), np.unique(records.step[keep])
    sums = LayerSums(records.words, keys, steps)
    sums.add(records, keep)
    return sums.result()


@dataclass(frozen=True)
class LargestValue:
    """The largest |x| of a layer's outputs, or of a parameter, over a recording.

    Attributes:
        size: The largest of all recorded steps.
        step: The first step that reaches it.
        seen: The largest of each step whose operations were recorded, by step.
    """

    size: float
    step: int
    seen: Mapping[int, float]


@dataclass(frozen=True)
class LargestValues:
    """The largest values of layers' outputs and of parameters, by name, up to the last recorded step."""

    layers: dict[str, LargestValue] = field(default_factory=dict)
    parameters: dict[str, LargestValue] = field(default_factory=dict)
    last: int = 0


UNKNOWN = LargestValues()


def note_largest(
    records: Records, kind: Kind, steps: Collection[int], known: dict[str, LargestValue]
) -> None:
    """Take the largest |x| of the rows of one kind into account, by name.

    Args:
        records: Rows; further calls may bring others.
        kind: Activations or weights.
        steps: The steps of which the largest is kept apart.
        known: What is known so far; it is changed.
    """
    rows = np.flatnonzero(records.of_kind(kind))
    rows = rows[np.lexsort((records.step[rows], -records.absmax[rows], records.name[rows]))]
    names, first = np.unique(records.name[rows], return_index=True)
    held = rows[np.isin(records.step[rows], list(steps))]
    seen: dict[int, dict[int, float]] = {}
    for name, step, size in zip(
        records.name[held].tolist(),
        records.step[held].tolist(),
        records.absmax[held].tolist(),
        strict=True,
    ):
        of_name = seen.setdefault(name, {})
        of_name[step] = max(size, of_name.get(step, 0.0))
    for code, row in zip(names.tolist(), rows[first].tolist(), strict=True):
        name = records.words["name"][code]
        size, step = float(records.absmax[row]), int(records.step[row])
        before = known.get(name, LargestValue(0.0, step, {}))
        merged = {**before.seen}
        for at, top in seen.get(code, {}).items():
            merged[at] = max(top, merged.get(at, 0.0))
        larger = (size, step) if size > before.size else (before.size, before.step)
        known[name] = LargestValue(*larger, merged)
