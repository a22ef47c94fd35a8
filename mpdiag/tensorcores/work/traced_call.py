"""The arguments of one call as a trace records them, checked before use."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpdiag.hardware.alignment import dtype_name
from mpdiag.tensorcores.work.products import Shape

_LARGEST = 2**40  # a size beyond this is damage, not a shape


class UnclearArguments(Exception):
    """The arguments do not fit the operation."""


@dataclass(frozen=True)
class TracedCall:
    """The arguments of one call, read defensively."""

    dims: Sequence[Any]
    dtypes: Sequence[Any]
    strides: Sequence[Any]
    concrete: Sequence[Any]

    def shape(self, index: int, rank: int | None = None) -> Shape:
        """Sizes of a tensor; of so many dimensions, where that is given."""
        sizes = _sizes(self.dims, index)
        if sizes is None or (rank is not None and len(sizes) != rank) or not sizes:
            raise UnclearArguments
        return sizes

    def optional(self, index: int) -> Shape:
        """Sizes of a tensor, () where there is none."""
        return _sizes(self.dims, index) or ()

    def shapes(self, index: int) -> list[Shape]:
        """Sizes of a list of tensors; [] where the trace does not tell them."""
        given = self.dims[index] if index < len(self.dims) else None
        if not isinstance(given, (list, tuple)):
            return []
        shapes = [_sizes(given, i) for i in range(len(given))]
        return [] if None in shapes else [s for s in shapes if s is not None]

    def stride(self, index: int) -> Shape:
        """Strides of a tensor, () where the trace does not tell them."""
        return _sizes(self.strides, index) or ()

    def dtype(self, index: int) -> str | None:
        """Our name of a tensor's dtype."""
        return dtype_name(self.raw_dtype(index))

    def raw_dtype(self, index: int) -> str:
        """A tensor's dtype as the trace writes it, "" where it does not."""
        given = self.dtypes[index] if index < len(self.dtypes) else None
        return given if isinstance(given, str) else ""

    def value(self, index: int) -> Any:
        """An argument that is no tensor; None where the trace does not tell it."""
        text = self.concrete[index] if index < len(self.concrete) else None
        if not isinstance(text, str) or len(text) > 200:
            return None
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None

    def number(self, index: int) -> int | None:
        """A non-negative integer argument; None for anything else."""
        value = self.value(index)
        return value if type(value) is int and 0 <= value < _LARGEST else None

    def numbers(self, index: int, rank: int) -> Shape | None:
        """A list argument, spread where it has one entry for all dimensions."""
        value = self.value(index)
        if type(value) is int:
            value = [value]
        if not isinstance(value, (list, tuple)) or any(type(v) is not int for v in value):
            return None
        return tuple(value) * rank if len(value) == 1 else tuple(value)


def _sizes(source: Sequence[Any], index: int) -> Shape | None:
    given = source[index] if index < len(source) else None
    if not isinstance(given, (list, tuple)):
        return None
    if any(type(n) is not int or not 0 <= n < _LARGEST for n in given):
        return None
    return tuple(given)
