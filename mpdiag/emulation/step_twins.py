"""The twin of a taped step: how far rounding alone moves each of its tensors.

A twin runs the step again on other memory. Every value from outside moves by an ulp of its own dtype,
and so does the result of every operation that computes, up or down by chance; a result that adds K terms
moves by √K / 4 ulps of FP32 of its root mean square besides, for kernels add in any order. So does each
channel that batch normalization makes, as a whole. FP32 operands that a product may round to TF32 move
by half an ulp of TF32 there. What is further from the step than a few times its twin is no rounding.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mpdiag.emulation.step_tape import Call, StepReplay, StepTape, Values, View
from mpdiag.numerics.autocast_lists import MOVES
from mpdiag.numerics.formats import FORMATS
from mpdiag.numerics.trimmed import is_few, trimmed_rms
from mpdiag.tracing.dispatch import found_in, mapped, tensors_of
from mpdiag.tracing.storages import elements_of, read_back

_SAME = 0.5
"""How far a twin's gradients may be from the training's own without asking whether rounding did it."""
_AT_ONCE = 1 << 20
"""Elements that are moved at once; each needs its sign in memory."""
_SUBNORMAL = 2.0**-25
"""Half the distance of FP16's subnormals, which no share of their size moves."""
_SUMMED = 2.0**-24 / 4
"""Rounding error of a sum of K terms beside its size, for each √K; an FP32 accumulator's."""

_IN_A_ROW = 4
"""As how many values each counts where some kernels add them one after another: errors have one sign."""


class Mark(NamedTuple):
    """A tensor of the step to look at.

    Attributes:
        view: Where it lies.
        numbers: Which of its elements, int64 (k,).
        values: What these were in the step, (k,).
        reads: The marks of what it was made of, by their place.
    """

    view: View
    numbers: NDArray[np.int64]
    values: torch.Tensor
    reads: Sequence[int] = ()


def spreads(tape: StepTape, marks: Sequence[Mark]) -> list[float] | None:
    """How far a twin comes apart from the step, at each mark: a root mean square over its elements.

    It is at least as far as its sizes are apart: norms are compared, too. Where few elements carry a
    tensor, it is at least as far, beside their size, as what they were made of: a single sum comes near
    by chance.

    Returns:
        One for each mark; None where the tape does not give the training's own gradients.
    """
    with StepReplay.alone():
        theirs = read_back(_TwinReplay(tape, marks).moved())
        ours = read_back([mark.values for mark in marks])
    with np.errstate(invalid="ignore", over="ignore"):
        both = list(zip(theirs, ours, strict=True))
        apart = [np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, a - b) for a, b in both]
    held = {view.value for view, _ in tape.gradients.values()}
    last = [i for i, mark in enumerate(marks) if mark.view.value in held]
    last = [i for i in last if len(marks[i].view.shape) > 1] or last  # a norm's may be lost
    size, error = (math.sqrt(sum(float(x[i] @ x[i]) for i in last)) for x in (ours, apart))
    if tape.loss is None or not (0.0 < size < math.inf and math.isfinite(error)):
        return None
    with StepReplay.alone():
        if error > _SAME * size and not StepReplay(tape).is_faithful():
            return None
    found: list[float] = []
    sizes: list[float] = []
    for mark, values, twin, difference in zip(marks, ours, theirs, apart, strict=True):
        rms, other = (math.sqrt(x @ x / x.size) for x in (values, twin))
        spread = max(trimmed_rms(difference), abs(other - rms))
        moved = [i for i in mark.reads if found[i]]  # whole numbers show nothing
        made_of = math.hypot(*(sizes[i] for i in moved))
        if is_few(values) and math.isfinite(rms) and 0.0 < made_of < math.inf:
            spread = max(spread, math.hypot(*(found[i] for i in moved)) / made_of * rms)
        found.append(spread)
        sizes.append(rms)
    return found


class _TwinReplay(StepReplay):
    """Runs a tape once with everything moved by rounding. What nothing reads any more is let go."""

    def __init__(self, tape: StepTape, marks: Sequence[Mark]) -> None:
        super().__init__(tape)
        self._drawn = 0
        self._found = [mark.values for mark in marks]
        self._marks: dict[int, list[tuple[int, Mark]]] = {}
        for i, mark in enumerate(marks):
            self._marks.setdefault(mark.view.value, []).append((i, mark))
        self._last = {value: i for i, call in enumerate(tape.calls) for value in call.reads}

    def moved(self) -> list[torch.Tensor]:
        """The elements at each mark."""
        outside = dict(self._tape.copies)
        for i, call in enumerate(self._tape.calls):
            for view in found_in((call.args, call.kwargs), View):
                if view.value in outside:
                    self._known[view.value] = outside.pop(view.value).clone()
                    self._move(self._known[view.value], view.dtype, 0.0)
            made = [*(view.value for view in call.results.values()), *call.writes.values()]
            self._again(call, self._known, "")
            for value in (*call.reads, *made):
                for n, mark in self._marks.pop(value, ()):
                    self._found[n] = elements_of(mark.view.of(self._known[value]), mark.numbers)
                if self._last.get(value, i) <= i:
                    self._known.pop(value, None)
        return self._found

    def _again(self, call: Call, into: Values, name: str) -> None:
        """Run an operation, and move what it made."""
        read = found_in((call.args, call.kwargs), View)
        exact = {value: into[value] for value in call.reads} if call.operand_format else {}
        for view in read if exact else ():
            if len(view.shape) > 1 and view.value not in call.writes:  # a bias is added in FP32
                into[view.value] = exact[view.value].clone()
                half = 2.0 ** -FORMATS[call.operand_format].mantissa_bits / 2
                self._move(into[view.value], view.dtype, 0.0, half)
        super()._again(call, into, name)
        into |= exact
        op = call.func.overloadpacket.__name__
        if op == "native_layer_norm_backward" and call.args[0].dtype.itemsize == 2:
            # A CPU adds up in the gradient's own format, the twin in FP32.
            args = mapped(call.args, View, lambda view: view.of(into[view.value]).float())
            wide = tensors_of(call.func(*args, **call.kwargs))
            for i, view in call.results.items():
                view.of(into[view.value]).copy_(wide[i])
        views = {view.value: view for view in call.results.values()}
        views |= {call.writes[view.value]: view for view in read if view.value in call.writes}
        if op in MOVES and op not in ("_to_copy", "copy_"):  # which may round
            return
        for value, view in views.items():
            self._move(into[value], view.dtype, _SUMMED * math.sqrt(_terms(call, view)))
        if "batch_norm" in op and 0 in call.results:
            self._move_channels(call.results[0].of(into[call.results[0].value]))

    def _move_channels(self, x: torch.Tensor) -> None:
        """Move each channel as a whole: all of it is normalized by the same sums over it."""
        if x.dtype is not torch.float32 or x.dim() < 2 or not x.isfinite().all():
            return
        if x.numel() < 2 * max(1, x.shape[1]):
            return
        share = _SUMMED * math.sqrt(x.numel() / x.shape[1])
        sums = x.transpose(0, 1).flatten(1)[:, :2].view(-1, 2, *(1 for _ in x.shape[2:]))
        up, wider = self._signs(sums.contiguous(), x.dtype).unbind(1)
        x.mul_(1 + share * wider).add_(up, alpha=share * float(x.norm()) / math.sqrt(x.numel()))

    def _move(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, summed: float, share: float = 0.0
    ) -> None:
        """Move what a storage holds by an ulp or a share, and by one of its root mean square."""
        if not dtype.is_floating_point or dtype.itemsize < 2 or not storage.nbytes():
            return
        flat = torch.empty(0, dtype=dtype, device=storage.device)
        flat = flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        # Half an ulp of a narrow format rounds to a whole one, or to none.
        eps = torch.finfo(dtype).eps
        share = share or (eps if dtype is wide else eps / 2)
        square = float(torch.dot(flat, flat) if dtype is wide else flat.norm(dtype=wide) ** 2)
        if not math.isfinite(square):  # what fills masks must not become infinite
            return
        moved = summed * math.sqrt(square / flat.numel()) if summed > eps / 4 else 0.0
        moved = _SUBNORMAL if dtype is torch.float16 else moved
        self._drawn += 1
        for part in flat.split(_AT_ONCE):
            signs = self._signs(part, wide)
            # No square becomes negative, and no zero anything else.
            added = part.abs().to(wide).div_(2).clamp_(max=moved).mul_(signs) if moved else None
            if dtype is wide:
                part.addcmul_(part, signs, value=share)
            else:
                part.mul_(signs.mul_(share).add_(1))
            if added is not None:
                part.add_(added)

    def _signs(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Up or down by a bit of each value: values that are equal round alike.

        It is another one of the last bits each time, or what follows would undo the move before.
        """
        up, number = 2 * self._drawn % 7 % 2, {2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = x.view(number[x.dtype.itemsize]) >> self._drawn % 3
        return (bits & 1).to(dtype).mul_(4 * up - 2).add_(1 - 2 * up)


def _terms(call: Call, made: View) -> int:
    """How many values are added to make one of a result: gradients of parameters add up a batch."""
    op, args = call.func.overloadpacket.__name__, call.args
    adds = op == "convolution_backward" or op.endswith("norm_backward")
    if not adds or made.shape == args[1].shape or not made.shape:
        return call.reduction
    given: int = math.prod(args[0].shape)
    return _IN_A_ROW * given // max(1, made.shape[0])
