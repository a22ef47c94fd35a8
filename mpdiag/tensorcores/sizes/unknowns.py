"""The unknown sizes of a model and the equations between them, solved as they come in.

``equate`` says that two sizes are one. Where one of the two is an unknown it is written in the other;
where both are products, factors that both have are cancelled first, so that 3 · a = 6 · b gives
a = 2 · b. What cannot be written so stays an equation for the solver.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpdiag.tensorcores.sizes.expressions import Size, number, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class Unknowns:
    """Unknown sizes, each with its present value, and what is known of them.

    Attributes:
        values: The present value of each unknown.
        notes: Words about each: where it comes from and what uses it.
        written: Unknowns that are written in others.
        equations: Pairs of sizes that must be equal and could not be written in each other.
        refused: Pairs that were said to be equal though their values differ: what the caller
            believed of the model is wrong there.
    """

    values: list[int] = field(default_factory=list)
    notes: list[frozenset[str]] = field(default_factory=list)
    written: dict[int, Size] = field(default_factory=dict)
    equations: list[tuple[Size, Size]] = field(default_factory=list)
    refused: list[tuple[Size, Size]] = field(default_factory=list)

    def new(self, value: int, *notes: str) -> Size:
        """A size of which only the present value is known; sizes 0 and 1 are plain numbers."""
        if value <= 1:
            return number(value)
        self.values.append(value)
        self.notes.append(frozenset(notes))
        return unknown(len(self.values) - 1)

    def resolve(self, size: Size) -> Size:
        """A size in unknowns that are not written in others."""
        while any(u in self.written for u in size.unknowns):
            size = size.replaced(self.written.get)
        return size

    def value(self, size: Size) -> int:
        """Its present value."""
        return size.value(dict(enumerate(self.values)))

    def note(self, size: Size, *notes: str) -> None:
        """Add words to the unknowns of a size."""
        for u in self.resolve(size).unknowns:
            self.notes[u] |= set(notes)

    def notes_of(self, size: Size) -> frozenset[str]:
        """The words about all unknowns of a size."""
        return frozenset().union(*(self.notes[u] for u in self.resolve(size).unknowns))

    def fix(self, size: Size) -> None:
        """Nothing of this size may change."""
        for u in self.resolve(size).unknowns:
            self._write(u, number(self.values[u]))

    def equate(self, a: Size, b: Size) -> bool:
        """Two sizes are one; False where their present values differ, and nothing is concluded."""
        a, b = self.resolve(a), self.resolve(b)
        if a == b:
            return True
        if self.value(a) != self.value(b):
            self.refused.append((a, b))
            return False
        a, b = _without_common_terms(a, b)
        a, b = _cancelled(a, b)
        for one, other in ((a, b), (b, a)):
            u = one.unknown
            if u is not None and u not in other.unknowns and _positive(other):
                self._write(u, other)
                return True
        if not a.unknowns and not b.unknowns:
            return True
        for one, other in ((a, b), (b, a)):
            if not one.unknowns:  # a number: nothing of the other can change
                self.fix(other)
                return True
        if not self._in_common_parts(a, b):
            self.equations.append((a, b))
        return True

    def _in_common_parts(self, a: Size, b: Size) -> bool:
        """Solve 3 · a = 2 · b by a = 2 · t, b = 3 · t."""
        one, other = a.product, b.product
        if one is None or other is None:
            return False
        (left, x), (right, y) = one, other
        if len(left) != 1:
            (left, x), (right, y) = (right, y), (left, x)
        if len(left) != 1 or x == 0:
            return False
        if len(right) != 1:
            return False
        share = math.gcd(x, y)
        part = self.new(self.values[left[0]] // (y // share))
        if not part.unknowns:
            part = number(1)
        self._write(left[0], number(y // share) * part)
        self._write(right[0], number(x // share) * part)
        return True

    def _write(self, u: int, size: Size) -> None:
        self.written[u] = size
        for other in self.resolve(size).unknowns:
            self.notes[other] |= self.notes[u]

    def remaining(self) -> Iterable[tuple[Size, Size]]:
        """The equations that are still to be met, in unknowns that are not written in others."""
        for a, b in self.equations:
            one, other = self.resolve(a), self.resolve(b)
            if one != other:
                yield one, other


def _positive(size: Size) -> bool:
    return all(f > 0 for _, f in size.terms)


def _without_common_terms(a: Size, b: Size) -> tuple[Size, Size]:
    minus = number(-1)
    left = dict((a + b * minus).terms)
    return (
        Size(tuple((t, f) for t, f in sorted(left.items()) if f > 0)),
        Size(tuple((t, -f) for t, f in sorted(left.items()) if f < 0)),
    )


def _cancelled(a: Size, b: Size) -> tuple[Size, Size]:
    """Both divided by the unknowns and the factor that every term has."""
    terms = (*a.terms, *b.terms)
    if not a.terms or not b.terms:
        return a, b
    share = math.gcd(*(f for _, f in terms))
    common = Counter(terms[0][0])
    for term, _ in terms[1:]:
        common &= Counter(term)

    def divided(size: Size) -> Size:
        return Size(
            tuple(
                sorted(
                    (tuple(sorted((Counter(t) - common).elements())), f // share)
                    for t, f in size.terms
                )
            )
        )

    return divided(a), divided(b)
