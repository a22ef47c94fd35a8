"""The plain way to the smallest set, which the search is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def take_away_one_by_one(
    ranked: Sequence[T], good: Callable[[frozenset[T]], bool]
) -> frozenset[T] | None:
    """A good subset from which nothing can be taken away, by one question for each candidate.

    The arguments and the answer are those of ``mpdiag.sensitivity.fp32_search.find_smallest``.
    """
    kept = frozenset(ranked)
    if not good(kept):
        return None
    for item in reversed(ranked):
        if good(kept - {item}):
            kept -= {item}
    return kept
