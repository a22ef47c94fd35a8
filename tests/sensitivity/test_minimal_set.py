"""Planted minimal sets are found, and cheaply."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from mpdiag.sensitivity.fp32_search import find_smallest


class Planted:
    """Good is what contains one of the planted sets."""

    def __init__(self, *sets):
        self.sets = [frozenset(s) for s in sets]
        self.asked = []

    def __call__(self, subset):
        self.asked.append(subset)
        return any(s <= subset for s in self.sets)


@st.composite
def plantings(draw):
    n = draw(st.integers(1, 40))
    ranked = draw(st.permutations(range(n)))
    sets = draw(st.lists(st.sets(st.integers(0, n - 1), max_size=5), min_size=1, max_size=3))
    return ranked, sets


@given(plantings())
def test_nothing_can_be_taken_away_from_what_is_found(planting):
    ranked, sets = planting
    good = Planted(*sets)
    better = []
    found = find_smallest(ranked, good, better.append)
    assert found is not None
    assert good(found)
    assert not any(good(found - {item}) for item in found)
    assert all(good(b) for b in better)
    assert better[-1] == found


@given(plantings())
def test_few_questions_are_asked(planting):
    ranked, sets = planting
    good = Planted(*sets[:1])
    found = find_smallest(ranked, good)
    assert found == frozenset(sets[0])
    each = 2 * math.log2(len(ranked) + 1) + 2
    assert len(set(good.asked)) <= (len(found) + 1) * each + len(found)


@given(st.integers(1, 6), st.integers(8, 200))
def test_a_good_ranking_makes_it_cheap(needed, n):
    good = Planted(range(needed))
    assert find_smallest(range(n), good) == frozenset(range(needed))
    assert len(set(good.asked)) <= needed * (needed + 4)  # however many candidates


def test_none_and_impossible():
    good = Planted(())
    assert find_smallest(range(9), good) == frozenset()
    assert good.asked == [frozenset()]
    assert find_smallest(range(9), Planted({99})) is None
    assert find_smallest([], Planted({1})) is None
    assert find_smallest([], Planted(())) == frozenset()


def test_more_that_hurts_does_not_stay():
    """Not everything is monotone: 3 hurts unless 7 is there as well."""

    def good(subset):
        return 5 in subset and (3 not in subset or 7 in subset)

    found = find_smallest([3, 7, 5, 1], good)
    assert found == frozenset({5})
