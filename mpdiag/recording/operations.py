"""Operation records: every ATen operation of a step, with what it read and wrote.

A dispatch mode below autograd sees each operation of forward and backward. It is in force from the
first forward pass of a step to the optimizer's step, in the steps chosen alone: the others pay
nothing. Backward passes on autograd's own threads (CUDA) see it too, as a graph task takes along
the modes of the thread that started it.

The mode lies at the *bottom* of the stack of modes: a user's own, entered before or after, is left
by its ``with`` as if ours were not there, and where one rewrites operations (FP16 emulation) what
is recorded is what really runs.

An operation of the backward pass belongs to the forward operation whose autograd node it runs for:
both carry the same sequence number.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpdiag.recording import costs, operation_facts
from mpdiag.recording.counting.host import rows_on
from mpdiag.recording.tensors import Countable, countable, tensors_in
from mpdiag.runs.operations import NONE, Operation, Phase, TensorRecord
from mpdiag.tracing.dispatch import by_name, in_backward, is_traced, push_lowest, take_off, written
from mpdiag.tracing.source_lines import Places
from mpdiag.tracing.storages import WeakStorages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from mpdiag.numerics.histograms import ExponentHistogram
    from mpdiag.recording.counting.rows import Rows

DEFAULT = 3
_FIRST, _GROWTH = 10, 10
_MAX_OPERATIONS = 50_000
_DRAIN_ROWS = 512

# What moves values without computing: their results have the histogram of what they were given.
_COPIES = frozenset({"clone", "_unsafe_view", "alias_copy", "contiguous", "lift_fresh"})
# What neither reads nor writes a value worth a record.
_IGNORED = frozenset(
    """
    empty empty_like empty_strided new_empty new_empty_strided _local_scalar_dense record_stream
    is_pinned _pin_memory set_ resize_ _has_compatible_shallow_copy_type is_same_size item
    """.split()
)


def planned(count: int, index: int, step: int) -> bool:
    """Whether the next operation record is due: at steps 0, 10, 100, 1000 …, ``count`` in all.

    Early steps show what initial weights do, later ones what training made of them.

    Args:
        count: How many steps to record so.
        index: How many were.
        step: The present step.
    """
    return index < count and step >= (0 if index == 0 else _FIRST * _GROWTH ** (index - 1))


@dataclass
class _Held:
    """A storage seen in this step: who wrote it last, and what that was."""

    version: int
    numel: int
    tensor: int
    producer: int


@dataclass
class _Draft:
    """An operation whose counts still lie on the device."""

    fields: dict[str, Any]
    facts: dict[str, Any]
    inputs: list[tuple[str, int, int, torch.Size, torch.dtype, str]]
    outputs: list[tuple[str, int, int, torch.Size, torch.dtype, str]]


class _Mode(TorchDispatchMode):
    """Hands every operation to the watch while it is on."""

    def __init__(self, watch: OperationWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch
        self.on = False
        self.muted = threading.local()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See ``TorchDispatchMode``."""
        kwargs = kwargs or {}
        if not self.on or getattr(self.muted, "now", False) or is_traced():
            return func(*args, **kwargs)
        draft = self.watch.before(func, args, kwargs)
        result = func(*args, **kwargs)
        if draft is not None:
            self.watch.after(func, draft, args, kwargs, result)
        return result


class OperationWatch:
    """Records the operations of chosen steps.

    Args:
        modules: Names of modules by ``id``.
        parameters: Names of parameters and buffers by ``id``.
        rank: This process's rank.
        failed: Told what failed; after that nothing more is recorded.

    Attributes:
        wanted: Whether the present step's operations are recorded.
        recording: Whether they are at this moment.
    """

    def __init__(
        self,
        modules: Mapping[int, str],
        parameters: Mapping[int, str],
        rank: int,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.wanted = False
        self.usable = True
        self._modules = modules
        self._parameters = parameters
        self._rank = rank
        self._failed = failed
        self._mode = _Mode(self)
        self._thread: int | None = None  # where the mode lies on the stack
        self._lock = threading.RLock()
        self._held: WeakStorages[_Held] = WeakStorages()
        self._forget()

    def _forget(self) -> None:
        self._step = 0
        self._drafts: list[_Draft] = []
        self._places = Places(self._modules)
        self._held.clear()
        self._rows: dict[torch.device, Rows] = {}
        self._waiting: list[tuple[torch.device, int, int]] = []
        self._histograms: dict[int, dict[str, Any] | None] = {}  # as rows have them
        self._tensors = 0

    # -- the mode's life ---------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether operations are being recorded right now."""
        return self._mode.on

    def begin(self, step: int, wanted: bool) -> None:
        """A new step begins; nothing is recorded before ``resume``."""
        self.pause()
        self._forget()
        self._step = step
        self.wanted = wanted and self.usable

    def resume(self) -> None:
        """Record from here on, if this step is wanted. Called outside backward passes."""
        if not self.wanted:
            self.pause()
            return
        if self._mode.on and self._thread == threading.get_ident():
            return
        if not push_lowest(self._mode):
            return
        self._thread = threading.get_ident()
        self._places.restart()
        self._mode.on = True

    def pause(self) -> None:
        """Record no more.

        Inside a backward pass, or on another thread, the mode stays on its stack and does nothing:
        autograd would bring it back when the pass ends. The next call outside takes it off.
        """
        self._mode.on = False
        here = threading.get_ident() == self._thread
        if here and not in_backward():
            take_off(self._mode)
            self._thread = None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What this thread does meanwhile is no part of the training."""
        self._mode.muted.now = True
        try:
            yield
        finally:
            self._mode.muted.now = False

    def silence(self) -> None:
        """For a forked child."""
        self.wanted = self.usable = self._mode.on = False

    # -- modules -----------------------------------------------------------------------------------

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        self._places.enter(module)

    def leave(self, module: nn.Module) -> None:
        """A module has returned, or failed."""
        self._places.leave(module)

    # -- operations (called by the mode, which is off meanwhile) -----------------------------------

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Draft | None:
        """Look at an operation's inputs; an in-place one will change them."""
        try:
            with self._lock, torch.no_grad():
                return self._draft(func, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._give_up(error)
        return None

    def after(
        self,
        func: Any,
        draft: _Draft,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Look at its results."""
        try:
            with self._lock, torch.no_grad():
                self._complete(func, draft, args, kwargs, result)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.wanted = self.usable = self._mode.on = False
        self._failed("recording operations", error)

    def _draft(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Draft | None:
        site, node = self._places.site(len(self._drafts))
        packet = func.overloadpacket.__name__
        if func.is_view or func.namespace != "aten" or packet in _IGNORED:
            return None
        if len(self._drafts) >= _MAX_OPERATIONS:
            self._mode.on = False
            return None
        named = by_name(func, args, kwargs)
        inputs = [
            (name, *self._tensor(t))
            for name, value in named.items()
            for t in ([value] if isinstance(value, torch.Tensor) else tensors_in(value))
        ]
        plain = {n: v for n, v in named.items() if _is_json(v)}
        backward = in_backward()
        fields = {
            "step": self._step,
            "rank": self._rank,
            "index": len(self._drafts),
            "op": packet,
            "overload": func._overloadname,
            "phase": "backward" if backward else "forward",
            "module": site.module,
            "node": node,
            "forward": site.index if node else NONE,
            "file": site.file,
            "line": site.line,
            "code": site.code,
            "function": site.function,
            "scalars": plain,
        }
        measured = operation_facts.measure(packet, named) if not node else {}
        draft = _Draft(fields, measured, inputs, [])
        self._drafts.append(draft)
        return draft

    def _complete(
        self,
        func: Any,
        draft: _Draft,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        op, index = draft.fields["op"], draft.fields["index"]
        found = list(tensors_in(result))
        if func._schema.is_mutable:
            found += [t for t in written(func, args, kwargs) if all(t is not f for f in found)]
        same = draft.inputs[0][1] if op in _COPIES and draft.inputs else None
        for tensor in found:
            draft.outputs.append(("out", *self._written_tensor(tensor, index, same)))
        draft.fields |= costs.cost(func, args, kwargs, result)
        if len(self._waiting) >= _DRAIN_ROWS:
            self._drain()

    # -- tensors -----------------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> tuple[int, int, torch.Size, torch.dtype, str]:
        """Number, producer, shape, dtype and parameter of a tensor that is read."""
        name = self._parameters.get(id(tensor), "")
        version = _version(tensor)
        if version is None:
            return self._new(None), NONE, _shape(tensor), tensor.dtype, name
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is not None and version - held.version in (0, 1):
            if held.numel == tensor.numel():
                return held.tensor, held.producer, _shape(tensor), tensor.dtype, name
            return (
                self._new(_ready(tensor)),
                held.producer,
                _shape(tensor),
                tensor.dtype,
                name,
            )
        number = self._new(_ready(tensor))
        self._hold(tensor, _Held(version, tensor.numel(), number, NONE))
        return number, NONE, _shape(tensor), tensor.dtype, name

    def _written_tensor(
        self, tensor: torch.Tensor, index: int, same: int | None
    ) -> tuple[int, int, torch.Size, torch.dtype, str]:
        name = self._parameters.get(id(tensor), "")
        number = self._new(_ready(tensor)) if same is None else same
        version = _version(tensor)
        if version is not None:
            self._hold(tensor, _Held(version, tensor.numel(), number, index))
        return number, index, _shape(tensor), tensor.dtype, name

    def _hold(self, tensor: torch.Tensor, held: _Held) -> None:
        storage = tensor.untyped_storage()
        self._held.put(storage._cdata, storage, held)

    def _new(self, ready: Countable | None) -> int:
        number = self._tensors
        self._tensors += 1
        if ready is None:
            self._histograms[number] = None
            return number
        device = ready.values.device
        rows = self._rows.get(device)
        if rows is None:
            rows = self._rows[device] = rows_on(device)
        row = rows.count(ready.values, ready.repeat, ready.zeros)
        self._waiting.append((device, row, number))
        return number

    def _drain(self) -> None:
        for device, rows in self._rows.items():
            mine = [(row, number) for d, row, number in self._waiting if d == device]
            if not mine:
                continue
            merged = rows.read().merged([[row] for row, _ in mine])
            rows.clear()
            for i, (_, number) in enumerate(mine):
                self._histograms[number] = _compact(merged[i])
        self._waiting = []

    # -- the end of a step -------------------------------------------------------------------------

    def end(self) -> list[Operation]:
        """The step's operations; the one place that waits for the device."""
        self.pause()
        try:
            with self._lock, torch.no_grad():
                return self._finished()
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            return []
        finally:
            self._forget()

    def _finished(self) -> list[Operation]:
        self._drain()
        last = max(
            (d.fields["index"] for d in self._drafts if d.fields["phase"] == "backward"),
            default=len(self._drafts),
        )
        measured = operation_facts.read_back([d.facts for d in self._drafts])
        operations = []
        for draft, known in zip(self._drafts, measured, strict=True):
            phase: Phase = draft.fields["phase"]
            if phase == "forward" and draft.fields["index"] > last:
                phase = "update"
            operations.append(
                Operation(
                    **{**draft.fields, "phase": phase},
                    facts=known,
                    inputs=tuple(_record(t, self._histograms) for t in draft.inputs),
                    outputs=tuple(_record(t, self._histograms) for t in draft.outputs),
                )
            )
        return operations


# -- small things ----------------------------------------------------------------------------------


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= 16 and all(_is_json(v) for v in value)
    if isinstance(value, float):
        return value == value and abs(value) != float("inf")
    return isinstance(value, (bool, int, str))


def _shape(tensor: torch.Tensor) -> torch.Size:
    return torch.Size((tensor.size(0), -1)) if tensor.is_nested else tensor.shape


def _version(tensor: torch.Tensor) -> int | None:
    """The version of a tensor's memory; None where it has no memory of its own."""
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return 0 if tensor.is_inference() else tensor._version


def _ready(tensor: torch.Tensor) -> Countable | None:
    ready = countable(tensor)
    return None if isinstance(ready, str) else ready


def _compact(h: ExponentHistogram) -> dict[str, Any]:
    """A histogram from its first to its last occupied bin, as ``records`` stores it."""
    import numpy as np

    occupied = np.flatnonzero(h.counts)
    first, last = (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else (0, 0)
    counts = h.counts[first:last]
    scales = np.exp2(np.arange(first, last, dtype=np.float64) + h.first)
    means = h.sums[first:last] / np.maximum(counts, 1) / scales
    codes = np.rint((np.clip(means, 1.0, 2.0) - 1.0) * 255.0) * (counts > 0)
    return {
        "counted": True,
        "first_exponent": h.first + first if len(occupied) else 0,
        "counts": tuple(int(c) for c in counts),
        "means": codes.astype(np.uint8).tobytes(),
        **{n: int(getattr(h, n)) for n in ("zeros", "subnormals", "infs", "nans")},
        "fp16_overflow": int(h.fp16_overflow),
        "absmax": float(h.absmax),
        "absmin": float(h.absmin),
    }


def _record(
    draft: tuple[str, int, int, torch.Size, torch.dtype, str],
    compact: Mapping[int, dict[str, Any] | None],
) -> TensorRecord:
    argument, number, producer, shape, dtype, parameter = draft
    return TensorRecord(
        argument=argument,
        tensor=number,
        producer=producer,
        parameter=parameter,
        shape=tuple(shape),
        dtype=str(dtype).removeprefix("torch."),
        **(compact.get(number) or {}),
    )
