"""How the dimensions of a view lie in the tensor it looks at, from strides alone.

A dense tensor is a number with a digit for each dimension; a view picks and joins digits. So each
dimension of a view is a product of parts of dimensions of the tensor: ``(B, T, 3·H·D)`` seen as
``(B, H, T, D)`` has the parts D and H of the last one, and the third that begins at the offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Part:
    """A part of a dimension.

    Attributes:
        dimension: Of the tensor.
        step: The part counts in steps of so many.
        size: How many.
    """

    dimension: int
    step: int
    size: int


@dataclass(frozen=True)
class Layout:
    """A view's dimensions in those of its tensor.

    Attributes:
        parts: For each dimension of the view its parts, outermost first; () for a size of one or
            one that was expanded.
        offsets: Where the view begins in each dimension of the tensor.
    """

    parts: tuple[tuple[Part, ...], ...]
    offsets: tuple[int, ...]


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose last dimension is innermost."""
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def layout(
    base: tuple[Sequence[int], Sequence[int]],
    view: tuple[Sequence[int], Sequence[int]],
    offset: int,
) -> Layout | None:
    """Find each dimension of a view in its tensor; None where they do not fit together.

    Args:
        base: Sizes and strides of the tensor.
        view: Sizes and strides of the view.
        offset: Where the view begins, in values after the tensor's first.
    """
    sizes, strides = base
    order = sorted((k for k in range(len(sizes)) if sizes[k] > 1), key=lambda k: -strides[k])
    offsets = [0] * len(sizes)
    for k in order:
        offsets[k], offset = divmod(offset, strides[k]) if strides[k] else (0, offset)
        if offsets[k] >= sizes[k]:
            return None
    if offset:
        return None
    found = []
    for size, stride in zip(*view, strict=True):
        parts = () if size <= 1 or not stride else _parts(order, base, size, stride)
        if parts is None:
            return None
        found.append(parts)
    return Layout(tuple(found), tuple(offsets))


def _parts(
    order: Sequence[int], base: tuple[Sequence[int], Sequence[int]], size: int, stride: int
) -> tuple[Part, ...] | None:
    sizes, strides = base
    place = next((i for i, k in enumerate(order) if 0 < strides[k] <= stride), None)
    if place is None or stride % strides[order[place]]:
        return None
    step = stride // strides[order[place]]
    found: list[Part] = []
    while True:
        k = order[place]
        if size * step <= sizes[k] or (size - 1) * step < sizes[k]:
            return (Part(k, step, size), *found)
        if sizes[k] % step or size % (sizes[k] // step):
            return None
        whole = sizes[k] // step
        if whole > 1:
            found.insert(0, Part(k, step, whole))
        size //= whole
        place -= 1
        if place < 0 or strides[order[place]] != strides[k] * sizes[k]:
            return None
        step = 1
