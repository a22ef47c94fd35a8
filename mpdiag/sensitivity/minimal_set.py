"""Finds a minimal sufficient subset with few tests.

A test is a whole training, so their number is what counts. Candidates come ranked, the most suspicious
first; if the ranking is right, the answer is a short prefix. Each needed candidate is found by
bisection: the last element of the shortest good prefix is always needed. So m needed candidates among
n cost about 2·m·log2(n) tests instead of n, and fewer if the ranking is good. This is delta debugging
that exploits the order.

Sources: Zeller and Hildebrandt, *Simplifying and Isolating Failure-Inducing Input* (2002), for
1-minimality; Junker, *QuickXplain* (2004), for required sets that grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def find_smallest(
    ranked: Sequence[T],
    good: Callable[[frozenset[T]], bool],
    on_better: Callable[[frozenset[T]], None] = lambda _: None,
) -> frozenset[T] | None:
    """A good subset from which no element can be removed.

    Args:
        ranked: Candidates without repetition, those most likely needed first.
        good: Whether a subset suffices. Adding elements should not hurt: a superset of a good set
            counts as good. It may be called twice with the same set, and may raise to end the search.
        on_better: Called with every good set as soon as it is known, each smaller than the last.

    Returns:
        The empty set if nothing is needed; None if not even all candidates suffice.
    """
    needed: frozenset[T] = frozenset()
    rest = list(ranked)
    while True:
        length = _shortest_prefix(rest, needed, good, on_better)
        if length is None:
            return None
        if length == 0:
            break
        needed |= {rest[length - 1]}
        rest = rest[: length - 1]
    return _without_spare(needed, ranked, good, on_better)


def _shortest_prefix(
    items: Sequence[T],
    held: frozenset[T],
    good: Callable[[frozenset[T]], bool],
    on_better: Callable[[frozenset[T]], None],
) -> int | None:
    """Length of the shortest prefix that is good together with ``held``; None if none is.

    The length is doubled from 0 first, because the answer is expected near the front.
    """

    def passes(length: int) -> bool:
        part = held | frozenset(items[:length])
        answer = good(part)
        if answer:
            on_better(part)
        return answer

    if passes(0):
        return 0
    bad, length = 0, 1
    while True:
        length = min(length, len(items))
        if length == bad:
            return None
        if passes(length):
            break
        bad, length = length, 2 * length
    while length - bad > 1:
        middle = (bad + length) // 2
        if passes(middle):
            length = middle
        else:
            bad = middle
    return length


def _without_spare(
    found: frozenset[T],
    ranked: Sequence[T],
    good: Callable[[frozenset[T]], bool],
    on_better: Callable[[frozenset[T]], None],
) -> frozenset[T]:
    """Remove what is not needed, in case a larger set did hurt somewhere on the way."""
    if not found:
        return found
    for item in reversed(ranked):
        if item in found and good(found - {item}):
            found -= {item}
            on_better(found)
    return found
