"""What of one side's ranks belongs to what of the other's.

Ranks hold a whole tensor each, rows of a batch, or a part along another dimension. How a batch was dealt
out is told by what went into the model: row after row, or in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpdiag.analysis.difference.alignment import Pair
from mpdiag.analysis.difference.sides import UNKNOWN, Piece, Tensor
from mpdiag.analysis.difference.tolerance import Values, distance, roundoff
from mpdiag.runs.trace import positions

Match = tuple[int | None, Values, Values, int]
"""A rank, both sides' values at the same positions, and the number of elements of the norms."""
_MADE = ("operation", "output")
_TELLS = 0.5
"""How much nearer than with another scale a gradient is with the right one, at least."""
_NEAR = 0.1
"""How much nearer than another way of putting parts together the right one is, at least."""


@dataclass(frozen=True)
class Layout:
    """How the ranks of one side hold what the other side holds once.

    Attributes:
        ranks: How many ranks the other side has for one here.
        split: Whether each rank has rows of the batch of its own.
        batch: How many rows the batch has.
        dealt: How many of these each rank has.
        turns: Whether rows were dealt out in turn, and not row after row; None for another way.
        scales: How many times larger a rank's gradients of its rows may be: it is of its own mean, or
            not; one where they show it.
        accumulated: Whether the parts are of one rank, which adds up their gradients.
    """

    ranks: int = 1
    split: bool = False
    batch: int = 1
    dealt: tuple[int, ...] = ()
    turns: bool | None = False
    scales: tuple[float, ...] = (1.0,)
    accumulated: bool = False


def layout_of(pairs: Sequence[Pair]) -> Layout:
    """How a step's batch was dealt out, and what the first gradient of rows shows of their scale."""
    layout = _dealt([pair for pair in pairs if pair.a.kind == "input"])
    for pair in pairs if layout.split else ():
        if pair.a.kind == "gradient" and _has_rows(pair.a, pair.b):
            found = list(_pairs(pair.a, pair.b, layout))
            best, second, _ = sorted(_furthest(_divided(found, scale)) for scale in layout.scales)
            if best < _TELLS * second:  # and not noise, as of words that a mask leaves out
                return replace(layout, scales=(_scale(found, layout.scales),))
    return layout


def _has_rows(a: Tensor, b: Tensor) -> bool:
    """Whether ranks hold rows of a batch, each its own."""
    return len({piece.shape for piece in (*a.pieces, *b.pieces)}) > 1


def _dealt(inputs: Sequence[Pair]) -> Layout:
    """How a batch was dealt out, by the inputs of both sides."""
    ranks = 1
    for pair in inputs:
        one, many = _sides(pair.a, pair.b)
        if len(one.pieces) != 1 or len(many.pieces) < 2:
            continue
        ranks = len(many.pieces)
        if one.shape != many.shape:
            inside = math.prod(one.shape[1:])
            far = {t: _furthest(list(_rows(one, many, inside, turns=t))) for t in (False, True)}
            turns = min(far, key=lambda t: far[t])
            scales = (1.0, float(ranks), 1.0 / ranks)
            accumulated = many.pieces[0].rank is None
            dealt = tuple(part.shape[0] for part in many.pieces)
            way = turns if far[turns] <= _NEAR * far[not turns] else None
            return Layout(ranks, True, one.shape[0], dealt, way, scales, accumulated)
    return Layout(ranks)


def matched(a: Tensor, b: Tensor, layout: Layout) -> Iterable[Match]:
    """What belongs together of a tensor, for each rank or for all of them together."""
    backward = a.phase == "backward" and "weight" not in a.kind
    # Gradients of what one rank has alone, as an expert, are added up in another order.
    alone = backward and len(a.pieces) == len(b.pieces)
    skipped = alone and not layout.accumulated  # that has a part's operations as often as parts
    if a.kind in _MADE and layout.ranks > 1 and (skipped or not roundoff(a.dtype)):
        return []  # and whole numbers count from a rank's first word or row
    found = list(_pairs(a, b, layout))
    if not layout.split or not backward or (alone and layout.accumulated):
        return found
    scales = layout.scales
    if not (a.from_loss or b.from_loss or a.kind == "gradient") or not _has_rows(a, b):
        scales = (1.0, *scales, *(1 / scale for scale in scales))
    return _divided(found, _scale(found, scales))


def _pairs(a: Tensor, b: Tensor, layout: Layout) -> Iterator[Match]:
    if len(a.pieces) == len(b.pieces):
        by_rank = {p.rank: p for p in b.pieces}
        for mine in a.pieces:
            theirs = by_rank.get(mine.rank, b.pieces[0] if len(b.pieces) == 1 else None)
            alike = math.prod if "weight" in a.kind or a.kind == "input" else tuple
            if theirs is not None and alike(mine.shape) == alike(theirs.shape):
                rank = mine.rank if len(a.pieces) > 1 else None
                yield rank, *shared(mine, theirs), math.prod(mine.shape)
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
    weight = "weight" in one.kind
    if whole.shape == parts[0].shape:
        of_a_part = parts[0].rank is None and one.phase == "forward" and not whole.shape
        if not of_a_part:  # a mean, which may count for more than that of another part of the batch
            ways = () if weight else (np.sum, np.mean)[: 1 + layout.split]
            yield from _nearest(whole, parts, ways)
        return
    elements = sum(math.prod(part.shape) for part in parts)
    if elements != math.prod(whole.shape):
        return
    rows = weight or (layout.split and layout.turns is not None)
    turns = bool(layout.turns) and not weight
    length = (*whole.shape, 1)[0]
    inside, left = divmod(elements, layout.batch if turns else length)
    if turns:  # not a list of some rows, of which one rank may have more
        even = zip(parts, layout.dealt, strict=True)
        left = left or any((*p.shape, 1)[0] * layout.batch != length * held for p, held in even)
    if rows and not left and whole.shape[1:] == parts[0].shape[1:]:
        found = list(_rows(one, many, inside, turns=turns))
        yield from found if weight else _words_first(one, many, layout, found)
    norm = math.sqrt(sum(part.norm**2 for part in parts))
    if weight or one.phase != "backward" or not layout.split:
        none = np.zeros(0)
        yield None, (none, whole.norm), (none, norm), elements


def _words_first(
    one: Tensor, many: Tensor, layout: Layout, found: Sequence[Match]
) -> Sequence[Match]:
    """The rows if the batch lies inside another dimension, as in torch's attention and recurrences."""
    scales = (1.0, float(layout.ranks), 1.0 / layout.ranks)
    most, left = divmod((*one.shape, 1)[0], layout.batch)
    outers = () if left else (n for n in range(most, 1, -1) if most % n == 0)
    inside, turns = math.prod(one.shape) // layout.batch, bool(layout.turns)
    ways = [list(_rows(one, many, inside // n, turns=turns, outer=n)) for n in outers]
    ways = [way for way in ways if any(match[1][0].any() for match in way)]
    far = [_furthest(_divided(way, _scale(way, scales))) for way in (found, *ways)]
    nearest = int(np.argmin(far))  # values of one size may be near in another order, too
    return ways[nearest - 1] if far[nearest] < _NEAR * far[0] else found


def _rows(
    one: Tensor, many: Tensor, inside: int, *, turns: bool, outer: int = 1
) -> Iterator[Match]:
    """The rows, of as many elements, at which a rank and the whole were both looked at.

    The batch may lie inside another dimension of ``outer``, then flattened: rows repeat as often.
    """
    whole, ranks = one.pieces[0], len(many.pieces)
    known = positions(whole.shape)
    held = [math.prod(part.shape) // max(inside * outer, 1) for part in many.pieces]
    before = 0
    for i, (part, length) in enumerate(zip(many.pieces, held, strict=True)):
        row, column = np.divmod(positions(part.shape), max(inside, 1))
        round_, row = np.divmod(row, max(length, 1))
        row = round_ * sum(held) + (row * ranks + i if turns else row + before)
        there = row * inside + column
        _, ours, theirs = np.intersect1d(known, there, assume_unique=True, return_indices=True)
        yield part.rank, (whole.values[ours], UNKNOWN), (part.values[theirs], UNKNOWN), 0
        before += length


def _scale(found: Sequence[Match], scales: Sequence[float]) -> float:
    """By how much a rank's gradients are to be divided, whichever comes nearest."""
    return min(scales, key=lambda scale: _furthest(_divided(found, scale)))


def _divided(found: Sequence[Match], by: float) -> Sequence[Match]:
    return [(rank, x, (y[0] / by, y[1] / by), n) for rank, x, y, n in found]


def _nearest(
    whole: Piece, parts: Sequence[Piece], ways: Iterable[Callable[..., Any]]
) -> Sequence[Match]:
    """What ranks have: each of them the whole, or all together; whichever is nearest."""
    alike = [part for part in parts if part.shape == whole.shape]  # stages are given other inputs
    each = [(p.rank, *shared(whole, p), math.prod(whole.shape)) for p in alike]
    joined = ((way([p.values for p in alike], axis=0), UNKNOWN) for way in ways)
    together = ([(None, (whole.values, UNKNOWN), values, 0)] for values in joined)
    return min([each, *together], key=_furthest)


def _furthest(found: Sequence[Match]) -> float:
    return max((distance(x[0], y[0]) for _, x, y, _ in found), default=0.0)


def shared(a: Piece, b: Piece) -> tuple[Values, Values]:
    """Two pieces at the positions that both know; of another layout the norms alone."""
    sizes = ([n for n in shape if n > 1] for shape in (a.shape, b.shape))
    if a.shape[:1] != b.shape[:1] or next(sizes) != next(sizes):
        return (np.zeros(0), a.norm), (np.zeros(0), b.norm)
    every = np.ones(a.values.size, np.bool_)
    both = (every if a.known is None else a.known) & (every if b.known is None else b.known)
    return (a.values[both], a.norm), (b.values[both], b.norm)


def _sides(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The one with fewer pieces, and the other."""
    return (a, b) if len(a.pieces) <= len(b.pieces) else (b, a)
