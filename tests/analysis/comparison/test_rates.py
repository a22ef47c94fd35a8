"""How often two sides diverge: the exact test against SciPy, by enumeration and by simulation."""

import math
import random
from itertools import product

import pytest

from mpdiag.analysis.comparison.rates import (
    compare_rates,
    rates_p_value,
    seeds_to_show,
)

TABLES = [(0, 3, 3, 3), (1, 3, 2, 3), (0, 5, 3, 4), (2, 10, 8, 10), (1, 8, 5, 12), (3, 3, 3, 3)]


@pytest.mark.parametrize("table", TABLES)
def test_the_p_value_is_scipys(table):
    stats = pytest.importorskip("scipy.stats")
    a, n, b, m = table
    expected = stats.boschloo_exact([[a, b], [n - a, m - b]], n=64).pvalue
    assert rates_p_value(a, n, b, m) == pytest.approx(min(1.0, expected), rel=1e-6)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (4, 7), (10, 10)])
@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.5])
def test_equal_rates_are_called_different_in_at_most_five_cases_of_a_hundred(n, m, rate):
    wrong = sum(
        math.comb(n, a)
        * math.comb(m, b)
        * rate ** (a + b)
        * (1 - rate) ** (n + m - a - b)
        * (rates_p_value(a, n, b, m) <= 0.05)
        for a, b in product(range(n + 1), range(m + 1))
    )
    assert wrong <= 0.05


def test_many_seeds_are_compared_as_well():
    assert compare_rates((3, 30), (150, 150)).verdict == "different"
    assert compare_rates((30, 30), (150, 150)).p_value == 1.0


@pytest.mark.parametrize(("low", "high"), [(0.0, 2 / 3), (0.1, 0.8)])
def test_the_number_of_seeds_decides_four_times_out_of_five(low, high):
    seeds = seeds_to_show(low, high)
    draw, rounds = random.Random(0), 400
    hits = 0
    for _ in range(rounds):
        a, b = (sum(draw.random() < rate for _ in range(seeds)) for rate in (low, high))
        hits += rates_p_value(a, seeds, b, seeds) <= 0.05
    assert 0.74 <= hits / rounds <= 0.97


def test_no_number_of_seeds_shows_equal_rates_to_be_different():
    assert seeds_to_show(0.1, 0.1) is None
    assert seeds_to_show(0.1, 0.11) is None
    assert compare_rates((1, 1), (10, 10)).seeds_to_decide is None
