"""Sizes solved together, against cases worked out by hand and against trying everything."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mpdiag.tensorcores.sizes.expressions import number
from mpdiag.tensorcores.sizes.solver import Problem, Product, Target, solve
from mpdiag.tensorcores.sizes.unknowns import Unknowns

SLOW = {1: 1.0, 2: 2.0, 4: 2.5, 8: 3.0}.__getitem__


def problem(unknowns, *products, multiple=8, **more):
    """A product for each tuple of sizes, FLOP as many as the first number."""
    made = [Product(f, sizes, tuple(Target(s, multiple) for s in sizes)) for f, *sizes in products]
    made = [Product(p.flops, tuple(p.grows), p.targets) for p in made]
    return Problem(dict(enumerate(unknowns.values)), made, **({"slowdown": SLOW} | more))


def test_three_groups_of_twelve():
    u = Unknowns()
    channels, part = u.new(36), u.new(12)
    u.equate(channels, number(3) * part)
    part = u.resolve(part)
    found = solve(problem(u, (100.0, part, part)))
    assert u.resolve(channels).value(found) == 48


def test_what_grows_too_much_stays():
    u = Unknowns()
    images = u.new(3)
    assert images.value(solve(problem(u, (1.0, images)))) == 4  # not 8: that is +167 %
    u = Unknowns()
    words = u.new(519)
    assert words.value(solve(problem(u, (1.0, words)))) == 520


def test_an_equation_holds():
    u = Unknowns()
    left, right, head = u.new(10), u.new(14), u.new(12)
    u.equate(left + right, number(2) * head)
    assert u.equations
    tried = problem(u, (1.0, left), (1.0, right), (1.0, head), equations=tuple(u.remaining()))
    found = solve(tried)
    assert left.value(found) + right.value(found) == 2 * head.value(found)
    assert [s.value(found) for s in (left, right, head)] == [16, 16, 16]


def test_shards_each_get_a_multiple():
    u = Unknowns()
    size = u.new(100)
    product = Product(1.0, (size,), (Target(size, 4 * 16, 4),))
    found = solve(Problem({0: 100}, [product], slowdown=lambda n: 1.0 if n == 1 else 3.5))
    assert size.value(found) == 128


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(2, 40), min_size=2, max_size=3),
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5
    ),
)
def test_nothing_is_better(values, pairs):
    u = Unknowns()
    sizes = [u.new(v) for v in values]
    products = [(float(f), sizes[a % len(sizes)], sizes[b % len(sizes)]) for f, a, b in pairs]
    tried = problem(u, *products)
    found = solve(tried)
    domains = [range(v, v + 8) for v in values]
    best = min(tried.total(dict(enumerate(x))) for x in itertools.product(*domains))
    assert tried.total(found) <= best * (1 + 1e-6)
