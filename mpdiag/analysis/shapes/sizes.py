"""Sizes of a model in classes: what is equal is one class, the rest is written in classes.

A size is a sum of products such as ``3 · heads · head`` or ``left + right``. ``equate`` ties two
sizes: one class is written in others, as in a union-find. What cannot be written so is fixed, and
then nothing is advised there.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Term = tuple[int, ...]

# What is known of a class: where it comes from, and what uses it.
DATA = "data"
MADE = "made by the script"
COMPUTED = "split by the script"
SOFTMAX = "softmax"
CLASSES = "classes"
BATCH_NORM = "batch norm"
NORM = "norm over it"
REDUCED = "reduced"
TRANSPOSED = "transposed convolution"
KEYS = "keys"

FEW_CHANNELS = 4
"""cuDNN has special kernels for images: up to four channels are padded to four."""


@dataclass(frozen=True)
class Size:
    """A size as a sum of products of classes.

    Attributes:
        terms: Products of classes (sorted, repeated where squared; () for a plain number) with
            their factors; none has the factor 0.
    """

    terms: tuple[tuple[Term, int], ...] = ()

    def __add__(self, other: "Size") -> "Size":
        """The size of a concatenation."""
        return _size([*self.terms, *other.terms])

    def __mul__(self, other: "Size") -> "Size":
        """The size of two dimensions that were merged."""
        return _size((tuple(sorted(a + b)), x * y) for a, x in self.terms for b, y in other.terms)

    @property
    def classes(self) -> frozenset[int]:
        """Those that it depends on."""
        return frozenset(c for term, _ in self.terms for c in term)

    @property
    def single(self) -> int | None:
        """The class that it is; None where it is anything else."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    def value(self, values: list[int]) -> int:
        """Its number, given that of each class."""
        return sum(f * math.prod(values[c] for c in term) for term, f in self.terms)


def number(value: int) -> Size:
    """A size that never changes."""
    return _size([((), value)])


def product_of(sizes: Iterable[Size]) -> Size:
    """All of them multiplied."""
    return math.prod(sizes, start=number(1))


def _size(terms: Iterable[tuple[Term, int]]) -> Size:
    total: dict[Term, int] = {}
    for term, factor in terms:
        total[term] = total.get(term, 0) + factor
    return Size(tuple(sorted((t, f) for t, f in total.items() if f)))


@dataclass
class Sizes:
    """The classes of a model: the present value of each, and words about it."""

    values: list[int] = field(default_factory=list)
    notes: list[set[str]] = field(default_factory=list)
    _written: dict[int, Size] = field(default_factory=dict)

    def new(self, value: int, *notes: str) -> Size:
        """A class of which only the present value is known; sizes 0 and 1 are plain numbers."""
        if value <= 1:
            return number(value)
        self.values.append(value)
        self.notes.append(set(notes))
        return _of_class(len(self.values) - 1)

    def value(self, size: Size) -> int:
        """Its present value."""
        return size.value(self.values)

    def resolve(self, size: Size) -> Size:
        """A size in classes that are not written in others."""
        if not any(c in self._written for c in size.classes):
            return size
        total = Size()
        for term, factor in size.terms:
            total = total + product_of([number(factor), *map(self._find, term)])
        return total

    def _find(self, c: int) -> Size:
        path = []
        size = _of_class(c)
        while (single := size.single) is not None and single in self._written:
            path.append(single)
            size = self._written[single]
        if size.single is None:
            size = self.resolve(size)
        for passed in path:
            self._written[passed] = size
        return size

    def note(self, size: Size, *notes: str) -> None:
        """Add words to the classes of a size."""
        for c in self.resolve(size).classes:
            self.notes[c].update(notes)

    def notes_of(self, size: Size) -> frozenset[str]:
        """The words about all classes of a size."""
        return frozenset().union(*(self.notes[c] for c in self.resolve(size).classes))

    def fix(self, *sizes: Size) -> None:
        """Nothing of these sizes may change."""
        for size in sizes:
            for c in self.resolve(size).classes:
                self._written[c] = number(self.values[c])

    def equate(self, a: Size, b: Size) -> None:
        """Two sizes are one; where they are not, or no class can be written so, both are fixed."""
        a, b = self.resolve(a), self.resolve(b)
        if a == b:
            return
        if self.value(a) == self.value(b):
            one, other = _cancelled(a, b)
            one, other = sorted((one, other), key=_age, reverse=True)  # the younger in the older
            c = one.single
            if c is not None and c not in other.classes:
                self._written[c] = other
                self.note(other, *self.notes[c])
                return
        self.fix(a, b)

    def part(self, size: Size, count: int) -> Size:
        """One of the equal parts that a size is made of."""
        size = self.resolve(size)
        if any(factor % count for _, factor in size.terms):
            part = self.new(self.value(size) // count)
            self.equate(size, number(count) * part)
            return part
        return Size(tuple((term, factor // count) for term, factor in size.terms))


def _age(size: Size) -> int:
    return -1 if size.single is None else size.single


def _of_class(c: int) -> Size:
    return Size((((c,), 1),))


def _cancelled(a: Size, b: Size) -> tuple[Size, Size]:
    """Both without the terms, the factor and the classes that they share: 3·a = 3·b·c is a = b·c."""
    terms = (a + b * number(-1)).terms
    share = math.gcd(*(f for _, f in terms))
    common = Counter(terms[0][0])
    for term, _ in terms[1:]:
        common &= Counter(term)

    def side(sign: int) -> Size:
        return _size(
            (tuple(sorted((Counter(term) - common).elements())), sign * factor // share)
            for term, factor in terms
            if sign * factor > 0
        )

    return side(1), side(-1)
