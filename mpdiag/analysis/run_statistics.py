"""What the analysis asks of a run's rows, which are read some at a time: only sums are kept.

Two passes over the rows answer most of it::

    overview   without histograms: names, steps, maxima, and which rows count
    sums       every row's histogram: of each layer, of late parts of the training, of updates

The rows of most runs are in memory. From ``STREAM_FROM`` rows on each pass reads the parts again. What
is kept grows with layers × steps only as single bits and with layers as histograms of 4 KiB. Counts
are integers and everything else is a maximum, so it makes no difference how the rows are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.layers import (
    Counting,
    LargestValues,
    Layers,
    LayerSums,
    countable_rows,
    keys_of,
    note_largest,
)
from mpdiag.analysis.scaling.windows import Window, late_windows, step_maxima
from mpdiag.numerics.formats import FP16, HALVES
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs.records import Merger, Records
from mpdiag.runs.run import Run
from mpdiag.runs.schema import KINDS, SAMPLED, TEXT, FormatFact

KEEP_NOTHING_MORE = {"ReLU", "Identity", "Flatten", "Unflatten"}
"""Modules that add nothing to what autograd keeps. A ReLU's output takes the place of its input, which
has no other reader; the others return their input's own memory."""
STREAM_FROM = 2_000_000
"""Rows from which a run is streamed: this many take about 500 MB in memory."""
UPDATE_FIGURES: tuple[tuple[FormatFact, str] | str, ...] = (
    "changed",
    *(("swallowed", fmt.name) for fmt in HALVES),
    ("vanished", FP16.name),
    "numel",
    SAMPLED,
)
"""What is summed over updates: a column, or a fact of a format; ``numel`` where some were sampled."""
PARTS_OF_TRAINING = 10
"""Equal parts of a training that the paths of weights are summed over; a fifth is two of them."""
PATH_FIGURES = 1 + len(HALVES)
"""Of a path: its length, and how much of it weights of each half-precision format would not take."""


def read_statistics(run: Run) -> RunStatistics:
    """A run's rows in memory, or streamed where they are many.

    Raises:
        DamagedRun: If a part cannot be read, or there are no rows.
    """
    length = int(run.meta.get("steps_seen") or 0)
    if "records" in vars(run) or run.rows() < STREAM_FROM:
        return RunStatistics.of(run.records, length, keeping_modules(run))
    return RunStatistics(partial(run.pieces, parts=run.parts()), length, keeping_modules(run))


def keeping_modules(run: Run) -> frozenset[str]:
    """Modules without children that add their outputs to what autograd keeps."""
    modules = {str(m["name"]): m for m in run.modules() if m["what"] == "module"}
    parents = {name.rpartition(".")[0] for name in modules if name}
    return (
        frozenset(n for n, m in modules.items() if m.get("type") not in KEEP_NOTHING_MORE) - parents
    )


class RunStatistics:
    """A run's rows, as far as the analysis needs them.

    Args:
        pieces: Reads the rows, some at a time; keywords as for ``Run.pieces``, which it may disregard.
        length: How many steps the training had; 0 if that is not known.
        keeping: Modules that add their outputs to what autograd keeps.
        without: Parameters and modules: their gradients are left out, of modules their outputs'.
    """

    def __init__(
        self,
        pieces: Callable[..., Iterable[Records]],
        length: int = 0,
        keeping: Collection[str] = (),
        without: Collection[str] = (),
    ) -> None:
        self._read, self._length, self._keeping = pieces, length, keeping
        self._without = frozenset(without)
        self._words: dict[str, dict[str, int]] = {column: {} for column in TEXT}
        self._words["kind"] = {kind: i for i, kind in enumerate(KINDS)}

    @classmethod
    def of(cls, records: Records, length: int = 0, keeping: Collection[str] = ()) -> RunStatistics:
        """Rows that are in memory."""
        return cls(lambda **_: (records,), length, keeping)

    def without_gradients(self, names: Collection[str]) -> RunStatistics:
        """The same without the gradients of some parameters and of some modules' outputs."""
        without = self._without.union(names)
        return RunStatistics(self._read, self._length, self._keeping, without)

    def layers(self) -> Layers:
        """All rows, merged by kind and name."""
        return self._sums.layers

    def steps(self) -> NDArray[np.int64]:
        """Numbers of the recorded steps, ascending: those that any row speaks of."""
        return self._overview.steps

    def step_maxima(self) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
        """As ``maxima.step_maxima``."""
        largest = self._overview.maxima
        steps = np.array(sorted(largest), np.int64)
        maxima = np.array([largest[step] for step in steps.tolist()])
        return steps, maxima, int(np.isinf(maxima).sum())

    def trained_in(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """What each of some steps trains, as a number: that of its first parameter; -1 if unknown."""
        return np.array([self._overview.trained.get(step, -1) for step in steps.tolist()], np.int64)

    def late_gradients(self) -> list[tuple[Window, Layers]]:
        """All gradients of each late part of the training, merged by kind and name."""
        return self._sums.late

    def updates(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Names, and (figures, names) sums over updates of ``UPDATE_FIGURES``."""
        return self._overview.words["name"], self._sums.updates

    def update_paths(self) -> NDArray[np.float64]:
        """How far weights moved, see ``sum_paths``, by figure, fifth of the training and name."""
        figures, parts, names = self._sums.paths.shape
        fifths: NDArray[np.float64] = self._sums.paths.reshape(figures, parts // 2, 2, names).sum(2)
        return fifths

    def paths_in(self, window: Window) -> dict[str, float]:
        """How far each parameter moved in a part of the training, its Σ|Δw|.

        The steps after the last recorded one are taken to move it as much as those before.
        """
        reached = _length(self.steps())
        middles = (np.arange(PARTS_OF_TRAINING) + 0.5) * reached / PARTS_OF_TRAINING
        paths = self._sums.paths[0][window.holds(middles)].sum(axis=0)
        paths *= max(1.0, self._length / reached)
        code = {name: i for i, name in enumerate(self._overview.words["name"])}
        return {name: float(paths[code[name]]) for name in self.layers().of_kind("update").names}

    def by_step(self, layers: Collection[str], steps: NDArray[np.int64]) -> list[ExponentHistogram]:
        """Activation gradients of each of some layers by step: stacks of batch shape (steps,)."""
        counting = self._overview.counting
        mergers = [Merger(steps.size) for _ in layers]
        for piece in self._pieces(only=("activation_grad", layers)):
            keep = piece.of_kind("activation_grad") & countable_rows(piece, counting)
            at = np.searchsorted(steps, piece.step)
            keep &= np.append(steps, -1)[at] == piece.step
            for layer, merger in zip(layers, mergers, strict=True):
                own = keep & (piece.name == piece.code("name", layer))
                merger.add(piece, np.where(own, at, -1))
        return [merger.result() for merger in mergers]

    def largest_values(self, steps: Collection[int]) -> LargestValues:
        """The largest values of layers' outputs and of parameters, and those of some steps.

        Nothing is read where there are no such steps.
        """
        found = LargestValues({}, {}, int(self.steps()[-1]) if steps else 0)
        for piece in self._pieces(histograms=False) if steps else ():
            note_largest(piece, "activation", steps, found.layers)
            note_largest(piece, "weight", steps, found.parameters)
        return found

    def activations_per_step(self) -> int:
        """How many values the modules that keep their outputs put out in one step of one rank.

        This is about what autograd keeps on a device; with accumulation, it covers all micro-batches.
        """
        numel, moments = self._overview.activations
        return numel // moments if moments else 0

    # -- passes over the rows ----------------------------------------------------------------------

    def _pieces(self, **options: Any) -> Iterator[Records]:
        """The rows some at a time, with codes that hold over all of them."""
        tables: dict[tuple[str, ...], NDArray[np.int32]] = {}  # most pieces have the same words
        words: dict[str, tuple[str, ...]] = {}
        for piece in self._read(**options):
            codes: dict[str, Any] = {}
            for column, known in self._words.items():
                key = (column, *piece.words[column])
                if key not in tables:
                    table = [known.setdefault(word, len(known)) for word in key[1:]]
                    tables[key] = np.array([*table, -1], np.int32)
                    words[column] = tuple(known)
                codes[column] = tables[key][getattr(piece, column)]
            recoded = replace(piece, words=dict(words), **codes)
            if self._without:
                kinds = recoded.of_kind("weight_grad") | recoded.of_kind("activation_grad")
                recoded = recoded.select(~(kinds & recoded.with_names(self._without)))
            yield recoded

    @cached_property
    def _overview(self) -> _Overview:
        counting, maxima, trained = Counting(), dict[int, float](), dict[int, int]()
        steps, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        numel, moments = 0, set[tuple[int, int]]()
        for piece in self._pieces(histograms=False):
            counting.note(piece)
            steps.append(np.unique(piece.step))
            keys.append(np.unique(keys_of(piece)))
            own, largest, _ = step_maxima(piece)
            for step, top in zip(own.tolist(), largest.tolist(), strict=True):
                maxima[step] = max(top, maxima.get(step, 0.0))
            moved = piece.of_kind("update")
            for step, name in set(
                zip(piece.step[moved].tolist(), piece.name[moved].tolist(), strict=True)
            ):
                trained[step] = min(name, trained.get(step, name))
            rows = piece.of_kind("activation") & piece.with_names(self._keeping)
            numel += int(piece.numel[rows].sum())
            moments.update(zip(piece.step[rows].tolist(), piece.rank[rows].tolist(), strict=True))
        return _Overview(
            maxima,
            trained,
            counting,
            np.unique(np.concatenate(steps)).astype(np.int64),
            np.unique(np.concatenate(keys)),
            {column: tuple(known) for column, known in self._words.items()},
            (numel, len(moments)),
        )

    @cached_property
    def _sums(self) -> _Sums:
        seen = self._overview
        width = len(seen.words["name"])
        gradients = np.isin(seen.keys >> 32, [KINDS.index(kind) for kind in _GRADIENTS])
        layers = LayerSums(seen.words, seen.keys, seen.steps)
        windows = late_windows(self.step_maxima()[0], self._length)
        late = [LayerSums(seen.words, seen.keys[gradients], seen.steps) for _ in windows]
        updates = np.zeros((len(UPDATE_FIGURES), width), np.int64)
        paths = np.zeros((PATH_FIGURES, PARTS_OF_TRAINING, width))
        for piece in self._pieces():
            # What counts is known only now: of a tensor on several ranks the first copies alone.
            keep = countable_rows(piece, seen.counting)
            layers.add(piece, keep)
            rows = np.flatnonzero(piece.of_kind("update") & keep)
            sum_updates(piece, rows, updates)
            sum_paths(piece.select(rows), seen.steps, paths)
            keep &= np.isin(piece.kind, [KINDS.index(kind) for kind in _GRADIENTS])
            for window, sums in zip(windows, late, strict=True):
                sums.add(piece, keep & window.holds(piece.step))
        merged = [sums.result() for sums in late]
        return _Sums(layers.result(), list(zip(windows, merged, strict=True)), updates, paths)


_GRADIENTS = ("activation_grad", "weight_grad")


@dataclass(frozen=True)
class _Overview:
    """What the first pass leaves behind.

    Attributes:
        maxima: By step, as ``maxima.step_maxima``.
        trained: By step, see ``trained_in``.
        counting: Which rows count.
        steps: Every step that any row speaks of, ascending.
        keys: ``layers.keys_of`` all rows, each once, ascending.
        words: For each text column, the words of all rows.
        activations: How many values the outputs that autograd keeps have, and in how many steps of
            ranks.
    """

    maxima: dict[int, float]
    trained: dict[int, int]
    counting: Counting
    steps: NDArray[np.int64]
    keys: NDArray[np.int64]
    words: dict[str, tuple[str, ...]]
    activations: tuple[int, int]


@dataclass(frozen=True)
class _Sums:
    """What the second pass leaves behind; see the methods of the same names."""

    layers: Layers
    late: list[tuple[Window, Layers]]
    updates: NDArray[np.int64]
    paths: NDArray[np.float64]


def _length(steps: NDArray[np.int64]) -> int:
    """How many steps recorded ones stand for, each of them for those up to the next."""
    return int(steps[-1] + (steps[-1] - steps[-2] if steps.size > 1 else 1))


def sum_updates(records: Records, rows: NDArray[np.int64], sums: NDArray[np.int64]) -> None:
    """Add ``UPDATE_FIGURES`` of some rows to sums by figure and name."""
    for row, what in zip(sums, UPDATE_FIGURES, strict=True):
        values = getattr(records, what) if isinstance(what, str) else records.fact(*what)
        if what == "numel":
            values = np.where(records.sampled_from > 0, values, 0)
        np.add.at(row, records.name[rows], values[rows])


def sum_paths(updates: Records, steps: NDArray[np.int64], sums: NDArray[np.float64]) -> None:
    """Add Σ|Δw| of updates, and of what each format's weights would not take.

    A recorded step stands for the steps up to the next one, and sampled elements for all. The updates
    that a format swallows are taken to be the smallest of their row, so what is lost is a lower bound.

    Args:
        updates: The rows.
        steps: int64, all recorded steps, in order.
        sums: float64 (1 + formats, parts, names), added to: the length, then what weights in each of
            ``HALVES`` lose of it.
    """
    length = _length(steps)
    gaps = np.diff(steps, append=length)
    part = np.minimum(updates.step * PARTS_OF_TRAINING // length, PARTS_OF_TRAINING - 1)
    sampled = updates.sampled_from > 0
    share = np.where(sampled, updates.sampled_from / np.maximum(1, updates.numel), 1.0)
    weight = gaps[np.searchsorted(steps, updates.step)] * share

    bins = updates.bins
    lengths = np.diff(bins.offsets)
    row = np.repeat(np.arange(len(updates)), lengths)
    first = bins.first_exponent - np.rint(np.log2(updates.scale))
    exponent = first[row] + np.arange(row.size) - bins.offsets[row]
    mean = (1 + bins.means / 255.0) * np.exp2(exponent)
    counts = bins.counts.astype(np.int64)
    before = np.cumsum(counts) - counts
    before -= np.append(before, 0)[bins.offsets[:-1]][row]  # of smaller values in the same row

    taken = [counts]
    for fmt in HALVES:
        swallowed = updates.fact("swallowed", fmt.name)
        taken.append(np.clip(swallowed[row] - before, 0, counts))
    for figure, some in zip(sums, taken, strict=True):
        of_rows = np.bincount(row, weights=some * mean, minlength=len(updates))
        np.add.at(figure, (part, updates.name), weight * of_rows)
