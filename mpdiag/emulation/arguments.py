"""An operation's arguments and results as a flat list, and back.

PyTorch's operations take tensors, numbers and lists of these, no deeper. Each operation's pass here, so
that shape is walked by hand, several times as fast as the general trees of ``torch.utils._pytree``.
Anything deeper goes their way.
"""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

_DEEP = (list, tuple, dict)


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """All arguments in order, those in lists one by one, and their form for ``joined``."""
    leaves: list[Any] = []
    lengths: list[int] = []
    for x in (*args, *kwargs.values()):
        if not isinstance(x, _DEEP):
            leaves.append(x)
            lengths.append(-1)
            continue
        if isinstance(x, dict) or any(isinstance(y, _DEEP) for y in x):
            return tree_flatten((args, kwargs))
        leaves.extend(x)
        lengths.append(len(x))
    return leaves, (len(args), tuple(kwargs), tuple(lengths))


def joined(leaves: list[Any], form: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of ``flattened``; a tuple in the arguments becomes a list."""
    if isinstance(form, TreeSpec):
        args, kwargs = tree_unflatten(leaves, form)
        return args, kwargs
    count, names, lengths = form
    values: list[Any] = []
    at = 0
    for length in lengths:
        if length < 0:
            values.append(leaves[at])
            at += 1
        else:
            values.append(leaves[at : at + length])
            at += length
    return tuple(values[:count]), dict(zip(names, values[count:], strict=True))


def hashable(form: Any) -> Any:
    """A form as a part of a key; torch 2.6 has no hash of a tree with dicts."""
    return repr(form) if isinstance(form, TreeSpec) else form


def items(value: Any) -> list[Any]:
    """The parts of one argument or result: of a list or tuple each, else itself."""
    if not isinstance(value, _DEEP):
        return [value]
    if isinstance(value, dict) or any(isinstance(x, _DEEP) for x in value):
        return tree_leaves(value)
    return list(value)
