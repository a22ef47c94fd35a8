"""A training step on tape, and run again with some of its operations rounded.

Every operation of a recorded step, forward and backward, is noted with what it reads, by storage and not
by tensor: so views need no entry, and what is written in place becomes a new value. Values from outside
(parameters, data, random numbers) are copied when they are first read.

The tape runs once as it was; if the gradients are not the training's own, nothing is said. Then some
operations (all calls of some operations of some modules, with their backward passes) run rounded, and
all that depends on them anew, in FP32. What comes out of this are changes of the loss and of the
gradients that are exact to the last rounding: through inverses, differences, recurrences and all else.

Range is left out: a value that leaves the format's range stays as it is, and gradients are rounded as
if their exponent had no end. Overflow and loss scales are judged by the histograms.
"""

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mpdiag.emulation.rounding import DTYPES
from mpdiag.numerics.formats import FP8_E4M3
from mpdiag.tracing.dispatch import found_in, mapped, tensors_of, written
from mpdiag.tracing.storages import WeakStorages

LARGEST = 1 << 24
"""Elements of all values of a step together, beyond which it is not taped."""
LONGEST = 4000
"""Operations of a step, beyond which it is not taped."""
_CALL = 1 << 16
"""What a call costs at least, in elements read and written."""
_FLOPS = 16
"""Floating-point operations that take as long as an element."""
_SAME = 1e-5
"""How far the taped gradients may be from the training's own: kernels that add in any order."""
FP8 = FP8_E4M3.name
"""For what layers store: each tensor under a power-of-two scale of its own."""
_REFUSED: type[Exception] = vars(torch.linalg)["LinAlgError"]
_FP16_BITS_LESS = 13
_FP16_END = 65520.0
"""From here on FP16 rounds to infinity."""


@dataclass(frozen=True)
class View:
    """A tensor as a part of a value."""

    value: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, on a storage that holds the value."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass
class Call:
    """An operation as it ran.

    Attributes:
        func: The overload.
        args, kwargs: With views in place of tensors.
        reads: The values that it reads.
        writes: Those that it writes to in place, each with the value that they become.
        results: What it makes anew, by its place among the result's tensors.
        site: Whose rounding it belongs to; None where it is never rounded.
        backward: Whether it is part of a backward pass.
        work: What it costs.
        reduction: How many values are added to make one of the result; 1 where none, or not known.
        operand_format: To which it may have rounded its FP32 operands, or "".
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: dict[int, int] = field(default_factory=dict)
    results: dict[int, View] = field(default_factory=dict)
    site: Hashable | None = None
    backward: bool = False
    work: int = _CALL
    reduction: int = 1
    operand_format: str = ""


class CannotTape(Exception):
    """A step of which no tape is possible."""


class StepTape:
    """The operations of one step, noted as they run.

    ``before`` and ``after`` are called around each, from the dispatch mode that sees them, without
    gradients and on one thread at a time.

    Args:
        largest, longest: Elements of all values together, and operations, beyond which it is not taped;
            0 for ``LARGEST`` and ``LONGEST``.

    Attributes:
        calls: The operations that make their results anew when they run again.
        copies: Values from outside, and random ones.
        gradients: The gradients as the optimizer saw them, by parameter.
        loss: Where the last backward pass began, None where none did.
    """

    def __init__(self, largest: int = 0, longest: int = 0) -> None:
        self._largest, self._longest = largest or LARGEST, longest or LONGEST
        self.calls: list[Call] = []
        self.copies: dict[int, torch.UntypedStorage] = {}
        self.gradients: dict[int, tuple[View, torch.Tensor]] = {}
        self.loss: View | None = None
        self._known: WeakStorages[int] = WeakStorages()
        self._parameters: dict[int, torch.Tensor] = {}
        self._values = 0
        self._elements = 0

    def clear(self) -> None:
        """Let go of everything."""
        self._known.clear()
        for held in (self.copies, self.calls, self._parameters, self.gradients):
            held.clear()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Note what an operation of torch's own that is no view reads, before it may write there.

        Raises:
            CannotTape: If a tensor has no memory of its own, or the step is too large.
        """
        if len(self.calls) >= self._longest:
            raise CannotTape
        reads: list[int] = []

        def view(tensor: torch.Tensor) -> View:
            seen = self._view(tensor)
            reads.append(seen.value)
            return seen

        seen, named = mapped((args, kwargs), torch.Tensor, view)
        return Call(func, seen, named, frozenset(reads))

    def parameter(self, tensor: torch.Tensor) -> None:
        """A parameter was read: its gradient is looked at in the end."""
        self._parameters[id(tensor)] = tensor

    def after(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        *,
        site: Hashable | None,
        backward: bool,
        flops: int,
        reduction: int = 1,
    ) -> None:
        """Note what an operation made."""
        func = call.func
        random = torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args)
        in_place = written(func, args, kwargs)
        own = {t.untyped_storage()._cdata for t in in_place}
        read, made = tensors_of((args, kwargs)), tensors_of(result)
        inside = {t.untyped_storage()._cdata for t in read}
        for tensor in in_place:
            storage = tensor.untyped_storage()
            old = self._known.get(storage._cdata)
            if old is not None and old not in call.writes and storage._cdata in own:
                own.discard(storage._cdata)
                call.writes[old] = self._new(storage, copied=random)
        for i, tensor in enumerate(made):
            if tensor.untyped_storage()._cdata not in inside:
                value = self._new(tensor.untyped_storage(), copied=random)
                call.results[i] = self._seen_as(tensor, value)
        if random:
            return
        call.site, call.backward, call.reduction = site, backward, reduction
        elements = sum(t.numel() for t in (*read, *made))
        call.work = _CALL + max(elements, flops // _FLOPS)
        self.calls.append(call)
        if func.overloadpacket.__name__ == "ones_like" and not backward and args[0].numel() == 1:
            self.loss = found_in(call.args, View)[0]

    def note_gradients(self) -> None:
        """Before the optimizer steps: the gradients as they are."""
        for key, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:
                continue
            value = self._known.get(gradient.untyped_storage()._cdata)
            if value is not None:
                self._grow(gradient.numel())
                kept = gradient.detach().clone()
                self.gradients[key] = (self._seen_as(gradient, value), kept)

    def seen(self, tensor: torch.Tensor) -> View | None:
        """A tensor as a part of a value of the step; None where the tape does not know it."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested:
            return None
        if tensor.layout != torch.strided:
            return None
        value = self._known.get(tensor.untyped_storage()._cdata)
        return None if value is None else self._seen_as(tensor, value)

    # -- values --------------------------------------------------------------------------------------

    def _view(self, tensor: torch.Tensor) -> View:
        _check(tensor)
        storage = tensor.untyped_storage()
        value = self._known.get(storage._cdata)
        if value is None:
            value = self._new(storage, copied=True)
        return self._seen_as(tensor, value)

    def _seen_as(self, tensor: torch.Tensor, value: int) -> View:
        _check(tensor)
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return View(value, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def _new(self, storage: torch.UntypedStorage, *, copied: bool) -> int:
        self._grow(storage.nbytes() // 4)
        self._values += 1
        self._known.put(storage._cdata, storage, self._values)
        if copied:
            self.copies[self._values] = storage.clone()
        return self._values

    def _grow(self, elements: int) -> None:
        self._elements += elements
        if self._elements > self._largest:
            raise CannotTape


def _check(tensor: torch.Tensor) -> None:
    """Whether a tensor is plain memory.

    Raises:
        CannotTape: If it is not.
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        raise CannotTape
    if tensor.is_conj() or tensor.is_neg():
        raise CannotTape


def _without_dropout(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation that may drop out drops nothing."""
    names = [a.name for a in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    i = names.index("dropout_p")
    return i >= len(args) or args[i] == 0.0


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
    """Runs the tape of a whole step; all within ``alone()``.

    Attributes:
        spent: What all runs have cost, as ``Call.work``.
    """

    def __init__(self, tape: StepTape) -> None:
        self.spent = 0
        self._tape = tape
        self._known: Values = dict(tape.copies)
        self._tensors: dict[int, torch.Tensor] = {}  # of views of values as they were
        self._rounded: set[int] = set()  # values of this run: rounding them again changes nothing
        self._size = 0.0

    @staticmethod
    @contextmanager
    def alone() -> Iterator[None]:
        """No mode and no autocast. No tensor of a tape needs gradients, so no graph is made."""
        # An LSTM on a CPU gives its backward pass a workspace only where gradients are on.
        with torch.enable_grad(), _disable_current_modes(), torch._C._DisableAutocast():
            yield

    def is_faithful(self) -> bool:
        """Whether the tape gives the training's gradients; must be asked first."""
        if not self._tape.gradients or self._tape.loss is None:
            return False
        self._size = math.hypot(*(_norm(kept) for _, kept in self._tape.gradients.values()))
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
        """What rounding all operations of some sites does; None where the step cannot run so."""
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
        seen = found_in((call.args, call.kwargs), View) if name and writes else ()
        mine = [tensor(view) for view in seen if view.value in writes]
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
