"""How far rounding a result moves the loss, beside how far a training step moves it.

To first order, an error δ of a result changes the loss by Σ g·δ, where g is the loss's gradient with
respect to it. Rounding errors are as good as independent of each other, so the change is about
√Σ g²δ². Both factors are recorded: g of a backward pass, and the values whose rounding gives δ. How
they are paired is not recorded; taken is the least that any pairing gives.

A change of the loss means little by itself. Two things are moved anyway:

* the loss, from one step to the next (another batch, other weights): noise that is smaller is one more
  random gradient among larger ones;
* the loss of each sample, by what is left of it: a residual is not known better than by its own size.
  With n samples this is √n·√Σ g²δ² beside the loss.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from mpdiag.errors import MpdiagError
from mpdiag.numerics.formats import FloatFormat
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs.operations import Operation, TensorRecord
from mpdiag.runs.run import Run

NEARBY = 10
"""Steps before and after one whose losses say how far the loss moves from step to step."""
_FIRST = 5
"""Losses that make the loss at the start."""
_LAST = 10
"""Losses that make the loss at the end."""
_DEPTH = 6
_PASSES_GRADIENT = frozenset({"add", "add_", "sub", "sub_", "rsub", "neg", "clone", "_unsafe_view"})
"""Operations whose gradient is that of their result, up to its sign or a number."""


@dataclass(frozen=True)
class LossCurve:
    """The losses of a training, by step.

    Attributes:
        losses: Where they were recorded and finite.
        scales: What gradients were multiplied by, where that is not 1.
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    scales: Mapping[int, float] = field(default_factory=dict)

    def size(self, step: int) -> float | None:
        """|loss| of a step, None where it was not recorded."""
        loss = self.losses.get(step)
        return None if loss is None else abs(loss)

    def movement(self, step: int) -> float | None:
        """Mean |change of the loss| from one step to the next, near a step.

        None where two losses in a row were not recorded, or all are the same: that is no training.
        """
        near = range(step - NEARBY, step + NEARBY + 1)
        moved = [
            abs(self.losses[k + 1] - self.losses[k])
            for k in near
            if k in self.losses and k + 1 in self.losses
        ]
        return sum(moved) / len(moved) if any(moved) else None

    @cached_property
    def start(self) -> float | None:
        """Median |loss| of the first steps; None without one, or where it is 0."""
        first = sorted(abs(self.losses[k]) for k in sorted(self.losses)[:_FIRST])
        return (first[len(first) // 2] or None) if first else None

    def fall_after(self, step: int) -> float | None:
        """Share of the whole fall of the loss that follows a step; None where it does not fall.

        The loss of a step is the median of those nearby, as those of the start and the end are.
        """
        steps = sorted(self.losses)
        near = [k for k in steps if abs(k - step) <= _LAST // 2]
        if not near:
            return None
        first, now, last = (
            median(self.losses[k] for k in some) for some in (steps[:_FIRST], near, steps[-_LAST:])
        )
        return (now - last) / (first - last) if first > last else None

    @cached_property
    def end(self) -> float | None:
        """Median |loss| of the last steps; None without one, or where it is 0."""
        last = sorted(abs(self.losses[k]) for k in sorted(self.losses)[-_LAST:])
        return (last[len(last) // 2] or None) if last else None


NO_CURVE = LossCurve()


def loss_curve(run: Run) -> LossCurve:
    """The losses that a recording logged; none where it logged none, or its log cannot be read."""
    try:
        steps = run.recorded_steps()
    except MpdiagError:  # other commands say what is wrong with the log
        return NO_CURVE
    return LossCurve(
        {s.step: s.loss for s in steps if s.loss is not None and math.isfinite(s.loss)},
        {s.step: s.scale for s in steps if 0 < s.scale < math.inf and s.scale != 1},
    )


@dataclass(frozen=True, eq=False)
class LossChange:
    """What errors of a step's results do to its loss.

    Attributes:
        operations: Of the step, in order.
        readers: The forward operations that read each operation's results, by its index.
        backward: The backward operations of each forward one, by its index.
        curve: The losses around it.
    """

    operations: Sequence[Operation]
    readers: Mapping[int, Sequence[Operation]]
    backward: Mapping[int, Sequence[Operation]]
    curve: LossCurve
    _found: dict[int, TensorRecord | None] = field(default_factory=dict, repr=False)

    @cached_property
    def _carriers(self) -> frozenset[int]:
        """Operations whose results carry the gradient of the step's last loss, its seed among them."""
        return carriers(self.operations, seeds(self.operations)[-1:])

    @cached_property
    def among_others(self) -> bool:
        """Whether the step has backward passes beside that of its last loss."""
        first = min(self._carriers, default=0)
        return any(op.node for op in self.operations[:first])

    def gradient(self, op: Operation, depth: int = _DEPTH) -> TensorRecord | None:
        """The loss's gradient with respect to a result; None where it was not recorded."""
        if op.index not in self._found:
            self._found[op.index] = self._gradient(op, depth) if op.outputs else None
        return self._found[op.index]

    def _gradient(self, op: Operation, depth: int) -> TensorRecord | None:
        numel, own = op.outputs[0].numel, self.backward.get(op.index, [])
        inside = {b.index for b in own}
        for b in own:
            for t in b.inputs:
                fits = t.numel == numel and t.counted and t.producer not in inside
                if fits and t.producer in self._carriers:
                    return t
        found: list[TensorRecord] = []
        for reader in self.readers.get(op.index, []):
            behind = self.backward.get(reader.index, [])
            back = [t for b in behind if b.index in self._carriers for t in b.outputs]
            known = [t for t in back if t.counted]
            found += [t for t in known if t.numel == numel and t.shape == op.outputs[0].shape]
            through = reader.op in _PASSES_GRADIENT and reader.outputs[0].numel == numel
            if not known and through and depth:
                passed = self.gradient(reader, depth - 1)
                found += [] if passed is None else [passed]
        return max(found, key=_energy, default=None)

    def of_error(self, op: Operation, error: float) -> tuple[float, float] | None:
        """What an error of a result does, beside a step's movement and beside what is left of the loss.

        Args:
            op: A forward operation.
            error: Root mean square of the error of its result, the same for all its values.

        Returns:
            None where the gradient, or the losses, were not recorded.
        """
        gradient = self.gradient(op)
        return None if gradient is None else self._beside(op, _energy(gradient) * error * error)

    def of_rounding(self, op: Operation, target: FloatFormat) -> tuple[float, float] | None:
        """What storing a result in a format does at least; as ``of_error``."""
        gradient = self.gradient(op)
        if gradient is None or not op.outputs[0].counted:
            return None
        return self._beside(op, least_product(gradient.histogram, op.outputs[0].histogram, target))

    def _beside(self, op: Operation, squared: float) -> tuple[float, float] | None:
        movement, size = self.curve.movement(op.step), self.curve.size(op.step)
        if movement is None or size is None:
            return None
        shape = op.outputs[0].shape
        change = math.sqrt(squared)
        samples = math.sqrt(shape[0]) if shape else 1.0
        return change / movement, samples * change / max(size, 1e-300)


def seeds(operations: Sequence[Operation]) -> list[Operation]:
    """The operations that make the gradient of a loss with respect to itself."""
    following = pairwise(operations)
    return [op for op, after in following if op.op == "ones_like" and after.node and not op.node]


def carriers(operations: Sequence[Operation], begins: Iterable[Operation]) -> frozenset[int]:
    """These operations, and those of backward passes that read what follows from their results."""
    found = {op.index for op in begins}
    for op in operations:
        if op.node and any(t.producer in found for t in op.inputs):
            found.add(op.index)
    return frozenset(found)


def least_product(
    gradient: ExponentHistogram, values: ExponentHistogram, target: FloatFormat
) -> float:
    """The least Σ g²δ² that any pairing of gradients with values' rounding errors gives.

    The largest gradients are paired with the smallest errors; within a power of two all are alike.

    Args:
        gradient: Of batch shape ().
        values: As many, of batch shape ().
        target: The format that values are rounded to.
    """
    falling = _squares(gradient)[::-1]
    rising = _errors(values, target)
    total, taken, at = 0.0, 0.0, 0
    for square, count in falling:
        left = float(count)
        while left > 0 and at < len(rising):
            error, available = rising[at]
            used = min(left, available - taken)
            total += used * square * error
            left, taken = left - used, taken + used
            if taken >= available:
                at, taken = at + 1, 0.0
    return total


def _squares(h: ExponentHistogram) -> list[tuple[float, float]]:
    """Mean x² and count of each power of two, rising."""
    counts: NDArray[np.float64] = np.asarray(h.counts, np.float64)
    used = np.flatnonzero(counts > 0)
    means = h.sums[used] / counts[used]
    return list(zip((means * means).tolist(), counts[used].tolist(), strict=True))


def _errors(h: ExponentHistogram, target: FloatFormat) -> list[tuple[float, float]]:
    """Mean square rounding error and count of each power of two, rising, zeros first."""
    counts: NDArray[np.float64] = np.asarray(h.counts, np.float64)
    used = np.flatnonzero(counts > 0)
    exponents = np.asarray(h.exponents)[used]
    spacing = np.maximum(exponents, target.min_exponent) - target.mantissa_bits
    means = h.sums[used] / counts[used]
    kept = np.exp2(2.0 * spacing) / 12
    moved = np.where(exponents >= target.zero_exponent, kept, means * means)
    zeros = [(0.0, float(h.zeros))] if float(h.zeros) else []
    return sorted([*zeros, *zip(moved.tolist(), counts[used].tolist(), strict=True)])


def _energy(t: TensorRecord) -> float:
    return float(t.histogram.energy().value) if t.counted else 0.0
