"""The sizes of a model that take the least time on Tensor Cores: one set that fits together.

Unknown sizes may grow; equations and what is written in each other must still hold. The time of a
product is its FLOP times what its worst aligned dimension costs. The minimum is found by eliminating
one unknown after the other, which is exact and cheap: a size meets few others in a product.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpdiag.hardware.alignment import padded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mpdiag.tensorcores.sizes.expressions import Size

Domains = dict[int, tuple[int, ...]]

_MOST_CELLS = 20_000
"""Combinations to look at for one unknown; beyond it, only the present and the largest sizes."""


@dataclass(frozen=True)
class Target:
    """A dimension that should be a multiple.

    Attributes:
        size: The dimension.
        multiple: What it should be a multiple of, all shards together.
        shards: Into how many parts it is cut; the multiple is that of a part times this.
    """

    size: Size
    multiple: int
    shards: int = 1

    def lacking(self, value: int) -> int:
        """How many times fewer values are read at once than could be: 1 where it is a multiple."""
        part = self.multiple // self.shards
        if value % self.shards:
            return part
        return part // math.gcd(part, value // self.shards)


@dataclass(frozen=True)
class Product:
    """A matrix product whose time depends on unknown sizes.

    Attributes:
        flops: At the present sizes.
        grows: Sizes that its FLOP are proportional to.
        targets: Dimensions that should be multiples.
        name: Whose it is.
    """

    flops: float
    grows: tuple[Size, ...]
    targets: tuple[Target, ...]
    name: str = ""


@dataclass(frozen=True)
class Problem:
    """What is to be solved.

    Attributes:
        values: Present values of the unknowns.
        products: All matrix products.
        equations: Pairs of sizes that must stay equal.
        slowdown: Time of a product that reads so many times fewer values at once than it could,
            as a multiple of its time when aligned.
        effort: Cost of changing a size at all, as a share of the time of all products; keeps
            what gains next to nothing as it is.
        fixed: Unknowns that must stay.
        penalty: Added to the time of a product for each of its dimensions that reads so many
            times fewer values than it could, in FLOP for each FLOP at present.
    """

    values: Mapping[int, int]
    products: Sequence[Product]
    equations: Sequence[tuple[Size, Size]] = ()
    slowdown: Callable[[int], float] = float
    effort: float = 0.0
    fixed: frozenset[int] = frozenset()
    penalty: Callable[[int], float] | None = None

    def time(self, product: Product, values: Mapping[int, int]) -> float:
        """The time of a product, in FLOP of aligned ones."""
        growth = 1.0
        for size in product.grows:
            growth *= size.value(values) / max(1, size.value(self.values))
        lacking = [t.lacking(t.size.value(values)) for t in product.targets]
        time = product.flops * growth * self.slowdown(max(lacking, default=1))
        if self.penalty is not None:
            time += product.flops * sum(map(self.penalty, lacking))
        return time

    def total(self, values: Mapping[int, int]) -> float:
        """The time of all products."""
        return sum(self.time(p, values) for p in self.products)


@dataclass
class _Factor:
    """A cost that depends on some unknowns, as a function or as a table."""

    scope: tuple[int, ...]
    cost: Callable[[Mapping[int, int]], float]


@dataclass
class _Eliminated:
    scope: tuple[int, ...]
    best: dict[tuple[int, ...], tuple[float, int]] = field(default_factory=dict)


def solve(problem: Problem) -> dict[int, int]:
    """The values of all unknowns that take the least time; never smaller than at present."""
    domains = _domains(problem)
    moving = {u for u, values in domains.items() if len(values) > 1}
    factors = [f for f in _factors(problem, moving) if f.scope]
    present = dict(problem.values)
    eliminated: list[tuple[int, _Eliminated]] = []
    left = set(moving)
    while left:
        u = min(left, key=lambda v: (_cells(v, factors, domains), v))
        mine = [f for f in factors if u in f.scope]
        scope = tuple(sorted({v for f in mine for v in f.scope} - {u}))
        _thin((u, *scope), domains)
        table = _eliminate(u, scope, mine, domains, present)
        factors = [f for f in factors if u not in f.scope]
        if scope:
            factors.append(_Factor(scope, _looked_up(table)))
        eliminated.append((u, table))
        left.discard(u)
    for u, table in reversed(eliminated):
        present[u] = table.best[tuple(present[v] for v in table.scope)][1]
    return present


def _looked_up(table: _Eliminated) -> Callable[[Mapping[int, int]], float]:
    return lambda values: table.best[tuple(values[v] for v in table.scope)][0]


def _cells(u: int, factors: Sequence[_Factor], domains: Domains) -> int:
    scope = {v for f in factors if u in f.scope for v in f.scope} | {u}
    return math.prod(len(domains[v]) for v in scope)


def _thin(scope: Sequence[int], domains: Domains) -> None:
    """Keep the present and the largest size of unknowns where there are too many combinations."""
    while math.prod(len(domains[v]) for v in scope) > _MOST_CELLS:
        widest = max(scope, key=lambda v: len(domains[v]))
        if len(domains[widest]) == 2:
            return
        domains[widest] = (domains[widest][0], domains[widest][-1])


def _eliminate(
    u: int,
    scope: tuple[int, ...],
    factors: Sequence[_Factor],
    domains: Domains,
    present: Mapping[int, int],
) -> _Eliminated:
    table = _Eliminated(scope)
    values = dict(present)
    for chosen in itertools.product(*(domains[v] for v in scope)):
        values.update(zip(scope, chosen, strict=True))
        best = (math.inf, present[u])
        for value in domains[u]:  # smallest first: of two that cost the same the smaller one
            values[u] = value
            cost = sum(f.cost(values) for f in factors)
            if cost < best[0] * (1 - 1e-12):
                best = (cost, value)
        table.best[chosen] = best
    return table


# -- what each unknown may be ----------------------------------------------------------------------


def _domains(problem: Problem) -> Domains:
    found: dict[int, set[int]] = {u: {v} for u, v in problem.values.items()}
    for product in problem.products:
        for target in product.targets:
            part = target.multiple // target.shards
            for term, factor in target.size.terms:
                for u in term:
                    if u not in problem.fixed:
                        found[u] |= set(_steps(problem.values[u], factor, part, target.shards))
    for a, b in problem.equations:
        for one, other in ((a, b), (b, a)):
            _complete(one, other, found, problem)
    return {u: tuple(sorted(values)) for u, values in found.items()}


def _steps(value: int, factor: int, part: int, shards: int) -> Iterable[int]:
    """The next sizes that make ``factor`` · size a multiple of more and more."""
    for divisor in (d for d in range(2, part + 1) if part % d == 0):
        wanted = divisor * shards
        yield padded(value, wanted // math.gcd(wanted, factor))
        yield padded(value, wanted)
    if shards > 1:
        yield padded(value, shards)


def _complete(one: Size, other: Size, found: dict[int, set[int]], problem: Problem) -> None:
    """Values of an unknown that an equation gives where the other side has grown."""
    if other.unknowns & one.unknowns:
        return
    rest = sorted(other.unknowns)
    for term, factor in one.terms:
        if len(term) != 1 or term[0] in problem.fixed:
            continue
        u, others = term[0], sorted(one.unknowns - {term[0]})
        scope = [*rest, *others]
        if math.prod(len(found[v]) for v in scope) > 4096:
            continue
        for chosen in itertools.product(*(sorted(found[v]) for v in scope)):
            values = {**problem.values, **dict(zip(scope, chosen, strict=True)), u: 0}
            value, odd = divmod(other.value(values) - one.value(values), factor)
            if not odd and value >= problem.values[u]:
                found[u].add(value)


# -- what it costs ---------------------------------------------------------------------------------


def _factors(problem: Problem, moving: set[int]) -> Iterable[_Factor]:
    whole = problem.total(problem.values) or 1.0
    for product in problem.products:
        sizes = (*product.grows, *(t.size for t in product.targets))
        scope = frozenset().union(*(s.unknowns for s in sizes)) & moving

        def cost(values: Mapping[int, int], p: Product = product) -> float:
            return problem.time(p, values)

        yield _Factor(tuple(sorted(scope)), cost)
    for a, b in problem.equations:

        def hard(values: Mapping[int, int], a: Size = a, b: Size = b) -> float:
            return 0.0 if a.value(values) == b.value(values) else math.inf

        yield _Factor(tuple(sorted((a.unknowns | b.unknowns) & moving)), hard)
    for u in moving:

        def effort(values: Mapping[int, int], u: int = u) -> float:
            grown = values[u] / problem.values[u] - 1
            return whole * (problem.effort * (grown > 0) + 1e-9 * grown)

        yield _Factor((u,), effort)
