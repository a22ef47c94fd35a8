"""``find_nonfinite``: the first operation that *produced* an infinity or a NaN.

::

    with mpdiag.find_nonfinite(model) as trace:
        loss = loss_fn(model(x), y)
        loss.backward()
    print(trace.first)

Each operation of forward and backward is examined, which waits for the device every time: use this
for a step under suspicion. An operation that was given infinities or NaN passes them on and is not
at fault; nor is one that fills in an infinity it was asked for (a mask), until a NaN results from it.
A cast that overflows is charged to the operation whose result it stores.

In a distributed training each rank examines its own part: local shards of DTensors, its pipeline stage.
What a collective brought from elsewhere is charged to the collective. ``culprit()`` asks all ranks.
"""

import math
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from mpdiag.numerics.formats import FP16
from mpdiag.tracing.dispatch import by_name, in_backward, in_rehearsal, tensors_of, written
from mpdiag.tracing.names import Models, subjects
from mpdiag.tracing.source_lines import SourceLine, SourceLines
from mpdiag.tracing.storages import WeakStorages
from mpdiag.tracing.tap import OperationTap
from mpdiag.tracing.uncompiled import watch_calls

_PLAIN = torch.Tensor.__torch_dispatch__
_CASTS = frozenset({"_to_copy", "copy_", "to"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_WAITS = frozenset({"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"})
_WITHOUT_INPUT = frozenset({"recv_", "recv_any_source_", "broadcast_", "scatter_"})
"""Collectives that read nothing of most ranks: what lies in their tensors before means nothing."""
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[0-9A-Z])(?=[A-Z][a-z])")
_REHEARSED = -2
"""Index of the lines of operations that a pipeline stage only rehearses."""
_MOST = 20


@dataclass(frozen=True)
class Range:
    """What a tensor held.

    Attributes:
        argument: The operation's argument.
        shape, dtype: Of the tensor.
        lowest, highest: Smallest and largest finite value, None where there is none.
        smallest: Smallest non-zero |x|, None where all is 0.
        zeros: How many values are 0.
    """

    argument: str
    shape: tuple[int, ...]
    dtype: str
    lowest: float | None
    highest: float | None
    smallest: float | None
    zeros: int

    def __str__(self) -> str:
        """``mat2 float16 [16, 8] from -2 to 3.5``."""
        span = "nothing finite"
        if self.lowest is not None:
            span = f"from {self.lowest:.4g} to {self.highest:.4g}"
            span += f", smallest {self.smallest:.3g}" if self.smallest is not None else ""
        zeros = f", {self.zeros} zeros" if self.zeros else ""
        return f"{self.argument} {self.dtype} {list(self.shape)} {span}{zeros}"


@dataclass(frozen=True)
class Producer:
    """An operation that made something non-finite out of finite inputs.

    Attributes:
        op: ATen's name; in the backward pass, of the forward operation that is differentiated.
        ran: ATen's name of the operation that ran: ``div`` in the backward pass of ``sqrt``.
        kind: ``Inf`` or ``NaN``.
        phase: ``forward`` or ``backward``.
        module: The module it belongs to, None outside the models.
        file, line, code: The user's line; of a backward operation, its forward one.
        dtype: What the result is stored in.
        values, of: How many of its values are not finite, of how many.
        inputs: What it was given.
        step: Training steps seen before, 0 for the first.
        rank: Of the process, None outside a distributed training.
        received: Whether ``op`` is a collective, which was given finite values here. Another rank
            sent what is not finite, or else the sum over ranks overflowed.
    """

    op: str
    kind: Literal["Inf", "NaN"]
    phase: Literal["forward", "backward"]
    module: str | None
    file: str
    line: int
    code: str
    dtype: str
    values: int
    of: int
    inputs: tuple[Range, ...]
    step: int
    ran: str
    rank: int | None = None
    received: bool = False

    @property
    def where(self) -> str:
        """``model.py:12``, empty where no line is known."""
        return f"{self.file}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        """A sentence that names the operation, its place and its inputs."""
        place = self.module or "the model" if self.module is not None else "outside the model"
        op = f"received by {self.op}" if self.received else f"in {self.op}"
        if self.phase == "backward" and not self.received:
            op = f"in the backward pass of {self.op}" + f" ({self.ran})" * (self.ran != self.op)
        rank = "" if self.rank is None else f"rank {self.rank}: "
        at = f" at {self.where} ({self.code})" if self.where else ""
        given = "; ".join(map(str, self.inputs))
        return (
            f"{rank}{self.kind} first {op}, {place}{at}: {self.values:,} of {self.of:,} "
            f"{self.dtype} values, from {given or 'no tensors'}"
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return {
            **{f: getattr(self, f) for f in self.__dataclass_fields__ if f != "inputs"},
            "inputs": [dict(vars(r), shape=list(r.shape)) for r in self.inputs],
        }


class NonfiniteTrace:
    """What ``find_nonfinite`` has found so far; a context manager.

    Attributes:
        found: Every operation that produced something non-finite, in order (the first 20).
        steps: Training steps seen to their end.
    """

    def __init__(self, model: Models) -> None:
        about = subjects(model, None, None)
        self.found: list[Producer] = []
        self.steps = 0
        self._roots = {id(root) for root in about.roots}
        self._lines = SourceLines(about.names)
        self._tap = OperationTap(self)
        self._handles: list[Any] = []
        self._lock = threading.RLock()
        self._backward_seen = False
        self._makers: WeakStorages[_Made] = WeakStorages()
        self._excused: WeakStorages[bool] = WeakStorages()
        self._received: WeakStorages[_Made] = WeakStorages()
        self._rehearsed = False

    @property
    def first(self) -> Producer | None:
        """The first operation that produced something non-finite, None if all was finite."""
        return self.found[0] if self.found else None

    def culprit(self) -> Producer | None:
        """The first operation of all ranks that produced something non-finite, None if all was finite.

        Every rank of the default process group must call it, and all get the same answer. An earlier
        step comes first, then the forward pass, then the lower rank. What a rank received from another
        counts only if no rank produced anything: then the collective itself is at fault.
        """
        firsts = [self.first]
        if dist.is_available() and dist.is_initialized():
            firsts = [None] * dist.get_world_size()
            dist.all_gather_object(firsts, self.first)
        found = [first for first in firsts if first is not None]
        return min(
            found, key=lambda p: (p.received, p.step, p.phase == "backward", p.rank), default=None
        )

    def __enter__(self) -> "NonfiniteTrace":  # noqa: PYI034 - typing.Self is Python 3.11's
        """Examine every operation from here on."""
        self._handles = watch_calls(self._enter, self._leave)
        self._tap.attach()
        return self

    def __exit__(self, *exception: object) -> None:
        """Examine no more operations, and remove all hooks."""
        self._tap.detach()
        for handle in self._handles:
            handle.remove()
        self._makers.clear()
        self._excused.clear()
        self._received.clear()

    def call_began(self, module: torch.nn.Module) -> None:
        """A module is being called already, and its forward hook was placed too late to say so."""
        self._enter(module, ())

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if id(module) in self._roots and self._backward_seen and not in_backward():
            self.steps += 1
            self._backward_seen = False
        if self._lines.module is None:
            self._rehearsed = in_rehearsal()
        self._lines.enter(module)

    def _leave(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        self._lines.leave(module)
        self._rehearsed = self._rehearsed and self._lines.module is not None

    # -- each operation ----------------------------------------------------------------------------

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and examine its results."""
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # a DTensor or its like: what it runs on its own part comes here
        # A backward operation has the index that was noted of its forward one.
        line, node = self._lines.line(_REHEARSED if self._rehearsed else 0)
        self._backward_seen |= bool(node)
        op = func.overloadpacket.__name__
        if func.namespace in _COLLECTIVES and op not in _WAITS:
            return self._exchange(func, line, node, args, kwargs)
        # A cast that takes the short way round autograd is called a view by its schema.
        view = func.is_view and op not in _CASTS
        if view or func.namespace != "aten" or line.number == _REHEARSED:
            return func(*args, **kwargs)
        call = _examine(func, args, kwargs)
        with self._lock:
            self._arrive(call.bad, "backward" if in_backward() else "forward")
        result = func(*args, **kwargs)
        with self._lock, torch.no_grad():
            outputs = tensors_of(result)
            if func._schema.is_mutable:
                outputs = outputs + written(func, args, kwargs)
            outputs = [t for t in outputs if _is_examined(t) and t.numel()]
            for t in outputs:
                self._received.drop(_key(t))
            wrong = next((t for t in outputs if not bool(torch.isfinite(t).all())), None)
            if wrong is None:
                self._remember(call, line, node, outputs)
            elif not call.op.startswith(("empty", "new_empty")):
                self._judge(call, line, node, wrong)
        return result

    def _exchange(
        self, func: Any, line: SourceLine, node: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a collective, and note its tensors if this rank gives it finite values.

        Its results come later, so they are looked at where they are read.
        """
        call = _examine(func, args, kwargs)
        if call.op in _WITHOUT_INPUT:
            call = _PendingOperation(call.op, [], [], nan_given=False, asked=False, kept=())
        inputs = call.inputs
        result = func(*args, **kwargs)
        if not call.bad:
            with self._lock:
                for t in tensors_of((args, list(kwargs.values()), result)):
                    if _is_examined(t):
                        self._received.put(
                            _key(t), t.untyped_storage(), _Made(call.op, line, node, inputs)
                        )
        return result

    def _arrive(self, bad: Iterable[torch.Tensor], phase: Literal["forward", "backward"]) -> None:
        """Note the collectives that brought what is not finite, where it is first read."""
        for t in bad:
            made = self._received.get(_key(t))
            if made is not None:
                self._received.drop(_key(t))
                self._find(made, t, phase, received=True)

    def _judge(
        self, call: "_PendingOperation", line: SourceLine, node: str, wrong: torch.Tensor
    ) -> None:
        """Note an operation whose result is not finite, if it is at fault for that."""
        nan = bool(torch.isnan(wrong).any())
        excused = all(self._excused.get(_key(t)) for t in call.bad)
        if not nan and ((call.asked and not call.bad) or (call.bad and excused)):
            self._excused.put(_key(wrong), wrong.untyped_storage(), True)
            return
        if call.bad and not (nan and not call.nan_given and excused):
            return  # passed on
        made = None
        if call.op in _CASTS and call.given:
            made = self._makers.get(_key(call.given[-1][1]))
        self._find(
            made or _Made(call.op, line, node, call.inputs),
            wrong,
            "backward" if node else "forward",
        )

    def _find(
        self,
        made: "_Made",
        wrong: torch.Tensor,
        phase: Literal["forward", "backward"],
        *,
        received: bool = False,
    ) -> None:
        if len(self.found) < _MOST:
            self.found.append(
                Producer(
                    op=made.op if received else _differentiated(made.node) or made.op,
                    ran=made.op,
                    kind="NaN" if bool(torch.isnan(wrong).any()) else "Inf",
                    phase=phase,
                    module=made.line.module,
                    file=made.line.file,
                    line=made.line.line,
                    code=made.line.code,
                    dtype=str(wrong.dtype).removeprefix("torch."),
                    values=int((~torch.isfinite(wrong)).sum()),
                    of=wrong.numel(),
                    inputs=made.inputs,
                    step=self.steps,
                    rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else None,
                    received=received,
                )
            )

    def _remember(
        self, call: "_PendingOperation", line: SourceLine, node: str, outputs: list[torch.Tensor]
    ) -> None:
        """Note which operation made a tensor whose values a narrower format may not hold."""
        for t in outputs:
            if t.dtype == torch.float32 and float(t.abs().amax()) >= FP16.max:
                made = _Made(call.op, line, node, call.inputs)
                self._makers.put(_key(t), t.untyped_storage(), made)


@dataclass(frozen=True)
class _Made:
    """What made a tensor.

    Attributes:
        op: ATen's name.
        line: Where it comes from.
        node: The autograd node it ran for; empty in the forward pass.
        inputs: What it was given.
    """

    op: str
    line: SourceLine
    node: str
    inputs: tuple[Range, ...]


@dataclass(frozen=True, eq=False)
class _PendingOperation:
    """An operation that is about to run.

    Attributes:
        op: ATen's name.
        given: Its floating-point tensors, by argument.
        bad: Those that are not finite.
        nan_given: Whether any of them holds a NaN.
        asked: Whether an argument is an infinity itself.
        kept: Ranges of what it was given, if it is going to overwrite that.
    """

    op: str
    given: list[tuple[str, torch.Tensor]]
    bad: list[torch.Tensor]
    nan_given: bool
    asked: bool
    kept: tuple[Range, ...] | None

    @property
    def inputs(self) -> tuple[Range, ...]:
        """What the operation was given."""
        return _ranges(self.given) if self.kept is None else self.kept


def _examine(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _PendingOperation:
    named = by_name(func, args, kwargs)
    given = [(n, t) for n, v in named.items() for t in tensors_of(v) if _is_examined(t)]
    with torch.no_grad():
        bad = [t for _, t in given if not bool(torch.isfinite(t).all())]
        return _PendingOperation(
            op=func.overloadpacket.__name__,
            given=given,
            bad=bad,
            nan_given=any(bool(torch.isnan(t).any()) for t in bad),
            asked=any(isinstance(v, float) and math.isinf(v) for v in named.values()),
            kept=_ranges(given) if func._schema.is_mutable and not bad else None,
        )


def find_nonfinite(model: Models) -> NonfiniteTrace:
    """Look for the first operation that produces an infinity or a NaN; a context manager.

    Run forward and backward passes inside it; mixed-precision training works, too. Results do not
    change, but training is several times slower.

    Args:
        model: A module, a list of modules, or a mapping of names to modules.
    """
    return NonfiniteTrace(model)


def _differentiated(node: str) -> str:
    """The forward operation of an autograd node: ``avg_pool2d`` of ``AvgPool2DBackward0``.

    Empty for a node that differentiates nothing, such as ``torch::autograd::AccumulateGrad``.
    """
    name, backward, _ = node.partition("Backward")
    return _WORDS.sub("_", name).lower() if backward else ""


def _is_examined(t: torch.Tensor) -> bool:
    if type(t).__torch_dispatch__ is not _PLAIN:  # a FakeTensor has no values
        return False
    return t.is_floating_point() and t.layout == torch.strided and not (t.is_meta or t.is_nested)


def _key(t: torch.Tensor) -> int:
    key: int = t.untyped_storage()._cdata
    return key


def _ranges(given: list[tuple[str, torch.Tensor]]) -> tuple[Range, ...]:
    found = []
    for name, t in given:
        finite = t[torch.isfinite(t)].double()
        nonzero = finite[finite != 0].abs()
        found.append(
            Range(
                argument=name,
                shape=tuple(t.shape),
                dtype=str(t.dtype).removeprefix("torch."),
                lowest=float(finite.min()) if finite.numel() else None,
                highest=float(finite.max()) if finite.numel() else None,
                smallest=float(nonzero.min()) if nonzero.numel() else None,
                zeros=int((t == 0).sum()),
            )
        )
    return tuple(found)
