"""The trace of a few steps: what ``mpdiag diff`` compares; see ``runs/trace.py`` for what is written.

Hooks and the operation watch hand in tensors as they pass. Of each a few elements and the norm are
taken, on the device, and read back when the step is over. The first traced step then runs again as its
own twin, on other memory (``emulation/step_twins.py``). Later ones take shares of sizes from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpdiag.emulation.step_twins import Mark, spreads
from mpdiag.errors import UsageError
from mpdiag.recording.counting.tensors import flat_values, has_memory, own_part
from mpdiag.recording.step_clock import Step, StepListener
from mpdiag.runs.trace import STEPS, TraceKind, positions, table_of
from mpdiag.tracing.dispatch import in_rehearsal
from mpdiag.tracing.storages import WeakStorages, elements_of, read_back

if TYPE_CHECKING:
    from mpdiag.emulation.step_tape import StepTape
    from mpdiag.runs.writer import RunWriter
    from mpdiag.tracing.names import NamedParameter

_LONGEST = 200
"""Characters of an argument's text that are kept."""


class TraceWatch(StepListener):
    """Takes elements and norms of tensors in chosen steps, and writes them.

    Args:
        steps: Numbers of the steps.
        parameters: Named parameters by ``id``.
        rank: This process's rank.
        failed: Told what failed; after that nothing more is traced.

    Attributes:
        writer: Writes what was taken; set before the first step.
        tape: Gives the step's tape, if its operations are taped; set by who records them.
        on: Whether the present step is traced.
        start: How many rows came before the present step's first pass with gradients; None before it.
        reason: Why there are no twins, or no more rows; empty if there is no reason.
    """

    def __init__(
        self,
        steps: Collection[int],
        parameters: Mapping[int, NamedParameter],
        rank: int,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.writer: RunWriter | None = None
        self.tape: Callable[[], StepTape | None] = lambda: None
        self.on = False
        self.reason = ""
        self._steps = frozenset(steps)
        self._parameters = parameters
        self._rank = rank
        self._failed = failed
        self._latest: WeakStorages[int] = WeakStorages()
        self._relative: dict[tuple[Any, ...], float | None] = {}  # see _scale
        self._forget()

    def _forget(self) -> None:
        self._rows: list[dict[str, Any]] = []  # without values and norms
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []  # elements and norm of each row
        self._marks: dict[int, Mark] = {}
        self._latest.clear()
        self._calls: dict[tuple[str, str | None, str, str], int] = {}
        self.start: int | None = None

    def wants(self, step: int) -> bool:
        """Whether a step is traced."""
        return step in self._steps

    def wants_twin(self, step: int) -> bool:
        """Whether a step is to run again: the first one traced, and one after new tensors."""
        return self.wants(step) and not self._relative

    def to_json(self) -> dict[str, Any]:
        """For ``meta.json``: the steps asked for, and why twins or rows are missing."""
        return {"steps": sorted(self._steps), "reason": self.reason}

    # -- a step ------------------------------------------------------------------------------------

    def step_began(self, step: Step) -> None:
        """Take the parameters as they are before the step."""
        self._forget()
        self.on = step.recorded and self.wants(step.number)
        self._number = step.number
        self._take_parameters("weight")

    def forward_began(self) -> None:
        """What came before belongs to the step if it is read from here on."""
        self.start = len(self._rows) if self.start is None else self.start

    def step_ended(self, step: Step) -> None:
        """Take the parameters as the step left them, and write everything."""
        self._take_parameters("updated_weight")
        if not self.on or step.number != self._number:
            return
        self.on = False
        try:
            assert self.writer is not None
            self.writer.append_trace(table_of(self._read_back()))
        except Exception as error:  # noqa: BLE001 - training goes on, and so does the recording
            self._give_up("writing a trace", error)
        self._forget()

    def stopped(self) -> None:
        """Trace nothing any more."""
        self.on = False
        self._forget()

    def _take_parameters(self, kind: TraceKind) -> None:
        if self.on:
            for named in self._parameters.values():
                self.take(kind, named.name.rpartition(".")[0], named.parameter, name=named.name)

    # -- tensors -----------------------------------------------------------------------------------

    def take(
        self,
        kind: TraceKind,
        module: str | None,
        tensor: torch.Tensor,
        *,
        name: str = "",
        phase: str = "",
        about: Mapping[str, Any] | None = None,
        read: Collection[int] = (),
    ) -> None:
        """Look at a tensor, if the step is traced.

        Args:
            kind: What it is.
            module: The module.
            tensor: The tensor; of a distributed one this rank's part.
            name: Of the parameter or operation.
            phase: See ``TraceRow``; default: that of the kind.
            about: Of an operation: ``file``, ``line``, ``code``, ``scalars`` and ``operand_format``.
            read: Of an operation: what ``latest`` gave before it ran.
        """
        if not self.on or in_rehearsal():
            return
        phase, about = phase or _phase(kind), about or {}
        try:
            whole = tuple(map(int, tensor.shape))
            partial = any(p.is_partial() for p in getattr(tensor, "placements", ()))
            local = own_part(tensor)
            if 0 in whole or not _is_readable(local):  # a rank's empty part is a call, too
                return
            # Other modes must not see this, mpdiag's need not. The norm brings elements into the cache.
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                local = local.detach()
                if local.is_complex():
                    local, whole = torch.view_as_real(local.resolve_conj()), (*whole, 2)
                numbers, at = _held(tensor, whole)
                held = local.resolve_neg()
                norm = _norm(held)
                taken = elements_of(held, numbers) if len(numbers) else held.new_empty(0)
            read = read or self.latest([local])
            if kind == "input":  # data that is given again is not made
                read = [i for i in read if self._rows[i]["kind"] != "input"]
            storage = local.untyped_storage()
            self._latest.put(storage._cdata, storage, len(self._rows))
            key = (kind, module, name, phase)
            row: dict[str, Any] = {
                "step": self._number,
                "rank": self._rank,
                "order": len(self._rows),
                "kind": kind,
                "phase": phase,
                "module": module,
                "name": name,
                "call": self._calls.get(key, 0),
                "shape": whole,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "at": at,
                "partial": partial,
                "reads": tuple(read),
                "spread": None,
                "file": about.get("file", ""),
                "line": about.get("line", 0),
                "code": about.get("code", ""),
                "arguments": _text_of(about["scalars"]) if about else "",
                "operand_format": about.get("operand_format", ""),
            }
            self._calls[key] = row["call"] + 1
            self._rows.append(row)
            self._taken.append((taken, norm))
            tape = self.tape()
            view = None if tape is None or not len(numbers) else tape.seen(local)
            if view is not None:
                self._marks[len(self._rows) - 1] = Mark(view, numbers, taken)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._give_up("tracing a step", error)

    def latest(self, tensors: Iterable[torch.Tensor]) -> Collection[int]:
        """The last tensors taken, by ``order``, that share memory with these."""
        plain = (p for p in map(own_part, tensors) if type(p) in (torch.Tensor, torch.nn.Parameter))
        strided = (p for p in plain if p.layout is torch.strided)
        found = {self._latest.get(p.untyped_storage()._cdata) for p in strided}
        return sorted(row for row in found if row is not None)

    def spread(self) -> None:
        """Run the step's twin, before its tape is let go."""
        tape = self.tape()
        if not self.on or not self._marks:
            return
        if tape is None:
            self.reason = "the step is too large, or holds operations that cannot run again"
            return
        try:
            places = {row: i for i, row in enumerate(self._marks)}
            reads = ([places[r] for r in self._rows[i]["reads"] if r in places] for i in places)
            marks = zip(self._marks.values(), reads, strict=True)
            found = spreads(tape, [mark._replace(reads=some) for mark, some in marks])
        except Exception as error:  # noqa: BLE001 - a spread that is not known is left out
            self.reason = f"the step could not run again ({type(error).__name__})"
            return
        if found is None:
            self.reason = "run again, the step gave other gradients"
            return
        for i, spread in zip(self._marks, found, strict=True):
            self._rows[i]["spread"] = min(spread, _LARGEST)

    def _read_back(self) -> list[dict[str, Any]]:
        """The rows with what was taken; the one place that waits for a device."""
        kept = _read_later(self._rows, self.start or 0)
        taken = (self._taken[i] for i in kept)
        every = read_back([t for values, norm in taken for t in (values, norm.reshape(1))])
        self._rows = [self._rows[i] for i in kept]
        self._scale(every[::2])
        _order(self._rows)
        for row, values, norm in zip(self._rows, every[::2], every[1::2], strict=True):
            row |= {"values": values, "norm": norm.item()}
        return self._rows

    def _scale(self, values: Sequence[NDArray[np.float64]]) -> None:
        """Learn how far a twin came apart beside each tensor's size; without one, say it by the last."""
        twin, learned, new = any(r["spread"] is not None for r in self._rows), {}, False
        for row, some in zip(self._rows, values, strict=True):
            key = tuple(row[k] for k in ("kind", "module", "name", "phase", "call"))
            size = math.sqrt(some @ some / some.size) if some.size else 0.0
            spread = row["spread"]
            share = self._relative.get(key, 0.0 if self._relative else None)
            if twin and (spread is None or 0.0 < size < math.inf):
                learned[key] = spread and spread / size
            elif not twin and size and key not in self._relative:
                new = True  # or was zero then: the next traced step has a twin
            elif not twin and share is not None and math.isfinite(size):
                row["spread"] = share * size
        self._relative = learned if twin else {} if new else self._relative

    def _give_up(self, where: str, error: Exception) -> None:
        self.on, self._steps = False, frozenset()
        self.reason = f"{where} failed"
        self._forget()
        self._failed(where, error)


def _read_later(rows: Sequence[Mapping[str, Any]], start: int) -> list[int]:
    """All rows but what comes before the first pass and the step does not read, as an evaluation."""
    shown = any(row["kind"] == "operation" for row in rows[:start])
    kept, read = set[int](), set[int]()
    for row in reversed(rows):
        if row["kind"] != "input":  # which goes along with what its module does first
            wanted = not shown or row["order"] >= start or "weight" in row["kind"]
            wanted |= row["order"] in read
        if wanted:
            kept.add(row["order"])
            read.update(row["reads"])
    for before, row in pairwise(rows):  # all results of an operation, as a norm's mean
        if before["order"] in kept and all(row[k] == before[k] for k in ("name", "reads")):
            kept.add(row["order"])
    return sorted(kept)


def _order(rows: Sequence[dict[str, Any]]) -> None:
    """Set the phase of operations after the backward pass: what clips, for one, reads gradients."""
    backward = [row for row in rows if row["phase"] == "backward"]
    ends = [row["order"] for row in backward if row["kind"] != "weight_grad"]
    stepped = max((row["order"] for row in backward), default=0)
    last = max(ends, default=math.inf)
    for row in rows:
        if row["order"] > last and row["kind"] == "operation":
            row["phase"] = "update" if row["order"] > stepped else "backward"


_LARGEST = 1e300
_LONG, _FEW = 4096, 512
_norms: Callable[..., torch.Tensor] = torch.linalg.vector_norm


def _phase(kind: TraceKind) -> str:
    if kind in ("gradient", "weight_grad"):
        return "backward"
    return "update" if kind == "updated_weight" else "forward"


def _is_readable(local: torch.Tensor) -> bool:
    """Whether its values can be looked at; of sparse, nested and quantized ones they cannot."""
    plain = type(local).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    plain = plain and local.layout == torch.strided and not (local.is_nested or local.is_meta)
    wrapped = local.is_quantized or torch._C._functorch.is_functorch_wrapped_tensor(local)
    return plain and not wrapped and has_memory(local)


def _norm(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        x = x.float()
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    if x.device.type != "cpu" or x.numel() <= _LONG or wide is torch.float64:
        return _norms(x, dtype=wide)
    # A CPU's norm adds squares one after another, and loses what is small beside their sum: so few at
    # a time. To square all values first takes twice as long, for the new memory.
    values, repeat = flat_values(x)
    whole = values.numel() // _FEW * _FEW
    parts = _norms(values[:whole].view(-1, _FEW), dim=1, dtype=wide)
    if whole < values.numel():
        parts = torch.cat((parts, _norms(values[whole:], dtype=wide).view(1)))
    return _norm(parts) if repeat == 1 else _norm(parts) * math.sqrt(repeat)


def _held(
    tensor: torch.Tensor, whole: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int32] | None]:
    """The elements to take of this rank's part, by their numbers there, and which positions they are."""
    numbers = positions(whole)
    if not hasattr(tensor, "placements"):
        return numbers, None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole_tensor: Any = tensor
    mesh, laid = whole_tensor.device_mesh, whole_tensor.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, laid)
    places = np.stack(np.unravel_index(numbers, whole), -1) if whole else np.zeros((1, 0), np.int64)
    inside = places - np.array(offset, np.int64)
    own = ((inside >= 0) & (inside < np.array(shape, np.int64))).all(-1)
    at = np.flatnonzero(own).astype(np.int32)
    if not shape or not at.size:
        return numbers[own], at
    return np.ravel_multi_index(tuple(inside[own].T), tuple(shape)).astype(np.int64), at


def _text_of(scalars: Mapping[str, Any]) -> str:
    """Plain arguments of an operation as text, in the order of their names."""
    plain = {n: v for n, v in sorted(scalars.items()) if n not in ("views", "laid", "parts")}
    return json.dumps(plain)[:_LONGEST] if plain else ""


def checked(trace: object) -> tuple[int, ...]:
    """The steps to trace, from what a caller asks for.

    Raises:
        UsageError: If these are no numbers of steps.
    """
    steps = (STEPS if trace else ()) if isinstance(trace, bool) else trace
    if not isinstance(steps, Collection) or not all(type(s) is int and s >= 0 for s in steps):
        raise UsageError(f"trace must be True or numbers of steps, 0 or more, not {trace!r}")
    return tuple(steps)
