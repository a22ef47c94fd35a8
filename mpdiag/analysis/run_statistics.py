"""What the analysis asks of a run's rows, and the answers for rows that are in memory.

Rows that fit into memory are read once (``InMemoryStatistics``). From ``STREAM_FROM`` rows on they are
read part by part and only sums are kept (``streaming.StreamedStatistics``); ``read_statistics`` there
chooses. All sums are of integers and everything else is a maximum, so both give the same figures to
the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpdiag.analysis.layers import Layers, countable_rows, merge_layers
from mpdiag.analysis.scaling.maxima import by_step, step_maxima
from mpdiag.analysis.scaling.windows import late_windows
from mpdiag.numerics.formats import FP16, HALVES
from mpdiag.numerics.histograms import BINS, MIN_EXPONENT
from mpdiag.runs.schema import SAMPLED

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from mpdiag.analysis.scaling.windows import Window
    from mpdiag.numerics.histograms import ExponentHistogram
    from mpdiag.runs.records import Records
    from mpdiag.runs.schema import FormatFact

STREAM_FROM = 2_000_000
"""Rows from which a run is streamed: so many take some 500 MB when they are held."""
UPDATE_FIGURES: tuple[tuple[FormatFact, str] | str, ...] = (
    "changed",
    *(("swallowed", fmt.name) for fmt in HALVES),
    ("vanished", FP16.name),
    "numel",
    SAMPLED,
)
"""What is summed over updates: a column, or a fact of a format; ``numel`` where some were sampled."""
PARTS_OF_TRAINING = 5
"""Equal parts of a training that the paths of weights are summed over."""
PATH_FIGURES = 1 + len(HALVES)
"""Of a path: its length, and how much of it weights of each half-precision format would not take."""


class RunStatistics(Protocol):
    """A run's rows, as far as the analysis needs them."""

    def layers(self) -> Layers:
        """All rows, merged by kind and name."""

    def steps(self) -> NDArray[np.int64]:
        """Numbers of the recorded steps, ascending: those that any row speaks of."""

    def late_gradients(self) -> list[tuple[Window, Layers]]:
        """All gradients of each late part of the training, merged by kind and name."""

    def step_maxima(self) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
        """As ``maxima.step_maxima``."""

    def by_step(self, layers: Collection[str], steps: NDArray[np.int64]) -> list[ExponentHistogram]:
        """Activation gradients of each of some layers by step: stacks of batch shape (steps,)."""

    def updates(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Names, and (figures, names) sums over updates of ``UPDATE_FIGURES``."""

    def update_paths(self) -> NDArray[np.float64]:
        """How far weights moved, see ``sum_paths``, by figure, part of the training and name."""

    def activations(self, leaves: Collection[str]) -> tuple[int, int]:
        """How many values the modules of these names put out, and in how many steps of ranks."""

    def without_weight_gradients(self, modules: Collection[str]) -> RunStatistics:
        """The same without the gradients of some modules' own weights."""


@dataclass(frozen=True, eq=False)
class InMemoryStatistics:
    """Rows that are in memory.

    Attributes:
        records: The rows.
        length: How many steps the training had; 0 if that is not known.
    """

    records: Records
    length: int = 0

    def layers(self) -> Layers:
        """All rows, merged by kind and name."""
        return merge_layers(self.records)

    def steps(self) -> NDArray[np.int64]:
        """Numbers of the recorded steps, ascending."""
        return np.unique(self.records.step).astype(np.int64)

    def late_gradients(self) -> list[tuple[Window, Layers]]:
        """All gradients of each late part of the training, merged by kind and name."""
        gradients = self.records.of_kind("activation_grad") | self.records.of_kind("weight_grad")
        return [
            (window, merge_layers(self.records, gradients & window.holds(self.records.step)))
            for window in late_windows(self.step_maxima()[0], self.length)
        ]

    def step_maxima(self) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
        """As ``maxima.step_maxima``."""
        return step_maxima(self.records)

    def by_step(self, layers: Collection[str], steps: NDArray[np.int64]) -> list[ExponentHistogram]:
        """Activation gradients of each of some layers by step: stacks of batch shape (steps,)."""
        records = self.records
        gradients = records.of_kind("activation_grad") & countable_rows(records)
        return [
            by_step(records, gradients & (records.name == records.code("name", layer)), steps)
            for layer in layers
        ]

    def updates(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Names, and (figures, names) sums over updates of ``UPDATE_FIGURES``."""
        records = self.records
        rows = np.flatnonzero(records.of_kind("update") & countable_rows(records))
        return records.words["name"], sum_updates(records, rows, len(records.words["name"]))

    def update_paths(self) -> NDArray[np.float64]:
        """How far weights moved, see ``sum_paths``, by figure, part of the training and name."""
        records = self.records
        rows = np.flatnonzero(records.of_kind("update") & countable_rows(records))
        sums = np.zeros((PATH_FIGURES, PARTS_OF_TRAINING, len(records.words["name"])))
        sum_paths(records, rows, np.unique(records.step), sums)
        return sums

    def activations(self, leaves: Collection[str]) -> tuple[int, int]:
        """How many values the modules of these names put out, and in how many steps of ranks."""
        records = self.records
        wanted = set(leaves)
        codes = [i for i, name in enumerate(records.words["name"]) if name in wanted]
        rows = records.of_kind("activation") & np.isin(records.name, codes)
        return int(records.numel[rows].sum()), len(steps_of_ranks(records, rows))

    def without_weight_gradients(self, modules: Collection[str]) -> InMemoryStatistics:
        """The same without the gradients of some modules' own weights."""
        gone = weight_gradients_of(self.records, modules)
        return replace(self, records=self.records.select(~gone))


def weight_gradients_of(records: Records, modules: Collection[str]) -> NDArray[np.bool_]:
    """The rows of gradients of some modules' own weights."""
    wanted = set(modules)
    names = records.words["name"]
    codes = [i for i, name in enumerate(names) if name.rpartition(".")[0] in wanted]
    rows: NDArray[np.bool_] = records.of_kind("weight_grad") & np.isin(records.name, codes)
    return rows


def steps_of_ranks(records: Records, rows: NDArray[np.bool_]) -> set[tuple[int, int]]:
    """The (step, rank) pairs that some rows speak of."""
    pairs = np.unique(np.stack([records.step[rows], records.rank[rows]], axis=1), axis=0)
    return {(step, rank) for step, rank in pairs.tolist()}


def sum_updates(records: Records, rows: NDArray[np.int64], names: int) -> NDArray[np.int64]:
    """Sums of ``UPDATE_FIGURES`` over some rows, by name: (figures, names)."""
    sums = np.zeros((len(UPDATE_FIGURES), names), np.int64)
    for row, what in zip(sums, UPDATE_FIGURES, strict=True):
        values = getattr(records, what) if isinstance(what, str) else records.fact(*what)
        if what == "numel":
            values = np.where(records.sampled_from > 0, values, 0)
        np.add.at(row, records.name[rows], values[rows])
    return sums


def sum_paths(
    records: Records,
    rows: NDArray[np.int64],
    steps: NDArray[np.int64],
    sums: NDArray[np.float64],
) -> None:
    """Add Σ|Δw| of some rows of updates, and of what each format's weights would not take.

    A recorded step stands for the steps up to the next one, and sampled elements for all. Of a row's
    updates so many as a format swallows are taken to be its smallest ones, so what is lost is a lower
    bound.

    Args:
        records: The rows' records.
        rows: int64 (n,), rows of updates.
        steps: int64, all recorded steps, in order.
        sums: float64 (1 + formats, parts, names), added to row by row: the length, then what
            weights in each of ``HALVES`` lose of it.
    """
    gaps = np.diff(steps, append=steps[-1] + (steps[-1] - steps[-2] if steps.size > 1 else 1))
    length = int(steps[-1] + gaps[-1]) if steps.size else 1
    lost = [records.fact("swallowed", fmt.name) for fmt in HALVES]
    for begin in range(0, len(rows), _ROWS_AT_A_TIME):
        chunk = rows[begin : begin + _ROWS_AT_A_TIME]
        step, name = records.step[chunk], records.name[chunk]
        part = np.minimum(step * PARTS_OF_TRAINING // length, PARTS_OF_TRAINING - 1)
        numel, of = records.numel[chunk], records.sampled_from[chunk]
        weight = gaps[np.searchsorted(steps, step)] * np.where(
            of > 0, of / np.maximum(1, numel), 1.0
        )
        bins = _bins_of(records, chunk)
        figures = [bins.added(bins.sums), *(_smallest(bins, many[chunk]) for many in lost)]
        for figure, found in zip(sums, figures, strict=True):
            np.add.at(figure, (part, name), weight * found)


_ROWS_AT_A_TIME = 1024
"""Rows whose bins are spread out together: so many stay in a second-level cache."""


@dataclass(frozen=True, eq=False)
class _RowBins:
    """The bins of n rows that are not empty, one row after another, free of the loss scale.

    Attributes:
        lengths: int64 (n,), how many of the bins each row has.
        places: int64 (bins,), of each bin among n × ``BINS``.
        counts: int64 (bins,).
        sums: float64 (bins,), Σ|x|.
    """

    lengths: NDArray[np.int64]
    places: NDArray[np.int64]
    counts: NDArray[np.int64]
    sums: NDArray[np.float64]

    def added(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of each row's values, in the order in which a row of all bins is summed."""
        dense = np.zeros((len(self.lengths), BINS))
        dense.reshape(-1)[self.places] = values
        sums: NDArray[np.float64] = dense.sum(axis=1)
        return sums


def _bins_of(records: Records, rows: NDArray[np.int64]) -> _RowBins:
    starts = records.offsets[rows]
    lengths = records.offsets[rows + 1] - starts
    first = records.first_exponent[rows].astype(np.int64) - MIN_EXPONENT
    first -= np.rint(np.log2(records.scale[rows])).astype(np.int64)
    if ((first < 0) | (first + lengths > BINS)).any():  # bins that fall together
        h = records.merged(_positions(len(records), rows), len(rows))
        row, column = np.nonzero(h.counts)
        lengths = np.bincount(row, minlength=len(rows))
        return _RowBins(lengths, row * BINS + column, h.counts[row, column], h.sums[row, column])
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = within + np.repeat(starts, lengths)
    column = within + np.repeat(first, lengths)
    counts = records.counts[at].astype(np.int64)
    # As a merged histogram has them, to the bit.
    sums = (counts + counts * records.means[at] / 255.0) * np.exp2(_EXPONENTS)[column]
    places = column + np.repeat(np.arange(len(rows)) * BINS, lengths)
    return _RowBins(lengths, places, counts, sums)


_EXPONENTS = np.arange(MIN_EXPONENT, MIN_EXPONENT + BINS, dtype=np.float64)


def _positions(size: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The group of each of so many rows: its place in ``rows``, -1 where it is not there."""
    group = np.full(size, -1, np.int64)
    group[rows] = np.arange(len(rows))
    return group


def _smallest(bins: _RowBins, many: NDArray[np.int64]) -> NDArray[np.float64]:
    """Σ|x| of so many smallest values of each row."""
    if not many.any():
        return np.zeros(len(many))
    before = np.cumsum(bins.counts) - bins.counts  # in all rows, until what is before a row is off
    ends = np.cumsum(bins.lengths)
    ahead = np.append(before, bins.counts.sum())[ends - bins.lengths]
    taken = np.clip(np.repeat(many + ahead, bins.lengths) - before, 0, bins.counts)
    return bins.added(bins.sums * taken / np.maximum(1, bins.counts))
