"""The tensors that operations read and write: numbered within a step, and counted once each.

Tensors that share memory of one version are one tensor; so an operation's input is known to be the
output of an earlier operation, its producer. Counts lie on the device until ``drain``.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.recording.counting.host import rows_on
from mpdiag.recording.counting.rows import Rows
from mpdiag.recording.counting.tensors import Countable, countable, sum_of_bits
from mpdiag.runs.operations import NONE, TensorRecord
from mpdiag.tracing.conversions import Alias
from mpdiag.tracing.dispatch import tensors_of
from mpdiag.tracing.storages import WeakStorages

_DRAIN_ROWS = 512


class SeenTensor(NamedTuple):
    """A tensor that an operation reads or writes.

    Attributes:
        number: Its number in the step.
        producer: Index of the operation that wrote it, ``NONE`` if that was not seen.
        shape, dtype: Of the tensor.
        parameter: Its name, if it is a parameter or a buffer.
    """

    number: int
    producer: int
    shape: torch.Size
    dtype: torch.dtype
    parameter: str


@dataclass
class _Memory:
    """A storage seen in this step: the tensor that it was last, and the operation that wrote it.

    Versions show less than what was written (``.data``, fused and raw kernels), so on a CPU the sum of
    all bits is kept beside. Torch raises the version of what an operation writes in place after the
    operation was seen: ``raised`` is one more than ``version`` then.
    """

    version: int
    raised: int
    bits: int | None
    place: tuple[int, int, bool]
    tensor: int
    producer: int


class OperationTensors:
    """The tensors of one step.

    Args:
        parameters: Names of parameters and buffers by ``id``.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        self._parameters = parameters
        self._memory: WeakStorages[_Memory] = WeakStorages()
        self.clear()

    def clear(self) -> None:
        """Begin a new step: numbers start at 0 again, and all counts are forgotten."""
        self._memory.clear()
        self._rows: dict[torch.device, Rows] = {}
        self._waiting: list[tuple[torch.device, int, int]] = []
        self._histograms: dict[int, dict[str, Any] | None] = {}  # as rows have them
        self._aliases: dict[int, tuple[Alias, SeenTensor]] = {}
        self._tensors = 0

    def read(self, tensor: torch.Tensor) -> SeenTensor:
        """A tensor is read: of one that a conversion left as it was, the one that the code means."""
        seen = self._read(tensor)
        while seen.number in self._aliases:
            alias, before = self._aliases[seen.number]
            if alias.means_converted(sys._getframe(1)):
                break
            seen = before
        return seen

    def distinguish(self, converted: SeenTensor, before: SeenTensor, alias: Alias) -> None:
        """One tensor stands for two from here on, as it was and converted; ``alias`` tells which."""
        self._aliases[converted.number] = (alias, before)

    def _read(self, tensor: torch.Tensor) -> SeenTensor:
        name = self._parameters.get(id(tensor), "")
        version = _version(tensor)
        shape, dtype = _shape(tensor), tensor.dtype
        if version is None:
            return SeenTensor(self._count(None), NONE, shape, dtype, name)
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        ready = _ready(tensor)
        place, bits = _place(tensor, ready), _bits(ready)
        if memory is not None and memory.version <= version <= memory.raised:
            if memory.place != place:
                return SeenTensor(self._count(ready), memory.producer, shape, dtype, name)
            if memory.bits == bits:
                return SeenTensor(memory.tensor, memory.producer, shape, dtype, name)
        number = self._count(ready)
        self._remember(tensor, _Memory(version, version, bits, place, number, NONE))
        return SeenTensor(number, NONE, shape, dtype, name)

    def parts_of_parameters(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """``parts``: number, parameter, offset and strides of the tensors that are views of one."""
        found = []
        for i, tensor in enumerate(tensors):
            base = tensor._base if tensor.layout == torch.strided else None
            name = "" if base is None else self._parameters.get(id(base), "")
            if name and base is not None and base.is_contiguous() and not tensor.is_nested:
                offset = tensor.storage_offset() - base.storage_offset()
                found.append([i, name, offset, *tensor.stride()])
        return {"parts": found} if found else {}

    def wrote(
        self, tensor: torch.Tensor, index: int, same: int | None, *, in_place: bool = False
    ) -> SeenTensor:
        """An operation has written a tensor.

        Args:
            tensor: The tensor.
            index: The operation's number.
            same: Number of a tensor with the same values, which needs no count.
            in_place: Whether the operation was given the tensor to write to.
        """
        name = self._parameters.get(id(tensor), "")
        ready = _ready(tensor)
        number = self._count(ready) if same is None else same
        version = _version(tensor)
        if version is not None:
            place, bits = _place(tensor, ready), _bits(ready)
            known = _Memory(version, version + in_place, bits, place, number, index)
            self._remember(tensor, known)
        return SeenTensor(number, index, _shape(tensor), tensor.dtype, name)

    def turned(self, tensor: torch.Tensor) -> None:
        """An operation is about to change how a tensor lies (``transpose_``), and no value of it.

        It raises the version, as a write does.
        """
        version = _version(tensor)
        if version is None:
            return
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is not None and memory.version <= version <= memory.raised:
            self._remember(tensor, replace(memory, raised=version + 1))

    def forget(self, arguments: Any) -> None:
        """An operation that is not torch's own may write to what it is given, whatever it says."""
        for tensor in tensors_of(arguments):
            if _version(tensor) is not None:
                self._memory.drop(tensor.untyped_storage()._cdata)

    def drain(self, at_least: int = _DRAIN_ROWS) -> None:
        """Read counts back from their devices, if there are so many."""
        if len(self._waiting) < at_least:
            return
        for device, rows in self._rows.items():
            mine = [(row, number) for d, row, number in self._waiting if d == device]
            if not mine:
                continue
            merged = rows.read().merged([[row] for row, _ in mine])
            rows.clear()
            for i, (_, number) in enumerate(mine):
                self._histograms[number] = _compact(merged[i])
        self._waiting = []

    def record(self, argument: str, tensor: SeenTensor) -> TensorRecord:
        """What is written of a tensor that was an operation's argument; after ``drain``."""
        return TensorRecord(
            argument=argument,
            tensor=tensor.number,
            producer=tensor.producer,
            parameter=tensor.parameter,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            **(self._histograms.get(tensor.number) or {}),
        )

    def _remember(self, tensor: torch.Tensor, memory: _Memory) -> None:
        storage = tensor.untyped_storage()
        self._memory.put(storage._cdata, storage, memory)

    def _count(self, ready: Countable | None) -> int:
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


def _shape(tensor: torch.Tensor) -> torch.Size:
    return torch.Size((tensor.numel(),)) if tensor.is_nested else tensor.shape  # rows differ


def _version(tensor: torch.Tensor) -> int | None:
    """The version of a tensor's memory; None where it has no memory of its own."""
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return 0 if tensor.is_inference() else tensor._version


def _ready(tensor: torch.Tensor) -> Countable | None:
    ready = countable(tensor)
    return None if isinstance(ready, str) else ready


def _place(tensor: torch.Tensor, ready: Countable | None) -> tuple[int, int, bool]:
    """Which part of its memory a tensor is, and whether its elements lie side by side."""
    offset = 0 if tensor.is_nested else int(tensor.storage_offset())
    return offset, tensor.numel(), ready is not None and ready.shared


def _bits(ready: Countable | None) -> int | None:
    return None if ready is None or not ready.shared else sum_of_bits(ready.values)


def _compact(h: ExponentHistogram) -> dict[str, Any]:
    """A histogram from its first to its last occupied bin, as ``runs.schema`` stores it."""
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
