"""Operation records: every ATen operation of a step, with what it read and wrote.

A dispatch mode below autograd sees each operation of forward and backward. It is on from the first
forward pass of a step to the optimizer's step, and only in the steps chosen: the others pay nothing.
Backward passes on autograd's own threads (CUDA) see it too, as a graph task takes along the modes of
the thread that started it.

A second mode, of torch's functions, sees what runs no operation in FP32: ``p.to(z.dtype)`` and
``x.float()``. They are recorded as ``_to_copy`` with the fact ``follows``, the number of the tensor
whose dtype was asked for, or ``wide``.

The step is taped besides, and runs again at its end with one operation rounded at a time: what that does
to the gradients is among the facts (``emulation/step_effects.py``).

An operation of the backward pass belongs to the forward operation whose autograd node it runs for:
both carry the same sequence number.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from mpdiag.emulation.rounding_effect import measure_rounding
from mpdiag.emulation.step_effects import StepEffects
from mpdiag.emulation.step_tape import Call
from mpdiag.numerics.autocast_lists import COMPOSITES, NO_HALF_FUNCTIONS, OPERATIONS
from mpdiag.recording import operation_facts
from mpdiag.recording.matrix_products import MatrixProducts, Parameter
from mpdiag.recording.operation_tensors import OperationTensors, SeenTensor
from mpdiag.recording.trace import TraceWatch
from mpdiag.runs.block_operands import BlockOperand
from mpdiag.runs.operations import NONE, Operation, Phase
from mpdiag.tracing import conversions
from mpdiag.tracing.autograd_graph import BackwardPasses, holds_any
from mpdiag.tracing.dispatch import by_name, in_backward, is_hidden, tensors_of, written
from mpdiag.tracing.fingerprint import joined
from mpdiag.tracing.precision_share import operand_format
from mpdiag.tracing.source_lines import SourceLine, SourceLines
from mpdiag.tracing.tap import OperationTap

_Found = TypeVar("_Found")
_MAX_OPERATIONS, _MOST_BEFORE = 50_000, 10_000  # of a step, and before its first pass

# What neither reads nor writes a value worth a record.
_IGNORED = OPERATIONS["ignored"]


@dataclass
class _Draft:
    """An operation whose counts still lie on the device."""

    fields: dict[str, Any]
    facts: dict[str, Any]
    inputs: list[tuple[str, SeenTensor]]
    outputs: list[tuple[str, SeenTensor]]
    taped: Call | None = None


class OperationWatch:
    """Records the operations of chosen steps.

    Args:
        modules: Names of modules by ``id``.
        parameters: Names of parameters and buffers by ``id``.
        rank: This process's rank.
        failed: Told what failed; after that nothing more is recorded.
        products: Measures the operands of matrix products, if that is asked for.
        trace: Is shown every result in a traced step, and the tape.

    Attributes:
        wanted: Whether the present step's operations are recorded.
        usable: Whether any step's can be.
        products: See above; None after a failure there.
    """

    def __init__(
        self,
        modules: Mapping[int, str],
        parameters: Mapping[int, str],
        rank: int,
        failed: Callable[[str, Exception], None],
        products: MatrixProducts | None = None,
        trace: TraceWatch | None = None,
    ) -> None:
        self._trace = trace
        self.wanted = False
        self.usable = True
        self.products = products
        self._modules = modules
        self._rank = rank
        self._failed = failed
        self._tap = OperationTap(self)
        self._on = False
        self._muted = threading.local()
        self._conversions = conversions.Conversions(self)
        self._passes = BackwardPasses(self.backward_pass)
        self._thread: int | None = None  # where the mode lies on the stack
        self._lock = threading.RLock()
        self._tensors = OperationTensors(parameters)
        self._effects = StepEffects(parameters)
        if trace is not None:
            trace.tape = lambda: self._effects.tape
        self._forget()

    def _forget(self) -> None:
        self._step = 0
        self._drafts: list[_Draft] = []
        self._left_at: int | None = None
        self._rests = False
        self._converted: dict[int, Parameter] = {}  # by the operation that did
        self._held: dict[str, dict[str, Any]] = {}  # where FSDP2 puts what it gathers, by module
        self._lines = SourceLines(self._modules)
        self._tensors.clear()
        self._effects.drop()
        self._holds_nothing = self._measured = True

    # -- the mode's life ---------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether operations are being recorded right now."""
        return self._on

    @property
    def left_backward(self) -> bool:
        """Whether a backward pass of the step was left alone."""
        return self._left_at is not None

    def begin(
        self, step: int, wanted: bool, *, effects: bool = True, measured: bool = True
    ) -> None:
        """A new step begins; nothing is recorded before ``resume``.

        Args:
            step: Its number.
            wanted: Whether to record its operations.
            effects: Whether to run it again at its end, to see what rounding them does.
            measured: Whether to count what they read and write; a trace needs only their results.
        """
        self.wanted = wanted and self.usable
        if not self.wanted and self._holds_nothing:
            return
        self.pause()
        earlier = self._lines
        self._forget()
        self._step, self._measured = step, measured
        self._holds_nothing = not self.wanted
        if self.products is not None:
            self.products.begin(step)
        if not self.wanted:
            self._passes.detach()
        else:
            self._passes.attach()
            early = step == 0  # weights as they were made say little of rounding
            twin = self._trace is not None and self._trace.wants_twin(step)
            self._effects.begin(wanted=effects and not early, twins=twin)
            self._lines.take_over(earlier)  # its graph may outlive the step before, if that was one

    def resume(self) -> None:
        """Record from here on, if this step is wanted. Called outside backward passes."""
        if not self.wanted or self._rests:
            self.pause()
            return
        if self._on and self._thread == threading.get_ident():
            return
        if not self._tap.attach():
            return
        if self._measured:  # a trace asks for no conversion
            self._conversions.attach()
        self._thread = threading.get_ident()
        self._lines.restart()
        self._conversions.restart()
        self._on = self._conversions.on = True

    def pause(self) -> None:
        """Record no operations until ``resume``.

        Inside a backward pass, or on another thread, the mode stays on its stack and does nothing:
        autograd would bring it back when the pass ends. The next call outside takes it off.
        """
        self._on = self._conversions.on = False
        here = threading.get_ident() == self._thread
        if here and not in_backward():
            self._note_gradients()
            self._tap.detach()
            self._conversions.detach()
            self._thread = None

    def _note_gradients(self) -> None:
        with self._lock, self.quiet(), torch.no_grad():
            self._effects.note_gradients()

    def rest(self) -> None:
        """Record no more operations of this step; those that were recorded stay."""
        self.pause()
        self._rests = self.wanted

    @contextmanager
    def backward_pass(self, outputs: Iterable[Any]) -> Iterator[None]:
        """Leave a backward pass alone that would compute other bits while the mode looks on.

        Args:
            outputs: The tensors, or edges of the graph, from which it runs.
        """
        if not self._changes(outputs):
            yield
            return
        on, drafts = self._on, self._drafts
        self._on = False
        self._effects.drop()  # gradients come from where nobody looked
        self._tap.detach()
        try:
            yield
        finally:
            if self._thread == threading.get_ident():  # nobody has taken it off meanwhile
                self._tap.attach()
                self._on = on and self._conversions.on
            if self._drafts is drafts:
                self._left_at = len(drafts)

    def _changes(self, outputs: Iterable[Any]) -> bool:
        """Whether a backward pass from these would compute other bits under the mode."""
        if self._thread != threading.get_ident() or is_hidden():
            return False  # the mode does not lie on this thread's stack
        try:
            with torch._C.DisableTorchFunction():
                return holds_any(outputs, operation_facts.ANOTHER_BACKWARD)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._give_up(error)
        return True

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What this thread does meanwhile is no part of the training."""
        self._muted.now = True
        try:
            yield
        finally:
            self._muted.now = False

    def stop(self) -> None:
        """Record nothing any more."""
        self.begin(self._step, wanted=False)
        self.usable = False

    def silence(self) -> None:
        """Record nothing any more in a forked child, whose stack of modes is not ours to change."""
        self.wanted = self.usable = self._on = self._conversions.on = False

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        self._lines.enter(module)
        if self.products is not None and id(module) in self._modules:
            self.products.enter(self._lines.module)
            self._held[self._lines.module or ""] = module._parameters

    def leave(self, module: nn.Module) -> None:
        """A module has returned, or failed."""
        self._lines.leave(module)

    # -- operations (shown by the tap, whose mode is off meanwhile) --------------------------------

    def run(self, func: Any, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record it while the mode is on."""
        if not self._on or getattr(self._muted, "now", False) or is_hidden():
            return func(*args, **kwargs)
        draft = self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        if draft is not None:
            self.after(func, draft, args, kwargs, result)
        return result

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Draft | None:
        """Look at an operation's inputs; an in-place one will change them."""
        return self._alone(self._draft, func, args, kwargs, torch.is_grad_enabled())

    def after(
        self, func: Any, draft: _Draft, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Look at its results."""
        self._alone(self._complete, func, draft, args, kwargs, result)

    def _alone(self, look: Callable[..., _Found], *args: Any) -> _Found | None:
        """Call without gradients, by torch's own switch: a ``no_grad`` takes five times as long."""
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with self._lock:
                return look(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._give_up(error)
        finally:
            torch._C._set_grad_enabled(enabled)
        return None

    def _give_up(self, error: Exception) -> None:
        self.wanted = self.usable = self._on = self._conversions.on = False
        self._failed("recording operations", error)

    def _draft(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool
    ) -> _Draft | None:
        line, node = self._lines.line(len(self._drafts))
        packet = func.overloadpacket.__name__
        self._effects.read((args, kwargs))  # a parameter may only be seen by way of a view
        if func.namespace != "aten":
            self._effects.foreign((args, kwargs))
            if func.namespace in operation_facts.COLLECTIVES and not in_backward():
                self._note_sum_over_ranks(packet, args, line)
            self._tensors.forget((args, kwargs))
        elif self._measured and torch.Tag.inplace_view in func.tags:
            self._tensors.turned(args[0])
        if func.is_view or func.namespace != "aten" or packet in _IGNORED:
            return None
        trace = None if gradients else self._trace
        before = trace is not None and trace.on and trace.start is None
        if len(self._drafts) >= (_MOST_BEFORE if before else _MAX_OPERATIONS):
            self._on = before
            return None
        named = by_name(func, args, kwargs)
        fields = self._fields(packet, func._overloadname, line, node)
        fields["phase"] = "backward" if in_backward() else "forward"
        fields["scalars"] = {n: v for n, v in named.items() if operation_facts.is_json(v)}
        if not self._measured:
            taped = self._effects.before(func, args, kwargs)
            self._drafts.append(_Draft(fields, {}, [], [], taped))
            return self._drafts[-1]
        inputs = [(n, self._tensors.read(t)) for n, t in operation_facts.operands(named)]
        operands = [t for _, t in operation_facts.operands(named)]
        fields["scalars"]["views"] = operation_facts.views(operands)
        fields["scalars"] |= self._tensors.parts_of_parameters(operands)
        if self.products is not None and (gradients or in_backward()):
            self._see_product(self.products, func, named, fields, [seen for _, seen in inputs])
        measured = {}
        if not node:
            measured = operation_facts.measure(packet, named)
            measured |= measure_rounding(func, named, with_gradients=gradients)
        taped = self._effects.before(func, args, kwargs)
        self._drafts.append(_Draft(fields, measured, inputs, [], taped))
        return self._drafts[-1]

    def _see_product(
        self,
        products: MatrixProducts,
        func: Any,
        named: Mapping[str, Any],
        fields: Mapping[str, Any],
        inputs: Iterable[SeenTensor],
    ) -> None:
        """Measure operands; a failure there ends that alone."""
        try:
            parameters = {}
            for (name, tensor), seen in zip(operation_facts.operands(named), inputs, strict=True):
                whole = tensor if tensor._base is None else tensor._base
                module = fields["module"] or ""
                held = (n for n, p in self._held.get(module, {}).items() if p is whole)
                known = self._modules.get(id(whole), "") or seen.parameter
                known = known or next((joined(module, name) for name in held), "")
                origin = self._converted.get(seen.producer)
                if origin is not None:
                    parameters[name] = (
                        origin if whole.dim() < 3 else Parameter(origin.name, tensor, whole)
                    )
                elif known or isinstance(whole, nn.Parameter):
                    parameters[name] = Parameter(known, tensor, whole)
            if fields["op"] in operation_facts.CONVERSIONS and parameters:
                self._converted[fields["index"]] = next(iter(parameters.values()))
            function = fields["function"] or self._conversions.function
            products.see(func, named, {**fields, "function": function}, parameters)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._give_products_up(error)

    def _note_sum_over_ranks(self, packet: str, args: tuple[Any, ...], line: SourceLine) -> None:
        """Note a sum in half precision; its result is still under way when the operation returns."""
        ranks = operation_facts.ranks_added(args)
        if ranks:
            inputs = [("self", self._tensors.read(t)) for t in tensors_of(args)]
            fields = self._fields(packet, "default", line, "")
            self._drafts.append(_Draft(fields, {"ranks": ranks}, inputs, []))

    def _complete(
        self, func: Any, draft: _Draft, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        op, index = draft.fields["op"], draft.fields["index"]
        read, own = tensors_of((args, kwargs)), written(func, args, kwargs)
        found = operation_facts.results(op, result)
        silent = [] if func._schema.is_mutable else own  # running statistics, which stay in FP32
        found += [t for t in own if not silent and all(t is not f for f in found)]
        same = draft.inputs[0][1].number if op in operation_facts.COPIES and draft.inputs else None
        for tensor in found if self._measured else ():
            seen = self._tensors.wrote(tensor, index, same, in_place=any(tensor is t for t in own))
            draft.outputs.append(("out", seen))
        if self._measured:
            laid = operation_facts.views(found)
            if laid:
                draft.fields["scalars"]["laid"] = laid
            draft.fields |= operation_facts.cost(func, args, kwargs, result)
        elif self._effects.tape is not None:
            summed = operation_facts.reduction(func, read, found, args)
            draft.fields |= {"flops": 0, "reduction": summed}
        self._effects.after(draft.taped, draft.fields, args, kwargs, result)
        # A view of what was just taken shows nothing more.
        if self._trace is not None and self._trace.on and op != "_unsafe_view":
            fields, latest = draft.fields, self._trace.latest(read)
            about = {**fields, "operand_format": operand_format(func, read)}
            if draft.taped is not None:
                draft.taped.operand_format = about["operand_format"]
            for tensor in (*found, *silent):
                options = {"name": op, "phase": fields["phase"], "about": about, "read": latest}
                self._trace.take("operation", fields["module"], tensor, **options)
        draft.taped = None
        self._tensors.drain()

    # -- conversions (told by the tap on functions) -------------------------------------------------

    def mark(self) -> int:
        """How many operations have run in this step; negative where this is no part of the training."""
        return -1 if getattr(self._muted, "now", False) else len(self._drafts)

    def asked(self, tensor: torch.Tensor) -> int:
        """The number of a tensor whose dtype is asked for."""
        try:
            with self._lock, self.quiet(), torch.no_grad():
                return self._tensors.read(tensor).number
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
        return NONE

    def converted(
        self, tensor: torch.Tensor, follows: int | None, since: int, frame: FrameType
    ) -> None:
        """A tensor was given another's dtype, or FP32; with or without an operation of its own."""
        try:
            with self._lock, self.quiet(), torch.no_grad():
                fact = {"wide": 1} if follows is None else {"follows": follows}
                seen = self._tensors.read(tensor)
                if seen.producer >= since:
                    self._drafts[seen.producer].facts |= fact
                elif len(self._drafts) < _MAX_OPERATIONS:
                    draft = self._unseen_conversion(tensor, seen, fact)
                    self._drafts.append(draft)
                    alias = conversions.alias_at(frame)
                    self._tensors.distinguish(draft.outputs[0][1], seen, alias)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)

    def _unseen_conversion(
        self, tensor: torch.Tensor, seen: SeenTensor, fact: dict[str, Any]
    ) -> _Draft:
        """What a conversion from FP32 to FP32 would be if it were none: the same values anew."""
        index = len(self._drafts)
        fields = self._fields("_to_copy", "default", self._lines.place(index), "")
        outputs = [("out", self._tensors.wrote(tensor, index, None))]
        return _Draft(fields, fact, [("self", seen)], outputs)

    def _fields(self, op: str, overload: str, line: SourceLine, node: str) -> dict[str, Any]:
        return {
            "step": self._step,
            "rank": self._rank,
            "index": len(self._drafts),
            "op": op,
            "overload": overload,
            "phase": "forward",
            "module": line.module,
            "node": node,
            "forward": line.number if node else NONE,
            "file": line.file,
            "line": line.line,
            "code": line.code,
            "function": line.function or self._composite(),
        }

    def _composite(self) -> str:
        """The function being called where torch casts it by its own name, not by its parts'."""
        name = self._conversions.function
        return name if name in COMPOSITES or name in NO_HALF_FUNCTIONS else ""

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
            lines = self._lines
            self._forget()
            self._lines.take_over(lines)
            self._holds_nothing = False

    def operands(self) -> list[BlockOperand]:
        """The operands of the step's matrix products; [] if they were not asked for."""
        try:
            with self._lock, torch.no_grad():
                return [] if self.products is None else self.products.end()
        except Exception as error:  # noqa: BLE001
            self._give_products_up(error)
        return []

    def _give_products_up(self, error: Exception) -> None:
        self.products = None
        self._failed("recording operands of matrix products", error)

    def _finished(self) -> list[Operation]:
        self._tensors.drain(at_least=1)
        backward = [d.fields["index"] for d in self._drafts if d.fields["phase"] == "backward"]
        backward += [] if self._left_at is None else [self._left_at - 1]
        last = max(backward, default=len(self._drafts))
        measured = operation_facts.read_back([d.facts for d in self._drafts])
        if self._trace is not None:
            self._trace.spread()
        for index, facts in self._effects.facts().items():
            measured[index] |= facts
        operations = []
        for draft, known in zip(self._drafts, measured, strict=True) if self._measured else ():
            phase: Phase = draft.fields["phase"]
            if phase == "forward" and draft.fields["index"] > last:
                phase = "update"
            operations.append(
                Operation(
                    **{**draft.fields, "phase": phase},
                    facts=known,
                    inputs=tuple(self._tensors.record(*t) for t in draft.inputs),
                    outputs=tuple(self._tensors.record(*t) for t in draft.outputs),
                )
            )
        return operations
