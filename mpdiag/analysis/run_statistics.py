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
    updates = records.select(rows)
    for chunk in np.array_split(np.arange(len(rows)), max(1, len(rows) // 4096)):
        h = updates.merged(_positions(len(rows), chunk), len(chunk))
        step, name = updates.step[chunk], updates.name[chunk]
        part = np.minimum(step * PARTS_OF_TRAINING // length, PARTS_OF_TRAINING - 1)
        numel, of = updates.numel[chunk], updates.sampled_from[chunk]
        weight = gaps[np.searchsorted(steps, step)] * np.where(
            of > 0, of / np.maximum(1, numel), 1.0
        )
        np.add.at(sums[0], (part, name), weight * h.sums.sum(axis=1))
        for figure, fmt in enumerate(HALVES, start=1):
            lost = _smallest(h, updates.fact("swallowed", fmt.name)[chunk])
            np.add.at(sums[figure], (part, name), weight * lost)


def _positions(size: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The group of each of so many rows: its place in ``rows``, -1 where it is not there."""
    group = np.full(size, -1, np.int64)
    group[rows] = np.arange(len(rows))
    return group


def _smallest(h: ExponentHistogram, many: NDArray[np.int64]) -> NDArray[np.float64]:
    """Σ|x| of so many smallest values of each histogram."""
    before = np.cumsum(h.counts, axis=1) - h.counts
    taken = np.clip(many[:, None] - before, 0, h.counts)
    sums: NDArray[np.float64] = (h.sums * taken / np.maximum(1, h.counts)).sum(axis=1)
    return sums
