"""A training step on tape: run again with one operation rounded, it shows what that does to gradients.

Every operation of a recorded step, forward and backward, is noted with what it reads, by storage and not
by tensor: so views need no entry, and what is written in place becomes a new value. Values from outside
(parameters, data, random numbers) are copied when they are first read. ``step_replay.py`` runs the tape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.tracing.dispatch import found_in, mapped, tensors_of, written
from mpdiag.tracing.storages import WeakStorages

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

LARGEST = 1 << 24
"""Elements of all values of a step together, beyond which it is not taped."""
LONGEST = 4000
"""Operations of a step, beyond which it is not taped."""
_CALL = 1 << 16
"""What a call costs at least, in elements read and written."""
_FLOPS = 16
"""Floating-point operations that take as long as an element."""


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


class CannotTape(Exception):
    """A step of which no tape is possible."""


class StepTape:
    """The operations of one step, noted as they run.

    ``before`` and ``after`` are called around each, from the dispatch mode that sees them, without
    gradients and on one thread at a time.

    Attributes:
        calls: The operations that make their results anew when they run again.
        copies: Values from outside, and random ones.
        gradients: The gradients as the optimizer saw them, by parameter.
        loss: Where the last backward pass began, None where none did.
    """

    def __init__(self) -> None:
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
        if len(self.calls) >= LONGEST:
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
    ) -> None:
        """Note what an operation made."""
        func = call.func
        random = torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args)
        in_place = written(func, args, kwargs) if func._schema.is_mutable else []
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
        call.site, call.backward = site, backward
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
        if self._elements > LARGEST:
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
