"""What each operation says of the sizes of its inputs and outputs.

A rule gets the sizes of the inputs in unknowns, says which are equal, and gives those of the outputs.
Operations without a rule compute element by element if their shapes broadcast to the result's; of
any other only the sizes in the same place are believed, and all others stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpdiag.tensorcores.sizes.expressions import Size, number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpdiag.analysis.shapes.tensors import Dims, Tensors
    from mpdiag.runs.operations import Operation

    Rule = Callable[["Rules", Operation, list[Dims]], list[Dims] | None]

SOFTMAX = "softmax"
CLASSES = "classes"
BATCH_NORM = "batch norm"
NORM = "norm over it"
REDUCED = "reduced"
TRANSPOSED = "transposed convolution"
LOOKED_UP = "looked up"
KEYS = "keys"


@dataclass(frozen=True)
class SizedProduct:
    """A matrix product with its sizes in unknowns.

    Attributes:
        module: Whose; "" outside of all modules.
        kind: ``linear``, ``matmul``, ``convolution``, ``attention`` or ``rnn``.
        flops: Of the training step.
        grows: Sizes that its FLOP are proportional to.
        aligned: Sizes of which rows are made, by name.
        weight: Whether one operand is a parameter, which tensor parallelism cuts.
        heads: Of attention the numbers of heads of queries and of keys, which it shares out.
    """

    module: str
    kind: str
    flops: float
    grows: tuple[Size, ...]
    aligned: tuple[tuple[str, Size], ...]
    weight: bool = False
    heads: tuple[int, ...] = ()


@dataclass
class Rules:
    """Goes through a step's forward operations.

    Attributes:
        tensors: The tensors of the step.
        products: Matrix products found.
        normed: Sizes that a normalisation without parameters works on, by module.
        table: The rule of each operation that has one.
    """

    tensors: Tensors
    table: Mapping[str, Rule]
    products: list[SizedProduct] = field(default_factory=list)
    normed: dict[str, Size] = field(default_factory=dict)

    def follow(self, op: Operation) -> None:
        """Take in one operation."""
        inputs = self.tensors.read(op)
        rule = self.table.get(op.op) or self.table.get(op.op.rstrip("_"))
        results = rule(self, op, inputs) if rule is not None else None
        if results is None:
            results = self._other(op, inputs)
        fitting = [
            dims if self._fits(dims, record.shape) else [number(n) for n in record.shape]
            for record, dims in zip(op.outputs, results, strict=False)
        ]
        fitting += [[number(n) for n in r.shape] for r in op.outputs[len(fitting) :]]
        self.tensors.write(op, fitting)

    def _fits(self, dims: Dims, shape: Sequence[int]) -> bool:
        return [self.tensors.unknowns.value(d) for d in dims] == list(shape)

    def equate(self, a: Size, b: Size) -> None:
        """Two sizes are one; where they cannot be, neither changes."""
        if not self.tensors.unknowns.equate(a, b):
            self.tensors.unknowns.fix(a)
            self.tensors.unknowns.fix(b)

    def new(self, value: int, *notes: str) -> Size:
        """A size of which only the present value is known."""
        return self.tensors.unknowns.new(value, *notes)

    def note(self, size: Size, *words: str) -> None:
        """Add words about a size."""
        self.tensors.unknowns.note(size, *words)

    # -- operations of every kind ------------------------------------------------------------------

    def _other(self, op: Operation, inputs: list[Dims]) -> list[Dims]:
        results: list[Dims] = []
        widest = max((t.shape for t in op.inputs), key=lambda s: (len(s), math.prod(s)), default=())
        for record in op.outputs:
            if not record.shape and self.broadcast(inputs, widest) is not None:  # a loss
                for dim in (d for dims in inputs for d in dims):
                    self.note(dim, REDUCED)
                results.append([])
                continue
            made = self.broadcast(inputs, record.shape)
            if made is None:
                made = self._same_places(inputs, record.shape)
            results.append(made)
        return results

    def _same_places(self, inputs: list[Dims], shape: Sequence[int]) -> Dims:
        if not inputs:
            return [self.new(n) for n in shape]
        value = self.tensors.unknowns.value
        widest = max(inputs, key=lambda dims: math.prod(value(d) for d in dims))
        for dims in inputs:
            if dims is not widest:
                for dim in dims:
                    self.tensors.unknowns.fix(dim)
        return self.tensors.guess(widest, [value(d) for d in widest], shape)

    def broadcast(self, inputs: list[Dims], shape: Sequence[int]) -> Dims | None:
        """The sizes of a result that is computed element by element; None where shapes do not fit."""
        value = self.tensors.unknowns.value
        for dims in inputs:
            sizes = [value(d) for d in dims]
            places = list(shape)[len(shape) - len(sizes) :]
            fits = all(s in (1, n) for s, n in zip(sizes, places, strict=False))
            if len(sizes) > len(shape) or not fits:
                return None
        result: list[Size | None] = [None] * len(shape)
        for dims in inputs:
            for i in range(1, len(dims) + 1):
                if value(dims[-i]) != shape[-i]:
                    continue
                before = result[-i]
                result[-i] = dims[-i]
                if before is not None and shape[-i] != 1:
                    self.equate(before, dims[-i])
        return [self.new(n) if d is None else d for n, d in zip(shape, result, strict=True)]


def inputs_named(op: Operation, inputs: list[Dims], *names: str) -> list[Dims]:
    """The inputs of these names, in that order."""
    found: list[Dims] = []
    for name in names:
        found += [d for t, d in zip(op.inputs, inputs, strict=True) if t.argument == name]
    return found
