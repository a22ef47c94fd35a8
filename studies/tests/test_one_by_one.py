"""The plain way that the search for the smallest set is compared with."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def take_away_one_by_one(root):
    path = root / "studies" / "one_by_one.py"
    spec = importlib.util.spec_from_file_location("one_by_one", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.take_away_one_by_one


@st.composite
def plantings(draw):
    """Ranked candidates, and the sets of which a good subset contains one."""
    n = draw(st.integers(1, 40))
    ranked = draw(st.permutations(range(n)))
    sets = draw(st.lists(st.frozensets(st.integers(0, n - 1), max_size=5), min_size=1, max_size=3))
    return ranked, sets


@given(plantings())
def test_it_finds_a_smallest_set_and_asks_once_for_each_candidate(take_away_one_by_one, planting):
    ranked, sets = planting
    asked = []

    def good(subset):
        asked.append(subset)
        return any(planted <= subset for planted in sets)

    found = take_away_one_by_one(ranked, good)
    assert len(asked) == len(ranked) + 1
    assert good(found)
    assert not any(good(found - {item}) for item in found)
