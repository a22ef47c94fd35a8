"""Rows of a recording gathered one at a time: convenient for the few that a test writes."""

from dataclasses import dataclass

import numpy as np

from mpdiag.numerics.histograms import ExponentHistogram, stack
from mpdiag.runs.schema import UpdateStack, encode
from mpdiag.runs.writer import RunWriter


@dataclass(frozen=True)
class UpdateCounts:
    """What one weight update did, beside the histogram of |Δw|.

    ``facts`` are in the order of ``schema.UPDATE_FACTS``.
    """

    changed: int
    swallowed_fp16: int
    swallowed_bf16: int
    vanished_fp16: int
    ratio_zeros: int
    ratio_first_exponent: int
    ratio_counts: tuple[int, ...]

    @property
    def facts(self):
        swallowed = self.swallowed_fp16, self.swallowed_bf16
        return [self.changed, *swallowed, self.vanished_fp16, self.ratio_zeros]


class RowBuffer:
    def __init__(self):
        self._histograms = []
        self._labels = []
        self._updates = {}

    def __len__(self):
        return len(self._labels)

    def append(self, histogram, update=None, **labels):
        """Add one row.

        Args:
            histogram: A single histogram (batch shape ``()``).
            update: For rows of kind ``update``.
            **labels: As ``encode`` wants them, one value each.
        """
        if update is not None:
            self._updates[len(self)] = update
        self._histograms.append(histogram)
        self._labels.append(labels)

    def to_table(self):
        names = (
            self._labels[0]
            if self._labels
            else dict.fromkeys(("step", "micro", "kind", "name", *LABELS))
        )
        labels = {name: [row[name] for row in self._labels] for name in names}
        return encode(stack(self._histograms), labels, self._stacked_updates())

    def _stacked_updates(self):
        if not self._updates:
            return None
        items = list(self._updates.values())
        first = min(u.ratio_first_exponent for u in items)
        last = max(u.ratio_first_exponent + len(u.ratio_counts) for u in items)
        ratios = np.zeros((len(items), last - first), np.int64)
        for row, u in zip(ratios, items, strict=True):
            at = u.ratio_first_exponent - first
            row[at : at + len(u.ratio_counts)] = u.ratio_counts
        facts = [u.facts for u in items]
        rows = np.fromiter(self._updates, np.int64)
        return UpdateStack(rows, np.array(facts, np.int64), first, ratios)


LABELS = {
    "rank": 0,
    "tensors": 1,
    "dtype": "float32",
    "placement": "local",
    "stage": "local",
    "scale": 1.0,
    "skipped": False,
}


def table_of(rows):
    """A table of rows: step, kind, name, values, and what differs from ``LABELS`` (or ``update``)."""
    buffer = RowBuffer()
    for step, kind, name, values, *more in rows:
        micro = 0 if kind.startswith("activation") else -1
        own = {"micro": micro} | LABELS | (more[0] if more else {})
        histogram = ExponentHistogram.of(np.asarray(values, np.float32))
        buffer.append(histogram, step=int(step), kind=kind, name=name, **own)
    return buffer.to_table()


def write_rows(folder, rows, modules=(), *, steps=30, **meta):
    """A run of rows as ``table_of`` takes them, of a training of so many steps."""
    rows = list(rows)
    writer = RunWriter(folder)
    state = {"state": "complete", "steps_recorded": steps, "steps_seen": steps}
    writer.write_meta(state | meta)
    writer.write_modules(modules)
    if rows:
        writer.append(table_of(rows))
    return folder
