"""Sizes written in unknowns: sums of products such as ``3 · heads · head`` or ``left + right``.

An unknown is a number; a term is a product of unknowns (sorted, repeated where it is squared) with
a factor in front. The empty term is a plain number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Term = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """A size as a sum of products of unknowns.

    Attributes:
        terms: Products with their factors, sorted; none has the factor 0.
    """

    terms: tuple[tuple[Term, int], ...] = ()

    def __add__(self, other: Size) -> Size:
        """The size of a concatenation."""
        found = dict(self.terms)
        for term, factor in other.terms:
            found[term] = found.get(term, 0) + factor
        return _size(found)

    def __mul__(self, other: Size) -> Size:
        """The size of two dimensions that were merged."""
        found: dict[Term, int] = {}
        for a, x in self.terms:
            for b, y in other.terms:
                term = tuple(sorted(a + b))
                found[term] = found.get(term, 0) + x * y
        return _size(found)

    @property
    def unknowns(self) -> frozenset[int]:
        """Those that it depends on."""
        return frozenset(u for term, _ in self.terms for u in term)

    @property
    def unknown(self) -> int | None:
        """The unknown that it is; None where it is anything else."""
        if len(self.terms) == 1 and len(self.terms[0][0]) == 1 and self.terms[0][1] == 1:
            return self.terms[0][0][0]
        return None

    @property
    def product(self) -> tuple[Term, int] | None:
        """Its one term and the factor; None where it is a sum."""
        return self.terms[0] if len(self.terms) == 1 else None

    def value(self, values: Mapping[int, int]) -> int:
        """Its number, each unknown being replaced by a number."""
        return sum(f * math.prod(values[u] for u in term) for term, f in self.terms)

    def replaced(self, find: Callable[[int], Size | None]) -> Size:
        """The same size with some unknowns written in others, wherever ``find`` knows them."""
        if all(find(u) is None for u in self.unknowns):
            return self
        total = Size()
        for term, factor in self.terms:
            made = number(factor)
            for u in term:
                made = made * (find(u) or unknown(u))
            total = total + made
        return total


def number(value: int) -> Size:
    """A size that never changes."""
    return _size({(): value})


def unknown(u: int) -> Size:
    """The size that an unknown stands for."""
    return Size((((u,), 1),))


def product_of(sizes: list[Size]) -> Size:
    """All of them multiplied."""
    made = number(1)
    for size in sizes:
        made = made * size
    return made


def _size(terms: Mapping[Term, int]) -> Size:
    return Size(tuple(sorted((t, f) for t, f in terms.items() if f)))
