"""The sizes of the tensors of a recorded step in classes, views included.

A tensor is known by the operation that wrote it; what a later operation reads of it may be a view.
Strides alone say how a view lies in its tensor: a dense tensor is a number with a digit for each
dimension, and a view picks and joins digits. So each dimension of a view is a product of parts of
dimensions of the tensor: ``(B, T, 3·H·D)`` seen as ``(B, H, T, D)`` has the parts D and H of the last.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mpdiag.analysis.shapes.sizes import COMPUTED, DATA, MADE, Size, Sizes, number, product_of
from mpdiag.runs.operations import NONE, Operation, TensorRecord

Dims = list[Size]


class Part(NamedTuple):
    """A part of a dimension of a tensor: ``size`` values, ``step`` apart."""

    dimension: int
    step: int
    size: int


@dataclass
class Stored:
    """A tensor that views look at.

    Attributes:
        number: Of the tensor in the step.
        shape, strides, offset: How it lies in memory.
        dims: Its sizes in classes.
        slices: For a size of its dimensions the parts that views take of it, by where each begins
            and its present size. Those of one size are taken to be the same.
    """

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dims: Dims
    slices: dict[Size, dict[tuple[int, int], Size]] = field(default_factory=dict)


@dataclass
class Tensors:
    """The tensors of a step.

    Attributes:
        sizes: The classes.
        parameters: Sizes of parameters and buffers by name.
    """

    sizes: Sizes
    parameters: dict[str, Dims]
    _written: dict[int, list[Stored]] = field(default_factory=dict)
    _outside: dict[int | str, Stored] = field(default_factory=dict)

    def read(self, op: Operation) -> list[Dims]:
        """The sizes of an operation's inputs."""
        views, parts = _entries(op, "views"), _parts_of_parameters(op)
        return [
            self._part(record, *parts[i])
            if i in parts
            else self._input(record, views.get(i, (0, *dense_strides(record.shape))))
            for i, record in enumerate(op.inputs)
        ]

    def write(self, op: Operation, results: Sequence[Dims]) -> None:
        """Note the sizes of an operation's outputs."""
        laid = _entries(op, "laid")
        self._written[op.index] = [
            _stored(record.tensor, record.shape, laid.get(i), dims)
            for i, (record, dims) in enumerate(zip(op.outputs, results, strict=True))
        ]

    def _input(self, record: TensorRecord, lie: tuple[int, ...]) -> Dims:
        if record.parameter:
            known = self._parameter(record.parameter, record.shape)
            if self._shape(known) == record.shape:
                return known
        if record.producer != NONE:
            written = self._written.get(record.producer, [])
            base = next((t for t in written if t.number == record.tensor), None) or next(
                (t for t in written if math.prod(t.shape) >= record.numel), None
            )
            return self._fresh(record.shape, MADE) if base is None else self.view(base, record, lie)
        base = self._outside.get(record.tensor)
        if base is None:
            dims = self._fresh(record.shape, DATA)
            # It may be a view of a parameter that was not noted as one.
            if len(record.shape) > 1 and tuple(sorted(record.shape)) in self._parameter_shapes:
                self.sizes.fix(*dims)
            base = self._outside[record.tensor] = _stored(record.tensor, record.shape, lie, dims)
        return self.view(base, record, lie)

    def _part(self, record: TensorRecord, name: str, lie: tuple[int, ...]) -> Dims:
        """The sizes of a view of a parameter."""
        if name not in self._outside:
            dims = self._parameter(name, record.shape)
            self._outside[name] = _stored(-1, self._shape(dims), None, dims)
        return self.view(self._outside[name], record, lie)

    def _parameter(self, name: str, shape: Sequence[int]) -> Dims:
        if name not in self.parameters:
            statistics = name.endswith((".running_mean", ".running_var"))  # sized by the norm
            self.parameters[name] = self._fresh(shape, *(() if statistics else (MADE,)))
        return self.parameters[name]

    @cached_property
    def _parameter_shapes(self) -> set[tuple[int, ...]]:
        return {tuple(sorted(self._shape(dims))) for dims in self.parameters.values()}

    def _fresh(self, shape: Sequence[int], *notes: str) -> Dims:
        return [self.sizes.new(n, *notes) for n in shape]

    def _shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(map(self.sizes.value, dims))

    # -- views -------------------------------------------------------------------------------------

    def view(self, base: Stored, record: TensorRecord, lie: tuple[int, ...]) -> Dims:
        """The sizes of a view of a tensor."""
        offset, strides = lie[0] - base.offset, lie[1:]
        if record.shape == base.shape and strides in (base.strides, ()):
            return base.dims
        return self._seen_as(base, record.shape, strides, offset)

    def reshaped(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """The sizes of a dense tensor in another shape."""
        return self._seen_as(
            _stored(-1, self._shape(dims), None, dims), shape, dense_strides(shape)
        )

    def _seen_as(
        self, base: Stored, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> Dims:
        found = layout((base.shape, base.strides), (shape, strides), offset)
        if found is None:
            return self.same_places(base.dims, shape)
        parts, offsets = found
        sizes: dict[Part, Size] = {}
        for k, dim in enumerate(base.dims):
            steps = sorted({(p.step, p) for of_one in parts for p in of_one if p.dimension == k})
            sizes.update(self._divided(base, dim, base.shape[k], steps, offsets[k]))
        # A dimension without parts is 1, or as often as it was expanded.
        return [
            product_of(sizes[p] for p in of_one) if of_one else self.sizes.new(n)
            for n, of_one in zip(shape, parts, strict=True)
        ]

    def same_places(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """Sizes of a result of which nothing is known but its shape.

        What has an equal in the same place, from the right or from the left, is that; nothing else
        may change.
        """
        before, rank = self._shape(dims), min(len(dims), len(shape))
        places: dict[int, int] = {}  # of the result in the input
        for ours, theirs in ((-i, -i) for i in range(1, rank + 1)):
            if shape[ours] == before[theirs]:
                places[len(shape) + ours] = len(before) + theirs
            elif len(dims) != len(shape):
                break
        for i in range(rank):
            if shape[i] == before[i] and i not in places and i not in places.values():
                places[i] = i
        self.sizes.fix(*(d for k, d in enumerate(dims) if k not in places.values()))
        return [dims[places[i]] if i in places else number(n) for i, n in enumerate(shape)]

    def _divided(
        self, base: Stored, dim: Size, whole: int, steps: Sequence[tuple[int, Part]], start: int
    ) -> dict[Part, Size]:
        """The parts of one dimension; ``steps`` are their steps in it, smallest first."""
        expected = 1
        for i, (step, part) in enumerate(steps):
            if step == expected:
                expected = step * part.size
                continue
            # Of each group of ``step`` values those before this part take only some.
            if step % expected or whole % step:
                self.sizes.fix(dim)
                return {p: number(p.size) for _, p in steps}
            outer, inner = self.split(dim, [whole // step, step])
            rest = [(s // step, p) for s, p in steps[i:]]
            return {
                **self._divided(base, inner, step, steps[:i], start % step),
                **self._divided(base, outer, whole // step, rest, start // step),
            }
        if not steps:
            return {}
        if expected < whole:
            taken = base.slices.setdefault(self.sizes.resolve(dim), {})
            alike = next((s for (_, n), s in taken.items() if n == expected), None)
            dim = taken[start, expected] = self.sizes.new(expected) if alike is None else alike
        parts = [p for _, p in reversed(steps)]
        return dict(zip(parts, self.split(dim, [p.size for p in parts]), strict=True))

    def split(self, size: Size, factors: list[int]) -> list[Size]:
        """The factors of a size, outermost first.

        Those that it is known to be made of, else the innermost follows the size and the others
        stay: a number of heads or groups is chosen, the width of each follows.
        """
        if len(factors) == 1:
            return [size]
        size = self.sizes.resolve(size)
        known = self._known_factors(size, factors)
        if known is not None:
            return known
        result = [*map(number, factors[:-1]), self.sizes.new(factors[-1], COMPUTED)]
        self.sizes.equate(size, product_of(result))
        return result

    def _known_factors(self, size: Size, factors: list[int]) -> list[Size] | None:
        if len(size.terms) != 1:
            return None
        (classes, rest), found = size.terms[0], [number(n) for n in factors]
        left = list(classes)
        for i in reversed(range(len(factors))):
            c = next((c for c in left if self.sizes.values[c] == factors[i]), None)
            if c is not None:
                left.remove(c)
                found[i] = Size((((c,), 1),))
        numbers = math.prod(self.sizes.value(f) for f in found if not f.classes)
        return None if left or numbers != rest else found

    def join_slices(self) -> None:
        """Say what the slices of a dimension are of the whole, now that all are known."""
        for stored in [*self._outside.values(), *(t for ts in self._written.values() for t in ts)]:
            for dim, taken in stored.slices.items():
                self._join(dim, taken)

    def _join(self, dim: Size, taken: Mapping[tuple[int, int], Size]) -> None:
        places, whole = sorted(taken), self.sizes.value(dim)
        length = places[0][1]
        ends = [0, *(start + size for start, size in places)]
        if whole % length == 0 and all(n == length and s % length == 0 for s, n in places):
            total = number(whole // length) * taken[places[0]]
        elif [start for start, _ in places] == ends[:-1] and ends[-1] == whole:
            total = sum((taken[place] for place in places), Size())
        else:
            self.sizes.fix(dim, *taken.values())
            return
        self.sizes.note(total, COMPUTED)
        self.sizes.equate(dim, total)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor with its last dimension innermost."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _stored(
    number_: int, shape: tuple[int, ...], lie: tuple[int, ...] | None, dims: Dims
) -> Stored:
    offset, *strides = lie or (0, *dense_strides(shape))
    return Stored(number_, shape, tuple(strides), offset, dims)


def layout(
    base: tuple[Sequence[int], Sequence[int]],
    view: tuple[Sequence[int], Sequence[int]],
    offset: int,
) -> tuple[list[tuple[Part, ...]], list[int]] | None:
    """Find each dimension of a view in its tensor; None where they do not fit together.

    Args:
        base: Shape and strides of the tensor.
        view: Shape and strides of the view.
        offset: Where the view begins, in values after the tensor's first.

    Returns:
        For each dimension of the view its parts, outermost first: () for a size of one, or one that
        was expanded. And where the view begins in each dimension of the tensor.
    """
    shape, strides = base
    order = sorted((k for k in range(len(shape)) if shape[k] > 1), key=lambda k: -strides[k])
    offsets = [0] * len(shape)
    for k in order:
        offsets[k], offset = divmod(offset, strides[k]) if strides[k] else (0, offset)
        if offsets[k] >= shape[k]:
            return None
    found = []
    for size, stride in zip(*view, strict=True):
        parts = () if size <= 1 or not stride else _parts(order, base, size, stride)
        if parts is None or offset:
            return None
        found.append(parts)
    return found, offsets


def _parts(
    order: Sequence[int], base: tuple[Sequence[int], Sequence[int]], size: int, stride: int
) -> tuple[Part, ...] | None:
    shape, strides = base
    place = next((i for i, k in enumerate(order) if 0 < strides[k] <= stride), None)
    if place is None or stride % strides[order[place]]:
        return None
    step = stride // strides[order[place]]
    found: list[Part] = []
    while True:
        k = order[place]
        if (size - 1) * step < shape[k]:
            return (Part(k, step, size), *found)
        if shape[k] % step or size % (shape[k] // step):
            return None
        within = shape[k] // step
        if within > 1:
            found.insert(0, Part(k, step, within))
        size //= within
        place -= 1
        if place < 0 or strides[order[place]] != strides[k] * shape[k]:
            return None
        step = 1


def _parts_of_parameters(op: Operation) -> dict[int, tuple[str, tuple[int, ...]]]:
    """The inputs that are views of a parameter: its name, their offset in it and their strides."""
    recorded = op.scalars.get("parts")
    if not isinstance(recorded, list):
        return {}
    return {int(i): (str(name), tuple(map(int, lie))) for i, name, *lie in recorded}


def _entries(op: Operation, name: str) -> dict[int, tuple[int, ...]]:
    """Offset and strides by tensor, of those that are not dense."""
    recorded = op.scalars.get(name)
    if not isinstance(recorded, list):
        return {}
    return {int(i): tuple(map(int, lie)) for i, *lie in recorded}
