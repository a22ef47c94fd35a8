"""One side of a comparison: the traced steps of a run, its ranks put together where they hold shards."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mpdiag.runs.trace import TraceKind, TraceRow, positions
from mpdiag.tracing.fingerprint import without_wrappers

UNKNOWN = -math.inf
"""A norm that is not known."""


@dataclass(frozen=True, eq=False)
class Piece:
    """What one rank holds, or all ranks together.

    Attributes:
        rank: The rank; -1 for all together, None for a part of a batch.
        shape: Sizes.
        values: At ``positions(shape)``, (k,).
        norm: ‖x‖₂, or ``UNKNOWN``.
        known: Which of the values are known, (k,); None for all.
    """

    rank: int | None
    shape: tuple[int, ...]
    values: NDArray[np.float64]
    norm: float
    known: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class Tensor(TraceRow):
    """A tensor of a traced step over all ranks; what a row says of one is of the first.

    Attributes:
        pieces: One for each rank that holds a tensor of its own; else one for all.
        from_loss: Whether it was made of the gradient that a backward pass begins with.
    """

    pieces: tuple[Piece, ...] = ()
    from_loss: bool = False


Steps = Mapping[int, Sequence[Tensor]]
_Key = tuple[TraceKind, str, "str | None", str, int]
"""Kind, phase, module, name and call."""


def steps_of(rows: Sequence[TraceRow]) -> Steps:
    """A run's traced steps, by number, each in its order."""
    names = without_wrappers([r.name if "weight" in r.kind else r.module or "" for r in rows])
    found: dict[int, dict[_Key, list[TraceRow]]] = defaultdict(lambda: defaultdict(list))
    # The recorder counts calls from 0 again after the backward pass. Clipping has that phase, too.
    calls: Counter[tuple[object, ...]] = Counter()
    for row, name in zip(rows, names, strict=True):
        module = row.module
        if "weight" in row.kind:
            module, own = name.rpartition(".")[0], name
        else:
            module, own = None if module is None else name, row.name
        key = (row.step, row.rank, row.kind, row.phase, module, own)
        found[row.step][row.kind, row.phase, module, own, calls[key]].append(row)
        calls[key] += 1
    return {
        step: _backward(
            sorted((_joined(key, held) for key, held in by.items()), key=lambda t: t.order)
        )
        for step, by in sorted(found.items())
    }


def _backward(step: Sequence[Tensor]) -> Sequence[Tensor]:
    """A step in which gradients are known as such, and have no loss scale of torch's ``GradScaler``.

    That multiplies them by the inverse of its scale after the backward pass.
    """
    end = next((t.order for t in step if t.name.startswith("_amp_foreach_non_finite")), math.inf)
    inverse = [t for t in step if t.name == "reciprocal" and not t.shape and t.order < end]
    by = float(inverse[-1].values[0]) if inverse and end < math.inf else 1.0
    made = {t.order for t in step if t.name == "ones_like"}
    found = []
    for t in step:
        of_loss = t.kind == "gradient" or not made.isdisjoint(t.reads)  # also of what is not seen
        if t.phase == "backward" and t.order < end and of_loss:
            made.add(t.order)
            t = replace(t if by == 1.0 else times(t, by), from_loss=True)
        found.append(t)
    # A loss that divides its rows' gradients by their number does so last: they have no scale before.
    outside = [t for t in found if t.module is None and t.from_loss]
    divided = {i for t in outside if t.name == "div_" for i in t.reads}
    ready = {t.order for t in outside} & divided
    return [replace(t, from_loss=False) if t.order in ready else t for t in found]


def times(t: Tensor, by: float) -> Tensor:
    """A tensor with all its values multiplied."""
    pieces = tuple(replace(p, values=p.values * by, norm=p.norm * by) for p in t.pieces)
    return replace(t, pieces=pieces, spread=None if t.spread is None else t.spread * by)


def _joined(key: _Key, rows: Sequence[TraceRow]) -> Tensor:
    """One tensor of all ranks, with the spread of the twin that came apart furthest."""
    if key[0] == "input":  # a later stage of a pipeline is given something else
        rows = [row for row in rows if row.shape[1:] == rows[0].shape[1:]]
    known = [row.spread for row in rows if row.spread is not None]
    named = dict(zip(("kind", "phase", "module", "name", "call"), key, strict=True))
    spread = max(known, default=None)
    return Tensor(**{**vars(rows[0]), **named, "spread": spread, "pieces": _pieces(rows)})


def _pieces(rows: Sequence[TraceRow]) -> tuple[Piece, ...]:
    first = rows[0]
    if first.partial and len(rows) > 1:
        values = np.sum([row.values for row in rows], axis=0)
        return (Piece(-1, first.shape, values, UNKNOWN),)
    if first.at is None:
        return tuple(Piece(row.rank, row.shape, row.values, row.norm) for row in rows)
    values = np.zeros(positions(first.shape).size)
    times = np.zeros(values.size)
    same = [row for row in rows if row.shape == first.shape]  # not of another pipeline stage
    for row in same:
        at = np.arange(values.size) if row.at is None else row.at
        values[at] = row.values
        times[at] += 1
    copies = max(1.0, times.sum() / max(1, np.count_nonzero(times)))  # of shards held several times
    norm = math.sqrt(sum(row.norm**2 for row in same) / copies)
    norm = norm if len(same) == len(rows) else UNKNOWN
    return (Piece(-1, first.shape, values, norm, times > 0),)
