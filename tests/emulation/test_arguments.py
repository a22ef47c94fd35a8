"""Arguments as a flat list and back, against PyTorch's general trees."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from mpdiag.emulation.arguments import flattened, hashable, items, joined

_LEAF = st.none() | st.integers() | st.booleans() | st.text(max_size=2)
_VALUE = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=1), inner)
)
_ARGUMENTS = st.tuples(
    st.lists(_VALUE, max_size=4).map(tuple), st.dictionaries(st.text(max_size=2), _VALUE)
)


@given(_ARGUMENTS)
def test_arguments_come_back_as_they_were(given_: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = given_
    leaves, form = flattened(args, kwargs)

    assert leaves == tree_leaves((args, kwargs))
    assert joined(leaves, form) == (args, kwargs)
    hash(hashable(form))


@given(_ARGUMENTS, _ARGUMENTS)
def test_forms_are_equal_only_where_arguments_have_the_same_shape(
    one: tuple[tuple[Any, ...], dict[str, Any]], other: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    (leaves, form), (_, another) = flattened(*one), flattened(*other)
    if hashable(form) == hashable(another):
        assert joined(leaves, another) == one


@given(_VALUE)
def test_items_are_the_leaves(value: Any) -> None:
    assert items(value) == tree_leaves(value)
