"""The dimensions of views in their tensors, from strides."""

from __future__ import annotations

from mpdiag.tensorcores.sizes.views import Part, dense_strides, layout


def of(base, view, strides, offset=0):
    return layout((base, dense_strides(base)), (view, strides), offset)


def test_queries_of_a_packed_projection():
    # [2, 5, 3 · 4 · 8] seen as [2, 4, 5, 8]: the keys begin after the queries.
    found = of((2, 5, 96), (2, 4, 5, 8), (480, 8, 96, 1), 32)
    assert found.parts == (
        (Part(0, 1, 2),), (Part(2, 8, 4),), (Part(1, 1, 5),), (Part(2, 1, 8),),
    )  # fmt: skip
    assert found.offsets == (0, 0, 32)


def test_merged_dimensions():
    found = of((4, 6, 10), (24, 10), (10, 1))
    assert found.parts == ((Part(0, 1, 4), Part(1, 1, 6)), (Part(2, 1, 10),))


def test_batch_and_heads_in_one():
    # [T, B, E] seen as [T, B · heads, head], as MultiheadAttention does.
    found = of((5, 3, 12), (5, 6, 6), (36, 6, 1))
    assert found.parts[1] == (Part(1, 1, 3), Part(2, 6, 2))


def test_expanded_and_transposed():
    assert of((6, 10), (10, 6), (1, 10)).parts == ((Part(1, 1, 10),), (Part(0, 1, 6),))
    assert of((6, 10), (3, 6, 10), (0, 10, 1)).parts[0] == ()


def test_what_fits_nowhere():
    assert of((6, 10), (7, 7), (9, 1)) is None
