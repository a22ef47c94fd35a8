"""Groups of operations are rounded at once, until those that do harm stand alone."""

import math

import pytest

from mpdiag.emulation.step_effects import by_groups
from mpdiag.emulation.step_tape import BREAKS, Effect

SITES = [("layer", f"op{i}") for i in range(64)]


class Rounded:
    """Errors of single sites add up as random ones do."""

    def __init__(self, errors, background=0.001):
        self.errors, self.background = errors, background
        self.runs = 0

    def __call__(self, group):
        self.runs += 1
        each = [self.errors.get(SITES.index(s), self.background) for s in group]
        total = math.hypot(*each)
        return Effect(total, total) if math.isfinite(total) else BREAKS


def always():
    return True


def test_what_does_no_harm_together_is_looked_at_once():
    rounded = Rounded({})
    found = by_groups(SITES, rounded, always)
    assert rounded.runs == 1
    assert list(found) == SITES
    assert all(0.001 < e.gradient_error < 0.1 for e in found.values())  # not below their own
    assert by_groups([], Rounded({}), always) == {}


@pytest.mark.parametrize("at", [0, 37, 63])
def test_what_does_harm_gets_its_own_figures(at):
    rounded = Rounded({at: 0.7})
    found = by_groups(SITES, rounded, always)
    assert found[SITES[at]] == Effect(0.7, 0.7)
    assert all(e.gradient_error < 0.1 for s, e in found.items() if s != SITES[at])
    assert len(found) == 64
    assert rounded.runs <= 13  # and not 64


def test_all_that_do_harm_are_found():
    harmful = {3: 0.4, 4: math.inf, 40: 2.0}
    found = by_groups(SITES, Rounded(harmful), always)
    assert {SITES.index(s) for s, e in found.items() if e.gradient_error >= 0.1} == set(harmful)
    assert found[SITES[4]] == BREAKS


@pytest.mark.parametrize(("first", "found_at", "left"), [(0, 40, 3), (8, 3, 40)])
def test_those_that_change_most_come_first_but_after_products(first, found_at, left):
    rounded = Rounded({3: 0.4, 40: 2.0})
    found = by_groups(SITES, rounded, lambda: rounded.runs < 12, first=first)
    assert SITES[found_at] in found
    assert SITES[left] not in found


def test_a_group_that_cannot_run_is_divided():
    rounded = Rounded({})

    def effect(group):
        return None if SITES[5] in group else rounded(group)

    found = by_groups(SITES, effect, always)
    assert set(SITES) - set(found) == {SITES[5]}


class Quiet(Rounded):
    """Changes of the loss add up whole; those of the gradients stay below what is looked at."""

    def __call__(self, group):
        self.runs += 1
        return Effect(0.01, sum(self.errors.get(SITES.index(s), 0.0) for s in group))


def test_what_moves_the_loss_stands_alone_where_that_is_asked_for():
    found = by_groups(SITES, Quiet({37: 0.7}), always, quiet=0.1)
    assert {s: e.loss_change for s, e in found.items() if e.loss_change} == {SITES[37]: 0.7}
    assert len(found) == 64
    assert {e.loss_change for e in by_groups(SITES, Quiet({37: 0.7}), always).values()} == {0.7}


def test_what_only_moves_the_loss_keeps_its_groups_figures_where_time_is_up():
    rounded = Quiet({3: 0.2, 40: 0.7})
    found = by_groups(SITES, rounded, lambda: rounded.runs < 3, quiet=0.1)
    assert set(found) == set(SITES)
    assert found[SITES[3]].loss_change >= 0.2
    assert found[SITES[40]].loss_change >= 0.7
