"""A training step on tape: run again with one operation rounded, it shows what that does to gradients.

Every operation of a recorded step, forward and backward, is noted with what it reads, by storage and not
by tensor: so views need no entry, and what is written in place becomes a new value. Values from outside
(parameters, data, random numbers) are copied when they are first read. At the step's end the tape runs
once as it was; if the gradients are not the training's own, nothing is said. Then each operation of
each module (all its calls, with their backward passes) runs rounded, and all that depends on it anew,
in FP32. What comes out of this are changes of the loss and of the gradients that are exact to the last
rounding: through inverses, differences, recurrences and whatever else follows.

Range is left out: a value that leaves the format's range stays as it is, and gradients are rounded as
if their exponent had no end. Overflow and loss scales are judged by the histograms.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from mpdiag.numerics.formats import HALVES
from mpdiag.tracing.dispatch import tensors_of, written
from mpdiag.tracing.storages import WeakStorages

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

LARGEST = 1 << 24
"""Elements of all values of a step together, beyond which it is not taped."""
LONGEST = 4000
"""Operations of a step, beyond which it is not taped."""
WORK = 1 << 28
"""What all runs of a step may cost, in elements read and written; a call counts at least ``_CALL``."""
_CALL = 1 << 16
_FLOPS = 16
"""Floating-point operations that take as long as an element."""
_SAME = 1e-5
"""How far the taped gradients may be from the training's own: kernels that add in any order."""
_DTYPES: dict[str, torch.dtype] = {f.name: getattr(torch, str(f.torch_name)) for f in HALVES}
_REFUSED: type[Exception] = vars(torch.linalg)["LinAlgError"]
_DROPPED_BITS = {"fp16": 13, "bf16": 16}


class Effect(NamedTuple):
    """What rounding one operation's operands and results does to a step.

    Attributes:
        gradient_error: ‖Δg‖ / ‖g‖ of all parameters' gradients together.
        loss_change: |change of the loss|.
    """

    gradient_error: float
    loss_change: float


BREAKS = Effect(math.inf, math.inf)
"""The loss or a gradient is no longer finite, or an operation raises."""


@dataclass(frozen=True)
class _View:
    """A tensor as a part of a value; a leaf to pytree."""

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
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: dict[int, int] = field(default_factory=dict)
    results: dict[int, _View] = field(default_factory=dict)
    site: Hashable | None = None
    backward: bool = False
    work: int = _CALL


class CannotTape(Exception):
    """A step of which no tape is possible."""


class StepTape:
    """The operations of one step, noted as they run.

    ``before`` and ``after`` are called around each, from the dispatch mode that sees them, without
    gradients and on one thread at a time.
    """

    def __init__(self) -> None:
        self._known: WeakStorages[int] = WeakStorages()
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._calls: list[Call] = []
        self._parameters: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, tuple[_View, torch.Tensor]] = {}
        self._loss: _View | None = None
        self._values = 0
        self._elements = 0

    def clear(self) -> None:
        """Let go of everything."""
        self._known.clear()
        for held in (self._copies, self._calls, self._parameters, self._gradients):
            held.clear()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Note what an operation of torch's own that is no view reads, before it may write there.

        Raises:
            CannotTape: If a tensor has no memory of its own, or the step is too large.
        """
        if len(self._calls) >= LONGEST:
            raise CannotTape
        seen, named = tree_map(self._view, (args, kwargs))
        reads = frozenset(v.value for v in tree_leaves((seen, named)) if isinstance(v, _View))
        return Call(func, seen, named, reads)

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
    ) -> None:
        """Note what an operation made."""
        func = call.func
        random = torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args)
        own = {t.untyped_storage()._cdata for t in written(func, args, kwargs)}
        inside = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
        for tensor in written(func, args, kwargs):
            storage = tensor.untyped_storage()
            old = self._known.get(storage._cdata)
            if old is not None and old not in call.writes and storage._cdata in own:
                own.discard(storage._cdata)
                call.writes[old] = self._new(storage, copied=random)
        for i, tensor in enumerate(tensors_of(result)):
            if tensor.untyped_storage()._cdata not in inside:
                value = self._new(tensor.untyped_storage(), copied=random)
                call.results[i] = self._seen_as(tensor, value)
        if random:
            return
        call.site, call.backward = site, backward
        elements = sum(t.numel() for t in tensors_of((args, kwargs, result)))
        call.work = _CALL + max(elements, flops // _FLOPS)
        self._calls.append(call)
        if func.overloadpacket.__name__ == "ones_like" and not backward and args[0].numel() == 1:
            self._loss = tree_leaves(call.args)[0]

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
                self._gradients[key] = (self._seen_as(gradient, value), kept)

    # -- values --------------------------------------------------------------------------------------

    def _view(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return thing
        _check(thing)
        storage = thing.untyped_storage()
        value = self._known.get(storage._cdata)
        if value is None:
            value = self._new(storage, copied=True)
        return self._seen_as(thing, value)

    def _seen_as(self, tensor: torch.Tensor, value: int) -> _View:
        _check(tensor)
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return _View(value, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def _new(self, storage: torch.UntypedStorage, *, copied: bool) -> int:
        self._grow(storage.nbytes() // 4)
        self._values += 1
        self._known.put(storage._cdata, storage, self._values)
        if copied:
            self._copies[self._values] = storage.clone()
        return self._values

    def _grow(self, elements: int) -> None:
        self._elements += elements
        if self._elements > LARGEST:
            raise CannotTape

    # -- running it again ----------------------------------------------------------------------------

    def effects(self, order: Iterable[Hashable]) -> dict[tuple[Hashable, str], Effect]:
        """What rounding each operation does, by its site and the format's name.

        Args:
            order: The sites, what matters most first: beyond ``WORK`` none is looked at.

        Returns:
            Empty where the tape does not give the training's own gradients.
        """
        found: dict[tuple[Hashable, str], Effect] = {}
        if not self._gradients or self._loss is None:
            return found
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C._DisableAutocast())
            known = dict(self._copies)
            left = WORK - self._run(known, known)
            if not self._is_faithful(known):
                return found
            for site in order:
                for name in _DTYPES:
                    if left <= 0:
                        return found
                    changed: dict[int, torch.UntypedStorage] = {}
                    try:
                        left -= self._run(known, changed, site, name)
                    except _REFUSED:  # a factorization refuses the rounded values
                        found[site, name] = BREAKS
                        continue
                    except RuntimeError:  # shapes that follow values, for one
                        continue
                    found[site, name] = self._compared(known, changed)
        return found

    def _run(
        self,
        known: Mapping[int, torch.UntypedStorage],
        into: dict[int, torch.UntypedStorage],
        site: Hashable | None = None,
        name: str = "",
    ) -> int:
        """Run what depends on a rounded site, or everything; what it cost.

        Args:
            known: Values as they were.
            into: Where values go; the same as ``known`` to run everything.
            site: Whose operations are rounded.
            name: The format's name.
        """
        cost = 0
        for call in self._calls:
            rounded = site is not None and call.site == site
            if into is known or rounded or not call.reads.isdisjoint(into):
                cost += call.work
                _again(call, known, into, name if rounded else "")
        return cost

    def _is_faithful(self, known: Mapping[int, torch.UntypedStorage]) -> bool:
        """Whether the tape gives the gradients that the training had."""
        error = size = 0.0
        for view, kept in self._gradients.values():
            error += _energy(view.of(known[view.value]) - kept)
            size += _energy(kept)
        return math.isfinite(size) and size > 0 and error <= _SAME * _SAME * size

    def _compared(
        self,
        known: Mapping[int, torch.UntypedStorage],
        changed: Mapping[int, torch.UntypedStorage],
    ) -> Effect:
        """The change of gradients and loss."""
        error = size = 0.0
        for view, kept in self._gradients.values():
            size += _energy(kept)
            if view.value in changed:
                error += _energy(view.of(changed[view.value]) - view.of(known[view.value]))
        moved = 0.0
        if self._loss is not None and self._loss.value in changed:
            view = self._loss
            moved = abs(float(view.of(changed[view.value])) - float(view.of(known[view.value])))
        effect = Effect(math.sqrt(error / size), moved)
        return effect if all(map(math.isfinite, effect)) else BREAKS


def _again(
    call: Call,
    known: Mapping[int, torch.UntypedStorage],
    into: dict[int, torch.UntypedStorage],
    name: str,
) -> None:
    """Run an operation on values as they are now; rounded where a format is named."""

    def value(number: int) -> torch.UntypedStorage:
        return into[number] if number in into else known[number]

    for old, new in call.writes.items():
        into[new] = value(old).clone()
    mine = [
        leaf.of(into[call.writes[leaf.value]])
        for leaf in tree_leaves((call.args, call.kwargs))
        if isinstance(leaf, _View) and leaf.value in call.writes
    ]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return _round(x, name, call.backward) if name else x

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, _View):
            return leaf
        if leaf.value in call.writes:
            return leaf.of(into[call.writes[leaf.value]])
        return rounded(leaf.of(value(leaf.value)))

    for t in mine if name else ():
        t.copy_(rounded(t))
    args, kwargs = tree_map(tensor, (call.args, call.kwargs))
    results = tensors_of(call.func(*args, **kwargs))
    for t in mine if name else ():
        t.copy_(rounded(t))
    for i, view in call.results.items():
        into[view.value] = _laid(rounded(results[i]), view)


def _laid(out: torch.Tensor, view: _View) -> torch.UntypedStorage:
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
    if x.dtype is not torch.float32:
        return x
    bits = _DROPPED_BITS[name]
    words = x.contiguous().view(torch.int32)
    half = (1 << (bits - 1)) - 1
    kept = (words + (half + ((words >> bits) & 1))) & ~((1 << bits) - 1)
    unbounded = torch.where(x.isfinite(), kept.view(torch.float32).view(x.shape), x)
    if backward or name != "fp16":
        return unbounded
    low = x.to(_DTYPES[name]).float()
    return torch.where(low.isfinite(), low, unbounded)


def _energy(x: torch.Tensor) -> float:
    return float(x.double().square().sum())


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
