"""A taped step, run again: as it was, and with some of its operations rounded.

The tape runs once as it was; if the gradients are not the training's own, nothing is said. Then some
operations (all calls of some operations of some modules, with their backward passes) run rounded, and
all that depends on them anew, in FP32. What comes out of this are changes of the loss and of the
gradients that are exact to the last rounding: through inverses, differences, recurrences and all else.

Range is left out: a value that leaves the format's range stays as it is, and gradients are rounded as
if their exponent had no end. Overflow and loss scales are judged by the histograms.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mpdiag.emulation.rounding import DTYPES
from mpdiag.emulation.step_tape import View
from mpdiag.numerics.formats import FP8_E4M3
from mpdiag.tracing.dispatch import found_in, mapped, tensors_of

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator

    from mpdiag.emulation.step_tape import Call, StepTape

_SAME = 1e-5
"""How far the taped gradients may be from the training's own: kernels that add in any order."""
FP8 = FP8_E4M3.name
"""For what layers store: each tensor under a power-of-two scale of its own."""
_REFUSED: type[Exception] = vars(torch.linalg)["LinAlgError"]
_FP16_BITS_LESS = 13
_FP16_END = 65520.0
"""From here on FP16 rounds to infinity."""


class Effect(NamedTuple):
    """What rounding the operands and results of operations does to a step.

    Attributes:
        gradient_error: ‖Δg‖ / ‖g‖ of all parameters' gradients together.
        loss_change: |change of the loss|.
    """

    gradient_error: float
    loss_change: float


BREAKS = Effect(math.inf, math.inf)
"""The loss or a gradient is no longer finite, or an operation raises."""

Values = dict[int, torch.UntypedStorage]


class StepReplay:
    """Runs a tape; all within ``alone()``.

    Args:
        tape: A whole step.

    Attributes:
        spent: What all runs have cost, as ``Call.work``.
    """

    def __init__(self, tape: StepTape) -> None:
        self.spent = 0
        self._tape = tape
        self._known: Values = dict(tape.copies)
        self._tensors: dict[int, torch.Tensor] = {}  # of views of values as they were
        self._rounded: set[int] = set()  # values of this run: rounding them again changes nothing
        self._size = math.sqrt(sum(_norm(kept) ** 2 for _, kept in tape.gradients.values()))

    @staticmethod
    @contextmanager
    def alone() -> Iterator[None]:
        """No mode, no autocast and no autograd."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C._DisableAutocast())
            yield

    def is_faithful(self) -> bool:
        """Whether the tape gives the gradients that the training had; must be asked first."""
        if not self._tape.gradients or self._tape.loss is None:
            return False
        self._run(self._known)
        error = math.hypot(
            *(_norm(v.of(self._known[v.value]) - g) for v, g in self._tape.gradients.values())
        )
        return math.isfinite(self._size) and self._size > 0 and error <= _SAME * self._size

    def loss(self) -> float:
        """|loss| of the step as it was; 0 where none is on the tape."""
        loss = self._tape.loss
        return 0.0 if loss is None else abs(float(loss.of(self._known[loss.value])))

    def effect(self, sites: Collection[Hashable], name: str) -> Effect | None:
        """What rounding all operations of some sites does; None where the step cannot run so.

        Args:
            sites: As the tape has them.
            name: The format's name.
        """
        changed: Values = {}
        try:
            self._run(changed, frozenset(sites), name)
        except _REFUSED:  # a factorization refuses the rounded values
            return BREAKS
        except RuntimeError:  # shapes that follow values, for one
            return None
        return self._compared(changed)

    def _run(self, into: Values, sites: frozenset[Hashable] = frozenset(), name: str = "") -> None:
        """Run what depends on rounded sites, or everything where values go into those known."""
        everything = into is self._known
        self._rounded.clear()
        for call in self._tape.calls:
            rounded = call.site in sites
            if everything or rounded or not call.reads.isdisjoint(into):
                self.spent += call.work
                self._again(call, into, name if rounded else "")

    def _again(self, call: Call, into: Values, name: str) -> None:
        """Run an operation on values as they are now; rounded where a format is named."""
        known, writes, cached, rounded = self._known, call.writes, self._tensors, self._rounded

        def tensor(view: View) -> torch.Tensor:
            if view.value in writes:
                return view.of(into[writes[view.value]])
            changed = into.get(view.value)
            if changed is not None:
                seen = view.of(changed)
            else:
                found = cached.get(id(view))
                seen = cached[id(view)] = view.of(known[view.value]) if found is None else found
            narrow = not name or view.value in rounded
            return seen if narrow else _round(seen, name, call.backward)

        for old, new in writes.items():
            into[new] = (into[old] if old in into else known[old]).clone()
        if name and writes:
            mine = [
                tensor(v) for v in found_in((call.args, call.kwargs), View) if v.value in writes
            ]
        else:
            mine = []
        for t in mine:
            t.copy_(_round(t, name, call.backward))
        args, kwargs = mapped((call.args, call.kwargs), View, tensor)
        result = call.func(*args, **kwargs)
        for t in mine:
            t.copy_(_round(t, name, call.backward))
        results = tensors_of(result) if call.results else []
        for i, view in call.results.items():
            made = _round(results[i], name, call.backward) if name else results[i]
            into[view.value] = _laid(made, view)
            if name:
                rounded.add(view.value)

    def _compared(self, changed: Values) -> Effect:
        """The change of gradients and loss."""
        known = self._known
        error = math.hypot(
            *(
                _norm(v.of(changed[v.value]) - v.of(known[v.value]))
                for v, _ in self._tape.gradients.values()
                if v.value in changed
            )
        )
        moved, loss = 0.0, self._tape.loss
        if loss is not None and loss.value in changed:
            moved = abs(float(loss.of(changed[loss.value])) - float(loss.of(known[loss.value])))
        effect = Effect(error / self._size, moved)
        return effect if all(map(math.isfinite, effect)) else BREAKS


def _laid(out: torch.Tensor, view: View) -> torch.UntypedStorage:
    """A result's memory, laid out as it was in the step."""
    same = out.stride() == view.stride and out.storage_offset() == view.offset
    if not same or out.dtype is not view.dtype:
        whole = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
        laid = torch.empty(view.offset + max(whole, 1), dtype=view.dtype, device=out.device)
        view.of(laid.untyped_storage()).copy_(out)
        out = laid
    storage: torch.UntypedStorage = out.untyped_storage()
    return storage


def _round(x: torch.Tensor, name: str, backward: bool) -> torch.Tensor:
    """FP32 values rounded to a format; what leaves its range keeps its exponent."""
    if x.dtype is not torch.float32 or not x.numel():
        return x
    if name == FP8:
        return _fp8(x)
    if name != "fp16":
        return x.to(DTYPES[name]).float()  # its exponents are FP32's
    if backward:
        return _unbounded(x, _FP16_BITS_LESS)
    low = x.to(DTYPES[name]).float()
    if float(x.abs().amax()) < _FP16_END:  # False where one is NaN
        return low
    return torch.where(low.isfinite(), low, _unbounded(x, _FP16_BITS_LESS))


def _fp8(x: torch.Tensor) -> torch.Tensor:
    """FP32 values rounded under the largest scale that leaves a bit to spare; all finite, or as is."""
    top = float(x.abs().amax())
    if not math.isfinite(top) or top == 0.0:
        return x
    scale = 2.0 ** (math.floor(math.log2(FP8_E4M3.max / max(top, 2.0**-120))) - 1)
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


def _unbounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """FP32 values without their last bits, to nearest, ties to even; infinities stay."""
    words = x.view(torch.int32)
    kept = (words >> bits).bitwise_and_(1).add_((1 << (bits - 1)) - 1).add_(words)
    return kept.bitwise_and_(-(1 << bits)).view(torch.float32)


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
