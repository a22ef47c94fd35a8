"""The sizes of a model solved together: what each should be, and what that costs and gains."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdiag.hardware.alignment import multiple_for
from mpdiag.tensorcores.sizes.solver import Problem, Product, Target, solve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpdiag.analysis.shapes.model_sizes import ModelSize
    from mpdiag.analysis.shapes.rules import SizedProduct
    from mpdiag.tensorcores.sizes.expressions import Size
    from mpdiag.tensorcores.sizes.unknowns import Unknowns

EFFORT = 0.001
"""Share of a model's matrix time that a change must save at least."""

_SLOWDOWN = {1: 1.0, 2: 2.0, 4: 2.5, 8: 3.0}
_NOT_AT_ALL = 3.5


@dataclass(frozen=True)
class SizedModel:
    """A model with its sizes in unknowns.

    Attributes:
        unknowns: Their present values, equations and notes.
        sizes: Those that a user can change.
        products: The matrix products of a training step.
        proved: Whether equal sizes were followed through the recorded operations; else sizes of
            the same number are taken to be the same.
    """

    unknowns: Unknowns
    sizes: tuple[ModelSize, ...]
    products: tuple[SizedProduct, ...]
    proved: bool


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

    def slowdown(self, lacking: int) -> float:
        """The assumed time of a product, as a multiple of its time when aligned.

        Args:
            lacking: How many times fewer values are read at once than could be.

        Cautious figures: kernels that read one value at a time ran at a tenth of the rate of
        aligned ones in an H100 trace; less than half of that loss is counted. Formats of eight
        bits and blocks do not run at all where sizes are not multiples.
        """
        if not self.worthwhile:
            return 1.0
        if self.target not in ("fp16", "bf16", "fp32", "tf32"):
            return 1.0 if lacking == 1 else _NOT_AT_ALL
        return _SLOWDOWN.get(lacking, _SLOWDOWN[8])


@dataclass(frozen=True)
class Solved:
    """A model's sizes after solving.

    Attributes:
        model, wanted: What was solved.
        problem: As the solver saw it.
        values: The new value of every unknown.
    """

    model: SizedModel
    wanted: Wanted
    problem: Problem
    values: Mapping[int, int]

    def old(self, size: Size) -> int:
        """A size at present."""
        return self.model.unknowns.value(size)

    def new(self, size: Size) -> int:
        """A size as it should be."""
        return self.model.unknowns.resolve(size).value(self.values)

    @property
    def cost(self) -> float:
        """Matrix work that all changes together add, as a share of the present work."""
        before = sum(p.flops for p in self.problem.products)
        after = 0.0
        for p in self.problem.products:
            growth = math.prod(
                s.value(self.values) / max(1, s.value(self.problem.values)) for s in p.grows
            )
            after += p.flops * growth
        return after / before - 1 if before else 0.0

    @property
    def expected_time(self) -> float:
        """The expected matrix time after all changes, as a share of the time before."""
        before = self.problem.total(self.problem.values)
        return self.problem.total(self.values) / before if before else 1.0

    def shares(self) -> dict[str, float]:
        """Each module's share of all matrix work."""
        whole = sum(p.flops for p in self.model.products) or 1.0
        found: dict[str, float] = defaultdict(float)
        for product in self.model.products:
            found[product.module] += product.flops / whole
        return dict(found)

    def why_left(self, size: Size) -> str:
        """Why a size that is no multiple stays as it is."""
        resolved = self.model.unknowns.resolve(size)
        if not resolved.unknowns:
            return "other sizes of the script fix it"
        return "padding would cost more work than it is expected to save, or nearly as much"


def solve_sizes(model: SizedModel, wanted: Wanted) -> Solved:
    """The set of sizes that takes the least matrix time."""
    unknowns = model.unknowns
    shards = wanted.shards

    def target(size: Size, *, weight: bool) -> Target:
        cut = shards if weight else 1
        return Target(unknowns.resolve(size), wanted.multiple * cut, cut)

    products = [
        Product(
            p.flops,
            tuple(r for r in (unknowns.resolve(s) for s in p.grows) if r.unknowns),
            tuple(target(s, weight=p.weight) for _, s in p.aligned),
            p.module,
        )
        for p in model.products
    ]
    # What no size of the model shows cannot be advised, and so must not change.
    shown = frozenset().union(*(unknowns.resolve(s.size).unknowns for s in model.sizes))
    equations = tuple(unknowns.remaining())
    problem = Problem(
        dict(enumerate(unknowns.values)),
        products,
        equations,
        wanted.slowdown,
        EFFORT if wanted.worthwhile else 0.0,
        fixed=frozenset(range(len(unknowns.values))) - shown,
        penalty=None if wanted.worthwhile else lambda lacking: 1e3 * math.log2(lacking),
    )
    return Solved(model, wanted, problem, solve(problem))


def misaligned(solved: Solved) -> Sequence[tuple[str, Size]]:
    """The dimensions of products that are no multiples after solving, with their module."""
    found: dict[tuple[str, int], Size] = {}
    for product in solved.problem.products:
        for target in product.targets:
            value = target.size.value(solved.values)
            if value > 1 and target.lacking(value) > 1:
                found.setdefault((product.name, value), target.size)
    return [(name, size) for (name, _), size in found.items()]
