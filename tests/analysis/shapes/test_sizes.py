"""Equal sizes written in each other, and the dimensions of views in their tensors."""

from __future__ import annotations

import pytest

from mpdiag.analysis.shapes.sizes import Sizes, number
from mpdiag.analysis.shapes.tensors import Part, dense_strides, layout


@pytest.mark.parametrize(
    ("factors", "values"), [((1, 1), (3, 4)), ((3, 2), (10, 15)), ((2, 1), (6, 12))]
)
def test_what_cannot_be_written_in_the_other_is_fixed(factors, values):
    u = Sizes()
    a, b = map(u.new, values)
    u.equate(number(factors[0]) * a, number(factors[1]) * b)
    tied = factors == (2, 1)
    assert (u.resolve(a), u.resolve(b)) == (
        (a, number(2) * a) if tied else tuple(map(number, values))
    )
    u.equate(number(2) * a, number(12) if values[0] == 6 else number(2 * values[0]))
    assert u.resolve(a) == number(values[0])


@pytest.mark.parametrize(
    ("base", "view", "strides", "offset", "parts"),
    [
        # Keys of a packed projection [2, 5, 3 · 4 · 8] seen as [2, 4, 5, 8] begin after the queries.
        ((2, 5, 96), (2, 4, 5, 8), (480, 8, 96, 1), 32,
         [(Part(0, 1, 2),), (Part(2, 8, 4),), (Part(1, 1, 5),), (Part(2, 1, 8),)]),
        ((4, 6, 10), (24, 10), (10, 1), 0, [(Part(0, 1, 4), Part(1, 1, 6)), (Part(2, 1, 10),)]),
        # [T, B, E] seen as [T, B · heads, head], as MultiheadAttention does.
        ((5, 3, 12), (5, 6, 6), (36, 6, 1), 0,
         [(Part(0, 1, 5),), (Part(1, 1, 3), Part(2, 6, 2)), (Part(2, 1, 6),)]),
        ((6, 10), (10, 6), (1, 10), 0, [(Part(1, 1, 10),), (Part(0, 1, 6),)]),
        ((6, 10), (3, 6, 10), (0, 10, 1), 0, [(), (Part(0, 1, 6),), (Part(1, 1, 10),)]),
        ((6, 10), (7, 7), (9, 1), 0, None),
    ],
)  # fmt: skip
def test_the_dimensions_of_views(base, view, strides, offset, parts):
    found = layout((base, dense_strides(base)), (view, strides), offset)
    assert (found and found[0]) == parts
    if offset:
        assert found[1] == [0, 0, 32]
