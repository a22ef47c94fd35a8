"""Module calls: the activations they return, and the gradients that come back to them.

Modules are watched through torch's global forward hooks (``module_calls``), and inside compiled regions
through operators in the graph (``compiled``). Gradients of activations come from *tensor* hooks placed
there: full backward hooks insert a node into the graph, fail beside in-place operations and never fire
for outputs in a dict.

A graph may outlive its step: a GAN's images are made before the critic's update and differentiated
after it. A gradient belongs to the step in which it arrives. Modules of which one has arrived late are
therefore watched in unrecorded steps, too, as the next one may be recorded.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from mpdiag.recording import compiled, module_calls
from mpdiag.recording.counting.tensors import countable, tensors_in
from mpdiag.recording.failures import HookGuard, guarded
from mpdiag.recording.ledger import Ledger
from mpdiag.recording.step_clock import Step, StepListener
from mpdiag.recording.trace import TraceWatch
from mpdiag.recording.weights import CopiedParameters
from mpdiag.runs.schema import Kind, Placement
from mpdiag.runs.trace import TraceKind
from mpdiag.tracing.capture import is_captured
from mpdiag.tracing.dispatch import in_backward
from mpdiag.tracing.names import NamedModule, Subjects, shapes_of
from mpdiag.tracing.precision import HALF, PrecisionWatch

_Output = tuple[NamedModule, int]
"""A module, and which of the tensors that it returned."""


class Observer(StepListener):
    """Counts activations and their gradients into a ledger, and tells the clock of forward passes.

    Args:
        subjects: The modules to record.
        copied: Is given the wrappers that are called around the models.
        ledger: Where counts go.
        precision: Told of what is not FP32.
        guard: Around every hook; has the clock, and the watch of operations.
        forgo: Told why no operations can be recorded and what to do, as soon as that is seen.
        trace: Is shown what passes, in a traced step.
    """

    def __init__(
        self,
        subjects: Subjects,
        copied: CopiedParameters,
        ledger: Ledger,
        precision: PrecisionWatch,
        guard: HookGuard,
        forgo: Callable[[str, str], None],
        trace: TraceWatch,
    ) -> None:
        self.guard = guard
        self._forgo = forgo
        self._trace = trace
        self._precision = precision
        self._subjects = subjects
        self._copied = copied
        self._ledger = ledger
        self._roots = {id(root) for root in subjects.roots}
        self._depth = 0  # of calls of these
        self._in_training_forward = False
        self._end: Callable[[], None] | None = None
        self._watched: dict[
            tuple[int, int, int], tuple[weakref.ref[torch.Tensor], list[_Output]]
        ] = {}
        self._outliving: set[int] = set()  # modules whose graph was seen to outlive its step, by id
        self._inside: dict[int, _Inside] = {}  # by id of the module

    # -- hooks come and go -------------------------------------------------------------------------

    def attach(self) -> None:
        """Listen to calls, and place points at the modules for graphs of a compiler."""
        self._place_points()
        self._precision.attach(self.in_training_pass)
        self._end = module_calls.listen(self)

    def adopt(self, roots: Sequence[torch.nn.Module]) -> None:
        """Watch further models, which ``subjects`` holds already."""
        self._roots.update(id(root) for root in roots)
        self._place_points()

    def _place_points(self) -> None:
        shown = True
        for key, named in self._subjects.modules.items():
            if key not in self._inside:
                inside = self._inside[key] = _Inside(self, named)
                shown &= compiled.place(named.module, inside, root=key in self._roots)
        if not shown:
            compiled.compile_again()

    def enter(self, module: torch.nn.Module) -> None:
        """Let calls of a module inside a model count as forward passes: its loop calls it alone."""
        self._roots.add(id(module))

    def stopped(self) -> None:
        """Remove every hook; tensor hooks left in a graph that lives on do nothing any more."""
        if self._end is not None:
            self._end()
        compiled.forget(self._inside.values())
        self._precision.detach()
        self._watched.clear()
        self._outliving.clear()

    def step_began(self, _step: Step) -> None:
        """Tensors that live on stay watched once."""
        if self._watched:
            self._watched = {k: w for k, w in self._watched.items() if w[0]() is not None}

    # -- forward -----------------------------------------------------------------------------------

    def before_forward(self, module: torch.nn.Module, args: Any, *, compiles: bool) -> None:
        """A module is called."""
        if compiles and id(module) in self._roots:
            self._forgo(*compiled.NO_OPERATIONS)
        self._begin_call(module)
        if id(module) in self._roots:
            self.show("input", module, args)

    def _begin_call(self, module: torch.nn.Module) -> None:
        clock = self.guard.clock
        if is_captured() or not clock.active or not self._hears(module):
            return
        if isinstance(module, DistributedDataParallel):
            self._copied.add_wrapped(module)  # around the model that is recorded
        if clock.due and torch.is_grad_enabled() and not in_backward() and _computes(module):
            clock.pass_began()
        if self._opens(module):
            self.guard.operations.resume()
        if id(module) in self._roots:
            self._depth += 1
            if self._depth == 1 and not in_backward():
                self._in_training_forward = torch.is_grad_enabled()
                if self._in_training_forward:
                    clock.forward_began(id(module))
        if self.guard.operations.recording:
            self.guard.operations.enter(module)
        if clock.recording and self.in_training_pass():
            self._precision.look()

    def _hears(self, module: torch.nn.Module) -> bool:
        """Whether a call is this training's: in its threads, in a backward pass, or of its models."""
        if self.guard.clock.hears or in_backward():
            return True
        own = id(module) in self._roots or id(module) in self._subjects.modules
        if own:
            self.guard.clock.join()
        return own

    def _counts(self, module: torch.nn.Module) -> bool:
        """Whether a call is this training's; recomputed for a backward pass, it was counted before."""
        muted = not self.guard.clock.active or is_captured() or in_backward()
        return not muted and self._hears(module)

    def in_training_pass(self) -> bool:
        """Whether a forward pass of a recorded step is under way, or a part is called alone."""
        if not self.guard.clock.recording or in_backward():
            return False
        # Inside a model's forward the model's own call decides: reentrant checkpointing and frozen
        # parts switch gradients off within it.
        return self._in_training_forward if self._depth > 0 else torch.is_grad_enabled()

    def _opens(self, module: torch.nn.Module) -> bool:
        """Whether operations are recorded from this call on: of a part that the loop calls alone.

        A trace also shows calls without gradients, as of a teacher; in eval mode a model is evaluated.
        """
        watch = self.guard.operations
        if self._depth or not watch.wanted or watch.recording or in_backward():
            return False
        if torch.is_grad_enabled():
            return id(module) in self._subjects.modules and id(module) not in self._roots
        own = [id(p) in self._subjects.parameters for p in module.parameters()]
        part = bool(own) and (module.training or not any(own))
        return part and self._trace.on and not self.guard.clock.due

    def after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A module has returned, or failed."""
        if is_captured():
            if id(module) in self._subjects.modules:
                self._subjects.modules[id(module)].captured = True
            return
        if not self.guard.clock.active or not (self.guard.clock.hears or in_backward()):
            return
        if self.guard.operations.recording:
            self.guard.operations.leave(module)
        if self.guard.clock.recording:
            named = self._subjects.modules.get(id(module))
            if named is not None and output is not None:
                if self.in_training_pass() or in_backward():
                    self._note_output(named, args, output)
                else:
                    self.show("output", module, output)
        elif id(module) in self._outliving and output is not None and not in_backward():
            self._watch_outputs(self._subjects.modules[id(module)], output)
        if id(module) in self._roots:
            self._depth = max(0, self._depth - 1)

    # -- inside compiled regions -------------------------------------------------------------------

    def model_called(self, module: torch.nn.Module, *, training: bool, ends: bool) -> None:
        """A whole model is called inside a graph, or returns."""
        if self._counts(module):
            self._in_training_forward = training and not ends
            self._forgo(*compiled.NO_OPERATIONS)
            if self._in_training_forward:
                self.guard.clock.pass_began()
                self.guard.clock.forward_began(id(module))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is recorded, and no forward pass can end a step."""
        return not (self.guard.clock.recording or self.guard.clock.due)

    @property
    def pass_number(self) -> tuple[int, int]:
        """Numbers of the present step, and of the forward pass within it."""
        return self.guard.clock.number, self.guard.clock.micro

    def passes_inside(self, named: NamedModule, *, training: bool) -> bool:
        """Whether what passes a module inside a graph is recorded; a pass may begin with it."""
        clock = self.guard.clock
        if not self._counts(named.module):
            return False
        if training:
            clock.pass_began()
        return clock.recording and (training or self._in_training_forward)

    def show(self, kind: TraceKind, module: torch.nn.Module, value: Any, first: int = 0) -> None:
        """Trace what a call is given or returns; without gradients in train mode alone."""
        named = self._subjects.modules.get(id(module))
        if named is None or not (self._trace.on and self._counts(module)):
            return
        if self.in_training_pass() or (module.training and not self.guard.clock.due):
            for index, tensor in enumerate(tensors_in(value), first):
                name = f"output {index}" if index and kind == "output" else ""
                self._trace.take(kind, named.name, tensor, name=name)

    @guarded("an operator of a compiled graph")
    def returned_inside(
        self,
        named: NamedModule,
        output: torch.Tensor,
        inputs: list[int],
        outputs: list[int],
        index: int,
        placement: Placement,
        *,
        grad: bool,
    ) -> None:
        """A module has returned a tensor inside a graph; see ``compiled.Receiver``."""
        if named.output_shapes is None:
            named.input_shapes, named.output_shapes = _unpacked(inputs), _unpacked(outputs)
        named.inside = True
        named.due += grad
        named.differentiated |= grad
        self._note_tensor("activation", [(named, index)], self.guard.clock.micro, output, placement)

    def differentiated_inside(
        self,
        named: NamedModule,
        gradient: torch.Tensor,
        placement: Placement,
        step: int,
        micro: int,
        index: int,
    ) -> None:
        """The gradient of such a tensor arrived, of a forward pass of that step."""
        named.came += step == self.guard.clock.number and self.guard.clock.recording
        self._gradient([(named, index)], step, micro, True, gradient, placement)

    @guarded("a forward hook")
    def _watch_outputs(self, named: NamedModule, output: Any) -> None:
        for index, tensor in enumerate(tensors_in(output)):
            if tensor.requires_grad:
                self._watch(named, index, tensor)

    @guarded("a forward hook")
    def _note_output(self, named: NamedModule, args: Any, output: Any) -> None:
        recomputing = in_backward()
        if named.output_shapes is None:
            named.input_shapes = shapes_of(tensors_in(args))
            named.output_shapes = shapes_of(tensors_in(output))
        plain = isinstance(output, torch.Tensor)
        for index, tensor in enumerate((output,) if plain else tensors_in(output)):
            # Checkpointing runs the forward again inside backward: the activation was counted then.
            if not recomputing:
                self._note_tensor("activation", [(named, index)], self.guard.clock.micro, tensor)
            if tensor.requires_grad:
                named.differentiated = True
                self._watch(named, index, tensor)

    def _watch(self, named: NamedModule, index: int, tensor: torch.Tensor) -> None:
        """Hook a tensor once for each node that made it; modules that pass it on share the hook."""
        # A hook belongs to the node. What torch writes in place gives the tensor another one; what goes
        # round autograd (``.data``, a raw kernel) does not, and the same gradient comes back.
        node = tensor.grad_fn
        key = (id(tensor), -1 if node is None else node._sequence_nr(), tensor.output_nr)
        watched = self._watched.get(key)
        if watched is not None and watched[0]() is tensor:
            if all(named is not other for other, _ in watched[1]):
                watched[1].append((named, index))
            return
        outputs = [(named, index)]
        self._watched[key] = (weakref.ref(tensor), outputs)
        # A hook on a leaf (a module may return its parameter) would stay there beyond this graph.
        lasting = tensor.grad_fn is not None
        clock = self.guard.clock
        hook = functools.partial(self._gradient, outputs, clock.number, clock.micro, lasting)
        tensor.register_hook(hook)

    def _gradient(
        self,
        outputs: list[_Output],
        step: int,
        micro: int,
        lasting: bool,
        gradient: torch.Tensor | None,
        placement: Placement | None = None,
    ) -> None:
        clock = self.guard.clock
        if gradient is None or not clock.active or not (step == clock.number or lasting):
            return  # None: autograd's, where nothing needs one of several outputs of a node
        if step != clock.number:
            self._outliving.update(id(named.module) for named, _ in outputs)
        if clock.recording:
            self._note_gradient(outputs, micro, gradient, placement)

    @guarded("a gradient hook")
    def _note_gradient(
        self,
        outputs: list[_Output],
        micro: int,
        gradient: torch.Tensor,
        placement: Placement | None,
    ) -> None:
        self.guard.clock.backward_reached()
        self._note_tensor("activation_grad", outputs, micro, gradient, placement)

    def _note_tensor(
        self,
        kind: Kind,
        outputs: list[_Output],
        micro: int,
        tensor: torch.Tensor,
        placement: Placement | None = None,
    ) -> None:
        traced: TraceKind = "output" if kind == "activation" else "gradient"
        modules = [named for named, _ in outputs]
        for named, index in outputs:
            self._trace.take(traced, named.name, tensor, name=f"output {index}" if index else "")
        ready = countable(tensor)
        if isinstance(ready, str):
            for named in modules:
                if named.reason is None and kind not in named.seen:
                    named.reason = f"{kind.replace('_', ' ')}: {ready}"
            return
        if placement is not None:
            ready = ready._replace(placement=placement)
        if tensor.dtype in HALF:
            self._precision.modules.update(named.name for named in modules)
        count = self._ledger.count(ready)
        for named in modules:
            self._ledger.note(kind, named.name, micro, ready, count)
            named.seen.add(kind)
            named.reason = None


def _computes(module: torch.nn.Module) -> bool:
    """Whether a module has parameters: a loss function that is called begins no step."""
    return next(module.parameters(), None) is not None


class _Inside(compiled.Receiver):
    """Hears of one module inside compiled regions, and lets no error into them."""

    def __init__(self, observer: Observer, named: NamedModule) -> None:
        self._observer = observer
        self._named = named

    def called(self, *, training: bool, ends: bool) -> None:
        with self._failing():
            self._observer.model_called(self._named.module, training=training, ends=ends)

    def returned(
        self,
        output: torch.Tensor,
        inputs: list[int],
        outputs: list[int],
        index: int,
        *,
        placement: Placement,
        training: bool,
        grad: bool,
    ) -> tuple[int, int, int]:
        observer, named = self._observer, self._named
        if observer.is_idle:
            return *observer.pass_number, index
        with self._failing():
            if observer.passes_inside(named, training=training):
                observer.returned_inside(
                    named, output, inputs, outputs, index, placement, grad=grad
                )
            elif not training:
                observer.show("output", named.module, output, index)
        return *observer.pass_number, index

    def differentiated(
        self, gradient: torch.Tensor, placement: Placement, numbers: tuple[int, int, int]
    ) -> None:
        if self._observer.is_idle:
            return
        with self._failing():
            self._observer.differentiated_inside(self._named, gradient, placement, *numbers)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._observer.guard.failures.note("an operator of a compiled graph", error)


def _unpacked(sizes: list[int]) -> list[list[int]]:
    """Shapes that were written one after another, each after its number of dimensions."""
    shapes = []
    while sizes:
        shapes.append(list(sizes[1 : 1 + sizes[0]]))
        sizes = sizes[1 + sizes[0] :]
    return shapes
