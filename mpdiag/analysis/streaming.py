"""The analysis of runs that outgrow memory: three passes over the parts, and only sums are kept.

Passes::

    overview   all columns but the histograms: names, steps, maxima, activations, what may be counted
    merge      every row's histogram: of each layer, of late parts of the training, of updates
    by_step    the histograms of one or two layers, step by step

What is kept grows with layers × steps only as single bits and with layers as histograms of 4 KiB.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.kept_statistics import KeptStatistics, arrays_of
from mpdiag.analysis.layers import Counting, Layers, countable_rows, note_counting
from mpdiag.analysis.run_statistics import (
    PARTS_OF_TRAINING,
    PATH_FIGURES,
    STREAM_FROM,
    UPDATE_FIGURES,
    InMemoryStatistics,
    RunStatistics,
    sum_paths,
    sum_updates,
    weight_gradients_of,
)
from mpdiag.analysis.scaling.maxima import step_maxima
from mpdiag.analysis.scaling.windows import late_windows
from mpdiag.runs.records import Merger
from mpdiag.runs.schema import KINDS, TEXT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from mpdiag.analysis.scaling.windows import Window
    from mpdiag.numerics.histograms import ExponentHistogram
    from mpdiag.runs.records import Records
    from mpdiag.runs.run import Run
    from mpdiag.runs.schema import Kind


def read_statistics(run: Run, stream_from: int | None = None) -> RunStatistics:
    """A run's rows in memory, or streamed where they are many; of a long run, what was kept.

    Raises:
        DamagedRun: If a part cannot be read, or there are no rows.
    """
    if "records" not in run.__dict__:
        kept = arrays_of(run)
        if kept is not None:
            return KeptStatistics(kept, lambda: _read(run, stream_from))
    return _read(run, stream_from)


def _read(run: Run, stream_from: int | None) -> RunStatistics:
    limit = STREAM_FROM if stream_from is None else stream_from
    if "records" not in run.__dict__ and run.rows() >= limit:
        return StreamedStatistics(run)
    return InMemoryStatistics(run.records, int(run.meta.get("steps_seen") or 0))


@dataclass
class _Vocabulary:
    """Codes that hold over all parts; kinds in their fixed order."""

    words: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in TEXT})

    def __post_init__(self) -> None:
        self.words["kind"] = {kind: i for i, kind in enumerate(KINDS)}

    def recode(self, piece: Records) -> Records:
        """The piece with codes of this vocabulary, which learns its words."""
        changes: dict[str, Any] = {}
        for column in TEXT:
            known = self.words[column]
            table = [known.setdefault(word, len(known)) for word in piece.words[column]]
            changes[column] = np.array([*table, -1], np.int32)[getattr(piece, column)]
        return replace(piece, words={c: tuple(self.words[c]) for c in TEXT}, **changes)


@dataclass
class _Overview:
    """What the first pass leaves behind; arrays by name grow as names appear."""

    maxima: dict[int, float] = field(default_factory=dict)
    counting: Counting = field(default_factory=Counting)
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    numel: Counter[int] = field(default_factory=Counter)  # of activations, by name
    recorded: dict[bytes, set[tuple[int, int]]] = field(default_factory=dict)
    """By names of modules, as int32 codes: the (step, rank) pairs whose activations they are."""

    def note_activations(self, piece: Records) -> None:
        """Take activations into account."""
        rows = np.flatnonzero(piece.of_kind("activation"))
        if not rows.size:
            return
        names, at = np.unique(piece.name[rows], return_inverse=True)
        sums = np.zeros(len(names), np.int64)
        np.add.at(sums, at.reshape(-1), piece.numel[rows])
        self.numel.update(dict(zip(names.tolist(), sums.tolist(), strict=True)))
        moments = piece.step[rows].astype(np.int64) << 16 | piece.rank[rows]
        for moment in np.unique(moments).tolist():
            own = np.unique(piece.name[rows[moments == moment]]).astype(np.int32)
            self.recorded.setdefault(own.tobytes(), set()).add(divmod(moment, 1 << 16))


@dataclass
class _Merged:
    """What the second pass leaves behind."""

    layers: Layers
    late: list[tuple[Window, Layers]]
    updates: NDArray[np.int64]
    paths: NDArray[np.float64]


class StreamedStatistics:
    """Rows that are read part by part: of the parts there are when it is made."""

    def __init__(self, run: Run, without: Collection[str] = ()) -> None:
        self._run = run
        self._without = without
        self._parts = run.parts()
        self._vocabulary = _Vocabulary()

    def _pieces(
        self, *, histograms: bool = True, only: tuple[Kind, Collection[str]] | None = None
    ) -> Iterator[Records]:
        for piece in self._run.pieces(histograms=histograms, parts=self._parts, only=only):
            if self._without:
                piece = piece.select(~weight_gradients_of(piece, self._without))
            yield self._vocabulary.recode(piece)

    @cached_property
    def _overview(self) -> _Overview:
        seen = _Overview()
        steps: set[int] = set()
        for piece in self._pieces(histograms=False):
            note_counting(seen.counting, piece)
            found, maxima, _ = step_maxima(piece)
            for step, top in zip(found.tolist(), maxima.tolist(), strict=True):
                seen.maxima[step] = max(top, seen.maxima.get(step, 0.0))
            steps.update(np.unique(piece.step).tolist())
            seen.note_activations(piece)
        seen.steps = np.array(sorted(steps), np.int64)
        return seen

    def step_maxima(self) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
        """As ``maxima.step_maxima``."""
        found = self._overview.maxima
        steps = np.array(sorted(found), np.int64)
        maxima = np.array([found[step] for step in steps.tolist()])
        return steps, maxima, int(np.isinf(maxima).sum())

    def steps(self) -> NDArray[np.int64]:
        """Numbers of the recorded steps, ascending."""
        return self._overview.steps

    def layers(self) -> Layers:
        """All rows, merged by kind and name."""
        return self._merged.layers

    def late_gradients(self) -> list[tuple[Window, Layers]]:
        """All gradients of each late part of the training, merged by kind and name."""
        return self._merged.late

    @cached_property
    def _merged(self) -> _Merged:
        overview = self._overview
        length = int(self._run.meta.get("steps_seen") or 0)
        windows = late_windows(self.step_maxima()[0], length)
        kinds, width = len(KINDS), len(self._vocabulary.words["name"])
        everything = _LayerSums(kinds * width, overview.steps)
        late = [_LayerSums(kinds * width, overview.steps) for _ in windows]
        updates = np.zeros((len(UPDATE_FIGURES), width), np.int64)
        paths = np.zeros((PATH_FIGURES, PARTS_OF_TRAINING, width))
        for piece in self._pieces():
            # What counts is known only now: of a tensor on several ranks the first copies alone.
            keep = countable_rows(piece, overview.counting)
            keys = piece.kind.astype(np.int64) * width + piece.name
            everything.add(piece, keys, keep)
            rows = np.flatnonzero(piece.of_kind("update") & keep)
            if rows.size:
                updates += sum_updates(piece, rows, width)
                sum_paths(piece, rows, overview.steps, paths)
            keep &= piece.of_kind("activation_grad") | piece.of_kind("weight_grad")
            for window, sums in zip(windows, late, strict=True):
                sums.add(piece, keys, keep & window.holds(piece.step))
        names = np.array(list(self._vocabulary.words["name"]), dtype=object)
        merged = [sums.layers(names) for sums in late]
        found = list(zip(windows, merged, strict=True))
        return _Merged(everything.layers(names), found, updates, paths)

    def by_step(self, layers: Collection[str], steps: NDArray[np.int64]) -> list[ExponentHistogram]:
        """Activation gradients of each of some layers by step: stacks of batch shape (steps,)."""
        codes = [self._vocabulary.words["name"].get(layer, -2) for layer in layers]
        mergers = [Merger(steps.size) for _ in codes]
        for piece in self._pieces(only=("activation_grad", layers)):
            keep = piece.of_kind("activation_grad") & np.isin(piece.name, codes)
            if not keep.any():
                continue
            keep &= countable_rows(piece, self._overview.counting)
            at = np.searchsorted(steps, piece.step)
            keep &= np.append(steps, -1)[at] == piece.step
            for code, merger in zip(codes, mergers, strict=True):
                merger.add(piece, np.where(keep & (piece.name == code), at, -1))
        return [merger.result() for merger in mergers]

    def updates(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Names, and (figures, names) sums over updates of ``UPDATE_FIGURES``."""
        sums = self._merged.updates
        return tuple(self._vocabulary.words["name"])[: sums.shape[1]], sums

    def update_paths(self) -> NDArray[np.float64]:
        """How far weights moved, see ``sum_paths``, by figure, part of the training and name."""
        return self._merged.paths

    def activations(self, leaves: Collection[str]) -> tuple[int, int]:
        """How many values the modules of these names put out, and in how many steps of ranks."""
        overview, names = self._overview, self._vocabulary.words["name"]
        codes = {names[leaf] for leaf in leaves if leaf in names}
        steps = set[tuple[int, int]]()
        for own, found in overview.recorded.items():
            if not codes.isdisjoint(np.frombuffer(own, np.int32).tolist()):
                steps |= found
        return sum(overview.numel[code] for code in codes), len(steps)

    def without_weight_gradients(self, modules: Collection[str]) -> StreamedStatistics:
        """The same without the gradients of some modules' own weights, read anew."""
        return StreamedStatistics(self._run, frozenset(modules))


class _LayerSums:
    """Sums by kind and name, for keys that turn up one after another."""

    def __init__(self, keys: int, steps: NDArray[np.int64]) -> None:
        self._place = np.full(keys, -1, np.int64)  # of each key, in the order of appearance
        self._keys: list[int] = []
        self._steps = steps
        self._merger = Merger(0)
        self._seen = np.zeros((0, steps.size), bool)

    def add(self, piece: Records, keys: NDArray[np.int64], keep: NDArray[np.bool_]) -> None:
        """Add the rows under a mask."""
        rows = np.flatnonzero(keep)
        fresh, first = np.unique(keys[rows], return_index=True)
        new = self._place[fresh] < 0
        for key in fresh[new][np.argsort(first[new], kind="stable")].tolist():
            self._place[key] = len(self._keys)
            self._keys.append(key)
        size = len(self._keys)
        if size > len(self._seen):
            # Doubled, so that growing costs no more than the sums themselves.
            room = max(size, 2 * len(self._seen))
            self._merger.grow(room)
            more = np.zeros((room - len(self._seen), self._steps.size), bool)
            self._seen = np.concatenate([self._seen, more])
        group = np.full(len(piece), -1, np.int64)
        group[rows] = self._place[keys[rows]]
        self._merger.add(piece, group)
        self._seen[group[rows], np.searchsorted(self._steps, piece.step[rows])] = True

    def layers(self, names: NDArray[np.object_]) -> Layers:
        """The sums as layers."""
        keys = np.array(self._keys, np.int64)
        kinds = np.array(KINDS, dtype=object)
        return Layers(
            kinds=kinds[keys // max(1, len(names))],
            names=names[keys % max(1, len(names))],
            histograms=self._merger.result()[: len(keys)],
            steps=self._seen[: len(keys)].sum(axis=1),
        )
