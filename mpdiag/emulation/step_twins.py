"""The twin of a taped step: how far rounding alone moves each of its tensors.

A twin runs the step again on other memory. Every value from outside moves by an ulp of its own dtype,
and so does the result of every operation that computes, up or down by chance; a result that adds K terms
moves by √K / 4 ulps of FP32 of its root mean square besides, for kernels add in any order. What is
further from the step than a few times its twin is no rounding.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mpdiag.emulation.step_tape import Call, StepReplay, StepTape, Values, View
from mpdiag.numerics.autocast_lists import MOVES
from mpdiag.numerics.trimmed import trimmed_rms
from mpdiag.tracing.dispatch import found_in
from mpdiag.tracing.storages import elements_of

_FEW = 8
"""Elements below which one twin may come near by chance."""
_SAME = 0.5
"""How far a twin's gradients may be from the training's own; of another computation they are further."""
_SIGNS = 65_521
"""A prime, so that the signs stand in no column of a tensor more often than in another."""
_SUBNORMAL = 2.0**-25
"""Half the distance of FP16's subnormals, which no share of their size moves."""
_SUMMED = 2.0**-24 / 4
"""Rounding error of a sum of K terms beside its size, for each √K; an FP32 accumulator's."""


class Mark(NamedTuple):
    """A tensor of the step to look at.

    Attributes:
        view: Where it lies.
        numbers: Which of its elements, int64 (k,).
        values: What these were in the step, (k,).
    """

    view: View
    numbers: NDArray[np.int64]
    values: torch.Tensor


def spreads(tape: StepTape, marks: Sequence[Mark]) -> list[float] | None:
    """How far a twin comes apart from the step, at each mark: a root mean square over its elements.

    Where few elements are looked at, it is at least as far, beside their size, as at the mark before
    that has more of them.

    Returns:
        One for each mark; None where the tape does not give the training's own gradients.
    """
    with StepReplay.alone():
        replay = _TwinReplay(tape)
        if not replay.is_faithful(_SAME):
            return None
        found, before = [], 0.0
        for mark in marks:
            values = mark.values.double()
            apart, size = replay.distance(mark, values), float(values.square().mean().sqrt())
            if len(mark.numbers) < _FEW and math.isfinite(size):
                apart = max(apart, before * size)
            elif apart and 0.0 < size < math.inf:  # whole numbers show nothing
                before = apart / size
            found.append(apart)
        return found


class _TwinReplay(StepReplay):
    """Runs a tape with everything moved by rounding."""

    def __init__(self, tape: StepTape) -> None:
        super().__init__(tape)
        self._drawn = 0
        dtypes = {
            view.value: view.dtype
            for call in reversed(tape.calls)
            for view in found_in((call.args, call.kwargs), View)
        }
        for value, storage in tape.copies.items():
            if value in dtypes:
                self._known[value] = storage.clone()
                self._move(self._known[value], dtypes[value], 0.0)

    def distance(self, mark: Mark, values: torch.Tensor) -> float:
        """How far a mark is from its values in the step, float64 (k,)."""
        moved = elements_of(mark.view.of(self._known[mark.view.value]), mark.numbers).double()
        same = (moved == values) | (moved.isnan() & values.isnan())
        return trimmed_rms((moved - values).masked_fill(same, 0.0).cpu().numpy())

    def _again(self, call: Call, into: Values, name: str) -> None:
        """Run an operation, and move what it made."""
        super()._again(call, into, name)
        op = call.func.overloadpacket.__name__
        views = {view.value: view.dtype for view in call.results.values()}
        for view in found_in((call.args, call.kwargs), View):
            if view.value in call.writes:
                views[call.writes[view.value]] = view.dtype
        if op in MOVES and op not in ("_to_copy", "copy_"):  # which may round
            return
        for value, dtype in views.items():
            self._move(into[value], dtype, _SUMMED * math.sqrt(call.reduction))

    def _move(self, storage: torch.UntypedStorage, dtype: torch.dtype, summed: float) -> None:
        """Move what a storage holds by an ulp, and by a share of its root mean square.

        The signs stand in rows as long as there are signs, from another one on each time.
        """
        if not dtype.is_floating_point or dtype.itemsize < 2 or not storage.nbytes():
            return
        flat = torch.empty(0, dtype=dtype, device=storage.device)
        flat = flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        self._drawn += 1
        first = self._drawn * 7919 % _SIGNS
        signs = _signs()[first : first + _SIGNS][: flat.numel()].to(flat.device, wide)
        # Half an ulp of a narrow format rounds to a whole one, or to none.
        eps = torch.finfo(dtype).eps
        factors = signs * (eps if dtype is wide else eps / 2) + 1
        norm = float(torch.linalg.vector_norm(flat, dtype=wide))
        if not math.isfinite(norm):  # what fills masks must not become infinite
            return
        moved = summed * norm / math.sqrt(flat.numel()) if summed > eps / 4 else 0.0
        moved = _SUBNORMAL if dtype is torch.float16 else moved
        for part in _rows(flat):
            part.mul_(factors[: part.shape[-1]])
            if moved:
                part.add_(signs.flip(0)[: part.shape[-1]], alpha=moved)


def _rows(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values in rows as long as the signs, and the rest."""
    whole = flat.numel() // _SIGNS * _SIGNS
    return (flat[:whole].view(-1, _SIGNS), flat[whole:]) if whole else (flat,)


@cache
def _signs() -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(0, 2, (_SIGNS,), generator=generator, device="cpu")
    return drawn.float().mul_(2).sub_(1).repeat(2)
