"""The sizes of the tensors of a recorded step in unknowns, views included.

A tensor is known by the operation that wrote it; what a later operation reads of it may be a view,
whose dimensions are parts of the tensor's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpdiag.runs.operations import NONE
from mpdiag.tensorcores.sizes.expressions import Size, number, product_of
from mpdiag.tensorcores.sizes.views import dense_strides, layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpdiag.runs.operations import Operation, TensorRecord
    from mpdiag.tensorcores.sizes.unknowns import Unknowns
    from mpdiag.tensorcores.sizes.views import Layout, Part

Dims = list[Size]

DATA = "data"
MADE = "made by the script"
COMPUTED = "split by the script"


@dataclass
class Made:
    """A tensor that views look at.

    Attributes:
        number: Of the tensor in the step.
        sizes, strides, offset: How it lies in memory.
        dims: Its sizes in unknowns.
        slices: For a size of its dimensions the parts that views take of it, by where each begins
            and its present size.
    """

    number: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dims: Dims
    slices: dict[Size, dict[tuple[int, int], Size]] = field(default_factory=dict)


@dataclass
class Tensors:
    """The tensors of a step.

    Attributes:
        unknowns: Their sizes.
        parameters: Sizes of parameters and buffers by name.
    """

    unknowns: Unknowns
    parameters: dict[str, Dims]
    _written: dict[int, list[Made]] = field(default_factory=dict)
    _outside: dict[int, Made] = field(default_factory=dict)
    _held: dict[str, Made] = field(default_factory=dict)
    _all: list[Made] = field(default_factory=list)

    def read(self, op: Operation) -> list[Dims]:
        """The sizes of an operation's inputs."""
        parts = _parts_of_parameters(op)
        return [
            self._part(record, parts[i]) if i in parts else self._input(op, record, lie)
            for i, (record, lie) in enumerate(zip(op.inputs, _lies(op), strict=True))
        ]

    def write(self, op: Operation, results: Sequence[Dims]) -> None:
        """Note the sizes of an operation's outputs."""
        laid = _entries(op.scalars.get("laid"))
        for i, (record, dims) in enumerate(zip(op.outputs, results, strict=True)):
            offset, *strides = laid.get(i, (0, *dense_strides(record.shape)))
            made = Made(record.tensor, record.shape, tuple(strides), offset, dims)
            self._written.setdefault(op.index, []).append(made)
            self._all.append(made)

    def _input(self, op: Operation, record: TensorRecord, lie: tuple[int, ...]) -> Dims:
        offset, strides = lie[0], lie[1:]
        if record.parameter:
            known = self.parameters.get(record.parameter)
            if known is None:
                known = self.parameters[record.parameter] = self._fresh(record.shape, MADE)
            if [self.unknowns.value(d) for d in known] == list(record.shape):
                return known
        if record.producer != NONE:
            written = self._written.get(record.producer, [])
            base = next((m for m in written if m.number == record.tensor), None) or next(
                (m for m in written if math.prod(m.sizes) >= record.numel), None
            )
            return self._fresh(record.shape, MADE) if base is None else self.view(base, record, lie)
        base = self._outside.get(record.tensor)
        if base is not None:
            return self.view(base, record, lie)
        dims = self._parameter(op, record, strides) or self._fresh(record.shape, DATA)
        base = Made(record.tensor, record.shape, strides, offset, dims)
        self._outside[record.tensor] = base
        self._all.append(base)
        return dims

    def _part(self, record: TensorRecord, part: tuple[str, tuple[int, ...]]) -> Dims:
        """The sizes of a view of a parameter."""
        name, lie = part
        base = self._held.get(name)
        if base is None:
            dims = self.parameters.get(name)
            if dims is None:
                return self._fresh(record.shape, MADE)
            sizes = tuple(self.unknowns.value(d) for d in dims)
            base = self._held[name] = Made(-1, sizes, dense_strides(sizes), 0, dims)
            self._all.append(base)
        return self.view(base, record, lie)

    def _fresh(self, shape: Sequence[int], *notes: str) -> Dims:
        return [self.unknowns.new(n, *notes) for n in shape]

    def _parameter(
        self, op: Operation, record: TensorRecord, strides: tuple[int, ...]
    ) -> Dims | None:
        """The sizes of the parameter that this must be a view of, by module, size and strides.

        Where several would fit, all of them get the same sizes: that can cost work, but never fits
        badly.
        """
        order = sorted(range(len(strides)), key=lambda k: -strides[k])
        lying = [record.shape[k] for k in order]
        inside = f"{op.module}." if op.module else ""
        fitting = {
            name: dims
            for name, dims in self.parameters.items()
            if [self.unknowns.value(d) for d in dims] == lying and len(lying) > 1
        }
        own = {n: d for n, d in fitting.items() if op.module is not None and n.startswith(inside)}
        found = list((own or fitting).values())
        if not found or not (own or len(found) == 1):
            return None
        for other in found[1:]:
            for a, b in zip(found[0], other, strict=True):
                self.unknowns.equate(a, b)
        dims = [number(1)] * len(order)
        for place, k in enumerate(order):
            dims[k] = found[0][place]
        return dims

    # -- views -------------------------------------------------------------------------------------

    def view(self, base: Made, record: TensorRecord, lie: tuple[int, ...]) -> Dims:
        """The sizes of a view of a tensor."""
        offset, strides = lie[0] - base.offset, lie[1:]
        if record.shape == base.sizes and (strides == base.strides or not strides):
            return base.dims
        found = layout((base.sizes, base.strides), (record.shape, strides), offset)
        if found is None:
            return self.guess(base.dims, base.sizes, record.shape)
        parts = self._parts(base, found)
        result = []
        for size, mine in zip(record.shape, found.parts, strict=True):
            if mine:
                result.append(product_of([parts[p] for p in mine]))
            else:
                result.append(self.unknowns.new(size))  # 1, or as often as it was expanded
        return result

    def reshaped(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """The sizes of a dense tensor in another shape."""
        sizes = tuple(self.unknowns.value(d) for d in dims)
        found = layout((sizes, dense_strides(sizes)), (shape, dense_strides(shape)), 0)
        if found is None:
            return self.guess(dims, sizes, shape)
        parts = self._parts(Made(-1, sizes, (), 0, dims), found)
        return [product_of([parts[p] for p in mine]) for mine in found.parts]

    def guess(self, dims: Dims, sizes: Sequence[int], shape: Sequence[int]) -> Dims:
        """Sizes of a result of which nothing is known but its shape.

        What has an equal in the same place, from the left or from the right, is that; nothing else
        may change.
        """
        result: list[Size | None] = [None] * len(shape)
        used = set()
        same_rank = len(sizes) == len(shape)
        for i in range(1, len(shape) + 1):
            if i <= len(sizes) and shape[-i] == sizes[-i]:
                result[-i] = dims[-i]
                used.add(len(sizes) - i)
            elif not same_rank:
                break
        for i, size in enumerate(shape):
            if result[i] is not None:
                continue
            if i < len(sizes) and sizes[i] == size and i not in used:
                result[i] = dims[i]
                used.add(i)
        for k, dim in enumerate(dims):
            if k not in used:
                self.unknowns.fix(dim)
        return [number(n) if d is None else d for n, d in zip(shape, result, strict=True)]

    def _parts(self, base: Made, found: Layout) -> Mapping[Part, Size]:
        """The size of every part of the tensor's dimensions that a view has."""
        sizes: dict[Part, Size] = {}
        for k, dim in enumerate(base.dims):
            mine = {p for parts in found.parts for p in parts if p.dimension == k}
            steps = [(p.step, p) for p in sorted(mine, key=lambda p: p.step)]
            sizes.update(self._divided(base, dim, base.sizes[k], steps, found.offsets[k]))
        return sizes

    def _divided(
        self, base: Made, dim: Size, whole: int, steps: Sequence[tuple[int, Part]], start: int
    ) -> dict[Part, Size]:
        """The parts of one dimension; ``steps`` are their steps in it, smallest first."""
        if not steps:
            return {}
        expected = 1
        for i, (step, part) in enumerate(steps):
            if step == expected:
                expected = step * part.size
                continue
            # Of each group of ``step`` values those before this part take only some.
            if step % expected or whole % step:
                self.unknowns.fix(dim)
                return {p: number(p.size) for _, p in steps}
            outer, inner = self.split(dim, [whole // step, step])
            rest = [(s // step, p) for s, p in steps[i:]]
            return {
                **self._divided(base, inner, step, steps[:i], start % step),
                **self._divided(base, outer, whole // step, rest, start // step),
            }
        if expected < whole:
            dim = self._slice(base, dim, start, expected)
        parts = [p for _, p in reversed(steps)]
        return dict(zip(parts, self.split(dim, [p.size for p in parts]), strict=True))

    def _slice(self, base: Made, dim: Size, start: int, size: int) -> Size:
        taken = base.slices.setdefault(self.unknowns.resolve(dim), {})
        if (start, size) not in taken:
            taken[start, size] = self.unknowns.new(size)
        return taken[start, size]

    def split(self, size: Size, factors: list[int]) -> list[Size]:
        """The factors of a size, outermost first.

        Those that it is known to be made of, else the innermost follows the size and the others
        stay: a number of heads or groups is chosen, the width of each follows.
        """
        if len(factors) == 1:
            return [size]
        size = self.unknowns.resolve(size)
        known = self._known_factors(size, factors)
        if known is not None:
            return known
        inner = self.unknowns.new(factors[-1], COMPUTED)
        outer = [number(n) for n in factors[:-1]]
        self.unknowns.equate(size, product_of([*outer, inner]))
        return [*outer, inner]

    def _known_factors(self, size: Size, factors: list[int]) -> list[Size] | None:
        if size.product is None:
            return None
        term, factor = size.product
        left = list(term)
        found: list[Size | None] = [None] * len(factors)
        for i in reversed(range(len(factors))):
            u = next((u for u in left if self.unknowns.values[u] == factors[i]), None)
            if u is not None:
                left.remove(u)
                found[i] = Size((((u,), 1),))
        rest = math.prod(n for n, f in zip(factors, found, strict=True) if f is None)
        if left or rest != factor:
            return None
        return [number(n) if f is None else f for n, f in zip(factors, found, strict=True)]

    def join_slices(self) -> None:
        """Say what the slices of a dimension are of the whole, now that all are known."""
        for made in self._all:
            merged: dict[Size, dict[tuple[int, int], Size]] = {}
            for dim, taken in made.slices.items():
                same = merged.setdefault(self.unknowns.resolve(dim), {})
                for place, size in taken.items():
                    if same.setdefault(place, size) != size:
                        self.unknowns.equate(same[place], size)
            for dim, taken in merged.items():
                self._join(dim, taken)

    def _join(self, dim: Size, taken: Mapping[tuple[int, int], Size]) -> None:
        places = sorted(taken)
        end = 0
        for start, size in places:
            end = start + size if start == end else -1
        lengths = {size for _, size in places}
        whole = self.unknowns.value(dim)
        length = min(lengths)
        chunks = len(lengths) == 1 and whole % length == 0
        if chunks and all(start % length == 0 for start, _ in places):
            first = taken[places[0]]
            for other in taken.values():
                self.unknowns.equate(first, other)
            self.unknowns.note(first, COMPUTED)
            self.unknowns.equate(dim, number(whole // length) * first)
        elif end == whole:
            total = number(0)
            for place in places:
                total = total + taken[place]
            self.unknowns.note(total, COMPUTED)
            self.unknowns.equate(dim, total)
        else:
            for fixed in (dim, *taken.values()):
                self.unknowns.fix(fixed)


def _lies(op: Operation) -> list[tuple[int, ...]]:
    """Offset and strides of each input."""
    views = _entries(op.scalars.get("views"))
    return [views.get(i, (0, *dense_strides(t.shape))) for i, t in enumerate(op.inputs)]


def _parts_of_parameters(op: Operation) -> dict[int, tuple[str, tuple[int, ...]]]:
    """The inputs that are views of a parameter: its name, their offset in it and their strides."""
    recorded = op.scalars.get("parts")
    if not isinstance(recorded, list):
        return {}
    return {int(i): (str(name), tuple(int(n) for n in lie)) for i, name, *lie in recorded}


def _entries(recorded: object) -> dict[int, tuple[int, ...]]:
    if not isinstance(recorded, list):
        return {}
    return {int(entry[0]): tuple(int(n) for n in entry[1:]) for entry in recorded}
