"""What was asked of a long run's rows before, without reading them again.

A long run takes seconds to read, and its analysis asks few things of it, whose answers are small. They
are kept (``files.kept_arrays``), exactly, until a part of the run changes; the rows are read as soon as
an answer is not there.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpdiag.analysis.layers import Layers
from mpdiag.analysis.scaling.windows import Window
from mpdiag.files.kept_arrays import KeptArrays
from mpdiag.files.paths import is_remote
from mpdiag.numerics.histograms import ExponentHistogram

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from mpdiag.analysis.run_statistics import RunStatistics
    from mpdiag.runs.run import Run

KEEP_FROM = 1 << 22
"""Bytes of a run's parts from which answers are kept: so many are read in half a second."""
_CODE = ("analysis", "runs", "numerics", "files")
_BY_BIN = ("counts", "sums")

Arrays = dict[str, Any]
T = TypeVar("T")


def arrays_of(run: Run) -> KeptArrays | None:
    """Where answers about a run are kept; None for a short run, and for one at a URL."""
    if is_remote(run.folder):
        return None
    parts = [Path(str(part)) for part in run.parts()]
    try:
        size = sum(part.stat().st_size for part in parts)
    except OSError:  # reading it will say what is wrong
        return None
    return KeptArrays(parts, [run.meta.get("steps_seen")], _CODE) if size >= KEEP_FROM else None


class KeptStatistics:
    """Statistics that were kept, and those of rows where they were not.

    Args:
        kept: Where answers are kept.
        read: Reads the rows.
        prefix: What the names of answers begin with: they are of some of the rows.
    """

    def __init__(
        self, kept: KeptArrays, read: Callable[[], RunStatistics], prefix: str = ""
    ) -> None:
        self._kept = kept
        self._read = read
        self._prefix = prefix

    @cached_property
    def _rows(self) -> RunStatistics:
        return self._read()

    def _answer(
        self,
        question: str,
        ask: Callable[[RunStatistics], T],
        pack: Callable[[T], Arrays],
        unpack: Callable[[Arrays], T],
    ) -> T:
        name = self._prefix + question
        found = self._kept.get(name)
        if found is not None:
            return unpack(found)
        answer = ask(self._rows)  # not a copy that is unpacked: the rows may hold it, too
        self._kept.put(name, pack(answer))
        return answer

    @cached_property
    def _layers(self) -> Layers:
        return self._answer("layers", lambda rows: rows.layers(), _of_layers, _as_layers)

    def layers(self) -> Layers:
        """All rows, merged by kind and name."""
        return self._layers

    def steps(self) -> NDArray[np.int64]:
        """Numbers of the recorded steps, ascending."""
        return self._answer("steps", lambda rows: rows.steps(), _of_one, _as_one)

    def late_gradients(self) -> list[tuple[Window, Layers]]:
        """All gradients of each late part of the training, merged by kind and name."""
        return self._answer("late", lambda rows: rows.late_gradients(), _of_late, _as_late)

    def step_maxima(self) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
        """As ``maxima.step_maxima``."""
        return self._answer(
            "maxima",
            lambda rows: rows.step_maxima(),
            lambda found: {"steps": found[0], "maxima": found[1], "non_finite": np.int64(found[2])},
            lambda kept: (kept["steps"], kept["maxima"], int(kept["non_finite"])),
        )

    def by_step(self, layers: Collection[str], steps: NDArray[np.int64]) -> list[ExponentHistogram]:
        """Activation gradients of each of some layers by step: stacks of batch shape (steps,)."""
        asked = _digest([list(layers), steps.tolist()])
        return self._answer(
            f"by-step-{asked}",
            lambda rows: rows.by_step(layers, steps),
            lambda found: _numbered(map(_of_histograms, found)),
            lambda kept: [_as_histograms(_under(kept, i)) for i in range(len(layers))],
        )

    def updates(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Names, and (figures, names) sums over updates of ``UPDATE_FIGURES``."""
        return self._answer(
            "updates",
            lambda rows: rows.updates(),
            lambda found: {"names": _of_words(found[0]), "sums": found[1]},
            lambda kept: (tuple(_as_words(kept["names"])), kept["sums"]),
        )

    def update_paths(self) -> NDArray[np.float64]:
        """How far weights moved, by figure, part of the training and name."""
        return self._answer("paths", lambda rows: rows.update_paths(), _of_one, _as_one)

    def activations(self, leaves: Collection[str]) -> tuple[int, int]:
        """How many values the modules of these names put out, and in how many steps of ranks."""
        return self._answer(
            f"activations-{_digest(sorted(leaves))}",
            lambda rows: rows.activations(leaves),
            lambda found: _of_one(np.array(found)),
            lambda kept: (int(kept["one"][0]), int(kept["one"][1])),
        )

    def without_weight_gradients(self, modules: Collection[str]) -> KeptStatistics:
        """The same without the gradients of some modules' own weights."""
        prefix = f"{self._prefix}without-{_digest(sorted(modules))}-"
        return KeptStatistics(
            self._kept, lambda: self._rows.without_weight_gradients(modules), prefix
        )


def _digest(asked: object) -> str:
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def _of_words(words: Any) -> NDArray[np.uint8]:
    """What JSON can hold, as an array; numbers stay exact."""
    return np.frombuffer(json.dumps(words).encode(), np.uint8)


def _as_words(array: NDArray[np.uint8]) -> list[Any]:
    found: list[Any] = json.loads(array.tobytes())
    return found


def _under(found: Mapping[str, Any], i: int) -> Arrays:
    begin = f"{i} "
    return {key.removeprefix(begin): v for key, v in found.items() if key.startswith(begin)}


def _of_one(array: NDArray[Any]) -> Arrays:
    return {"one": array}


def _as_one(kept: Arrays) -> NDArray[Any]:
    found: NDArray[Any] = kept["one"]
    return found


def _numbered(found: Iterable[Arrays]) -> Arrays:
    return {f"{i} {key}": value for i, one in enumerate(found) for key, value in one.items()}


def _of_late(late: list[tuple[Window, Layers]]) -> Arrays:
    windows = _of_words([astuple(window) for window, _ in late])
    return {"windows": windows, **_numbered(_of_layers(layers) for _, layers in late)}


def _as_late(kept: Arrays) -> list[tuple[Window, Layers]]:
    windows = [Window(*values) for values in _as_words(kept["windows"])]
    return [(window, _as_layers(_under(kept, i))) for i, window in enumerate(windows)]


def _of_layers(layers: Layers) -> Arrays:
    words = {"kinds": _of_words(layers.kinds.tolist()), "names": _of_words(layers.names.tolist())}
    return {**words, "in_steps": layers.steps, **_of_histograms(layers.histograms)}


def _as_layers(found: Mapping[str, Any]) -> Layers:
    kinds, names = (np.array([*_as_words(found[n]), ""], object)[:-1] for n in ("kinds", "names"))
    return Layers(kinds, names, _as_histograms(found), found["in_steps"])


def _of_histograms(h: ExponentHistogram) -> Arrays:
    """A stack as arrays, of its bins those from the first to the last that holds anything."""
    used = np.flatnonzero(h.counts.any(axis=0) | h.sums.any(axis=0))
    held = slice(int(used[0]), int(used[-1]) + 1) if used.size else slice(0, 0)
    found = {field.name: np.asarray(getattr(h, field.name)) for field in fields(h)}
    found |= {name: found[name][:, held] for name in _BY_BIN}
    return {**found, "bins": np.array([held.start, h.counts.shape[1]])}


def _as_histograms(found: Mapping[str, Any]) -> ExponentHistogram:
    begin, bins = (int(x) for x in found["bins"])
    whole: Arrays = {field.name: found[field.name] for field in fields(ExponentHistogram)}
    for name in _BY_BIN:
        some = found[name]
        whole[name] = np.zeros((len(some), bins), some.dtype)
        whole[name][:, begin : begin + some.shape[1]] = some
    whole |= {name: int(whole[name]) for name in ("first", "shifted")}
    return ExponentHistogram(**whole)
