"""What each size of a model should be: the next multiple, if that pays, and what it costs and gains."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mpdiag.analysis.shapes.recorded import SizedModel
from mpdiag.analysis.shapes.rules import Product
from mpdiag.analysis.shapes.sizes import CLASSES, Size
from mpdiag.hardware.alignment import multiple_for, padded

EFFORT = 0.001
"""Share of a model's matrix time that a change must save at least."""

TILE = 64
"""Columns that the smallest tile of a product computes at once: padding fewer classes saves nothing."""

_SLOWDOWN = {1: 1.0, 2: 2.0, 4: 2.5, 8: 3.0}
_NOT_AT_ALL = 3.5

_SWEEPS = 4
"""How often all sizes are looked at again: whether one pays depends on those it meets in products."""


@dataclass(frozen=True)
class Wanted:
    """What the sizes are solved for.

    Attributes:
        target: The format to train in.
        generation: Of the GPU; None for the rule that holds for all.
        shards: Into how many parts tensor parallelism cuts weights.
        worthwhile: Only what is expected to gain more than it costs; else every size that can be
            a multiple becomes one.
    """

    target: str
    generation: str | None = None
    shards: int = 1
    worthwhile: bool = True

    @property
    def multiple(self) -> int:
        """What sizes should be multiples of, in each shard."""
        return multiple_for(self.target, self.generation)

    def parts(self, product: Product) -> int:
        """Into how many parts the sizes of a product are cut."""
        return self.shards if product.weight else 1

    def lacking(self, value: int, parts: int) -> int:
        """How many times fewer values are read at once than could be: 1 where it is a multiple."""
        if value % parts:
            return self.multiple
        return self.multiple // math.gcd(self.multiple, value // parts)

    def slowdown(self, lacking: int) -> float:
        """The assumed time of a product, as a multiple of its time when aligned.

        Args:
            lacking: How many times fewer values are read at once than could be.

        Cautious figures: kernels that read one value at a time ran at a tenth of the rate of
        aligned ones in an H100 trace; less than half of that loss is counted. Formats of eight
        bits and blocks do not run at all where sizes are not multiples.
        """
        if self.target not in ("fp16", "bf16", "fp32", "tf32"):
            return 1.0 if lacking == 1 else _NOT_AT_ALL
        return _SLOWDOWN.get(lacking, _SLOWDOWN[8])


@dataclass(frozen=True)
class Solved:
    """A model's sizes after solving.

    Attributes:
        model, wanted: What was solved.
        products: The matrix products, in classes that are not written in others.
        values: The new value of every class.
    """

    model: SizedModel
    wanted: Wanted
    products: Sequence[Product]
    values: list[int]

    def old(self, size: Size) -> int:
        """A size at present."""
        return self.model.sizes.value(size)

    def new(self, size: Size) -> int:
        """A size as it should be."""
        return self.model.sizes.resolve(size).value(self.values)

    def growth(self, product: Product, values: list[int]) -> float:
        """How many times the present FLOP of a product these values need."""
        return math.prod(s.value(values) / max(1, self.old(s)) for s in product.grows)

    def time(self, product: Product, values: list[int]) -> float:
        """The expected time of a product, in FLOP of aligned ones."""
        parts = self.wanted.parts(product)
        lacking = [self.wanted.lacking(s.value(values), parts) for s in product.aligned]
        slowdown = self.wanted.slowdown(max(lacking, default=1))
        return product.flops * self.growth(product, values) * slowdown

    @cached_property
    def present_time(self) -> float:
        """The expected time of all products with the present sizes."""
        return sum(self.time(p, self.model.sizes.values) for p in self.products)

    @cached_property
    def cost(self) -> float:
        """Matrix work that all changes together add, as a share of the present work."""
        before = sum(p.flops for p in self.products)
        after = sum(p.flops * self.growth(p, self.values) for p in self.products)
        return after / before - 1 if before else 0.0

    @cached_property
    def expected_time(self) -> float:
        """The expected matrix time after all changes, as a share of the time before."""
        after = sum(self.time(p, self.values) for p in self.products)
        return after / self.present_time if self.present_time else 1.0

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """Each module's share of all matrix work."""
        total = sum(p.flops for p in self.products) or 1.0
        found: dict[str, float] = defaultdict(float)
        for product in self.products:
            found[product.module] += product.flops / total
        return found

    @cached_property
    def misaligned(self) -> Sequence[tuple[str, Size]]:
        """The dimensions of products that are no multiples after solving, with their module."""
        found: dict[tuple[str, int], Size] = {}
        for product in self.products:
            for size in product.aligned:
                value = size.value(self.values)
                if value > 1 and self.wanted.lacking(value, self.wanted.parts(product)) > 1:
                    found.setdefault((product.module, value), size)
        return [(module, size) for (module, _), size in found.items()]


def solve_sizes(model: SizedModel, wanted: Wanted) -> Solved:
    """Round each class up to the multiple that aligns every product with it, where that pays."""
    resolve = model.sizes.resolve
    products = [
        replace(p, grows=tuple(map(resolve, p.grows)), aligned=tuple(map(resolve, p.aligned)))
        for p in model.products
    ]
    # What no size of the model shows cannot be advised, and so must not change.
    shown = frozenset().union(*(resolve(d.size).classes for d in model.dimensions))
    few = {
        c
        for c, n in enumerate(model.sizes.values)
        if wanted.worthwhile and n < TILE and CLASSES in model.sizes.notes[c]
    }
    multiples: dict[int, int] = {}
    for product in products:
        multiple = wanted.multiple * wanted.parts(product)
        for term, factor in (t for size in product.aligned for t in size.terms):
            for c in shown.intersection(term) - few:
                needed = multiple // math.gcd(multiple, factor)
                multiples[c] = math.lcm(multiples.get(c, 1), needed)
    present = model.sizes.values
    values = [padded(n, multiples.get(c, 1)) for c, n in enumerate(present)]
    solved = Solved(model, wanted, products, values)
    if not wanted.worthwhile:
        return solved
    # Two sizes of a product may pay together and neither alone, or neither together: hence two starts.
    tried = [_descend(solved, multiples, start) for start in (present, values)]
    return min(tried, key=lambda s: s.expected_time)


def _descend(solved: Solved, multiples: Mapping[int, int], start: Sequence[int]) -> Solved:
    """Give each class in turn the multiple, or its present size, that takes the least time."""
    present, values = solved.model.sizes.values, list(start)
    heads = _head_sizes(solved)
    meeting: dict[int, list[Product]] = defaultdict(list)
    for product in solved.products:
        for c in frozenset().union(*(s.classes for s in (*product.grows, *product.aligned))):
            meeting[c].append(product)
    for _ in range(_SWEEPS):
        before = list(values)
        for c, multiple in multiples.items():
            divisors = [d for d in range(1, multiple + 1) if multiple % d == 0]
            if c in heads:
                divisors = [1, multiple]
            times = {}
            for value in sorted({padded(present[c], d) for d in divisors}):
                values[c] = value
                effort = EFFORT * solved.present_time if value > present[c] else 0.0
                times[value] = sum(solved.time(p, values) for p in meeting[c]) + effort
            best = min(times.values()) * (1 + 1e-12)
            values[c] = next(value for value, time in times.items() if time <= best)
        if values == before:
            break
    return replace(solved, values=values)


def _head_sizes(solved: Solved) -> frozenset[int]:
    """The classes that are sizes of heads: attention pads any that is no whole multiple."""
    resolve = solved.model.sizes.resolve
    of_modules = (resolve(d.size).classes for d in solved.model.dimensions if d.parts == "heads")
    of_products = (s.classes for p in solved.products if p.heads for s in p.aligned)
    return frozenset().union(*of_modules, *of_products)
