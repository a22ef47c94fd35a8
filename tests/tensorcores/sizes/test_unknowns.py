"""Equal sizes written in each other."""

from __future__ import annotations

from mpdiag.tensorcores.sizes.expressions import number
from mpdiag.tensorcores.sizes.unknowns import Unknowns


def test_factors_that_both_have_are_cancelled():
    u = Unknowns()
    a, b = u.new(12), u.new(6)
    assert u.equate(number(3) * a, number(6) * b)
    assert u.resolve(a) == number(2) * b


def test_common_parts():
    u = Unknowns()
    a, b = u.new(10), u.new(15)
    assert u.equate(number(3) * a, number(2) * b)
    (part,) = u.resolve(a).unknowns
    assert u.values[part] == 5
    assert u.value(u.resolve(a)) == 10
    assert u.value(u.resolve(b)) == 15


def test_a_concatenation():
    u = Unknowns()
    whole, left, right = u.new(30), u.new(12), u.new(18)
    assert u.equate(whole, left + right)
    assert u.resolve(whole) == left + right
    assert u.equate(whole, left + right)
    assert not u.equations


def test_different_sizes_are_not_equal():
    u = Unknowns()
    a, b = u.new(3), u.new(4)
    assert not u.equate(a, b)
    assert u.refused


def test_what_equals_a_number_is_fixed():
    u = Unknowns()
    a = u.new(6)
    assert u.equate(number(2) * a, number(12))
    assert u.resolve(a) == number(6)
