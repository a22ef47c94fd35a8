"""What of one side's ranks belongs to what of the other's.

Ranks hold a whole tensor each, rows of a batch, or a part along another dimension. How a batch was dealt
out is told by what went into the model: row after row, or in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.difference.alignment import Pair
from mpdiag.analysis.difference.sides import Piece, Tensor
from mpdiag.analysis.difference.tolerance import distance
from mpdiag.runs.trace import positions

Values = tuple[NDArray[np.float64], float]
"""Values at positions, and the norm."""
Match = tuple[int | None, Values, Values, int]
"""A rank, both sides' values at the same positions, and the number of elements of the norms."""


@dataclass(frozen=True)
class Layout:
    """How the ranks of one side hold what the other side holds once.

    Attributes:
        split: Whether each rank has rows of the batch of its own.
        turns: Whether rows were dealt out in turn, and not row after row.
    """

    split: bool = False
    turns: bool = False


def layout_of(inputs: Sequence[Pair]) -> Layout:
    """How a batch was dealt out, by the inputs of both sides."""
    for pair in inputs:
        one, many = _sides(pair.a, pair.b)
        if len(one.pieces) != 1 or len(many.pieces) < 2 or one.shape == many.shape:
            continue
        found = {
            turns: sum(distance(x[0], y[0]) for _, x, y, _ in _rows(one, many, turns=turns))
            for turns in (False, True)
        }
        return Layout(split=True, turns=found[True] < found[False])
    return Layout()


def matched(a: Tensor, b: Tensor, layout: Layout) -> Iterator[Match]:
    """What belongs together of a tensor, for each rank or for all of them together."""
    if len(a.pieces) == len(b.pieces):
        by_rank = {p.rank: p for p in b.pieces}
        for mine in a.pieces:
            theirs = by_rank.get(mine.rank, b.pieces[0] if len(b.pieces) == 1 else None)
            if theirs is not None and mine.shape == theirs.shape:
                rank = mine.rank if len(a.pieces) > 1 else None
                yield rank, *_both(mine, theirs), math.prod(mine.shape)
            elif len(a.pieces) == 1 and a.kind in ("weight", "input"):
                yield None, (np.full(1, math.nan), math.nan), (np.zeros(1), math.nan), 1
        return
    one, many = _sides(a, b)
    if len(one.pieces) != 1:
        return  # two groups of ranks, neither of which holds the whole
    found = list(_matched(one, many, layout))
    yield from ((r, y, x, n) for r, x, y, n in found) if one is b else found


def _matched(one: Tensor, many: Tensor, layout: Layout) -> Iterator[Match]:
    whole, parts = one.pieces[0], many.pieces
    if whole.shape == parts[0].shape:
        if layout.split and "weight" not in one.kind:
            yield None, (whole.values, whole.norm), _combined(whole, parts), math.prod(whole.shape)
            return
        for part in parts:
            yield part.rank, *_both(whole, part), math.prod(whole.shape)
        return
    elements = sum(math.prod(part.shape) for part in parts)
    if elements != math.prod(whole.shape):
        return
    if whole.shape[1:] == parts[0].shape[1:]:
        yield from _scaled(list(_rows(one, many, turns=layout.turns)))
    norm = math.sqrt(sum(part.norm**2 for part in parts))
    if one.phase != "backward" or not layout.split:
        none = np.zeros(0)
        yield None, (none, whole.norm), (none, norm), elements


def _rows(one: Tensor, many: Tensor, *, turns: bool) -> Iterator[Match]:
    """The rows of a batch that a rank and the whole were both looked at."""
    whole = one.pieces[0]
    known = dict(zip(positions(whole.shape).tolist(), whole.values.tolist(), strict=True))
    inside, ranks = math.prod(whole.shape[1:]), len(many.pieces)
    before = 0
    for i, part in enumerate(many.pieces):
        row, column = np.divmod(positions(part.shape), max(inside, 1))
        there = (row * ranks + i if turns else row + before) * inside + column
        held = [k for k, number in enumerate(there.tolist()) if number in known]
        theirs = np.array([known[n] for n in there[held].tolist()])
        yield part.rank, (theirs, math.nan), (part.values[held], math.nan), 0
        before += part.shape[0] if part.shape else 1


def _scaled(found: Sequence[Match]) -> Iterator[Match]:
    """Each rank's gradients are of its own mean: as many times larger as there are ranks, or not."""
    ranks = len(found)
    apart = {
        by: sum(distance(x[0], y[0] / by) for _, x, y, _ in found) for by in (1.0, float(ranks))
    }
    by = min(apart, key=lambda factor: apart[factor])
    yield from ((rank, x, (y[0] / by, y[1]), n) for rank, x, y, n in found)


def _combined(whole: Piece, parts: Sequence[Piece]) -> Values:
    """What ranks computed of their own rows: the same, their mean or their sum, whichever is nearest."""
    values = np.stack([part.values for part in parts])
    ways = [values[0], values.mean(0), values.sum(0)]
    nearest = min(ways, key=lambda way: distance(whole.values, way))
    return nearest, math.nan


def _both(a: Piece, b: Piece) -> tuple[Values, Values]:
    """Two pieces at the positions that both know."""
    every = np.ones(a.values.size, np.bool_)
    both = (every if a.known is None else a.known) & (every if b.known is None else b.known)
    return (a.values[both], a.norm), (b.values[both], b.norm)


def _sides(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The one with fewer pieces, and the other."""
    return (a, b) if len(a.pieces) <= len(b.pieces) else (b, a)
