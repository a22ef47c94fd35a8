"""The hooks: what fires during training, and what is counted then.

Modules are watched through torch's global forward hook, so no module carries a hook of ours (some
PyTorch modules choose another algorithm when they do). Gradients of activations come from *tensor*
hooks placed inside it: full backward hooks insert a node into the graph, fail beside in-place
operations and never fire for outputs in a dict. Weights come from the optimizer's own step hooks.

Everything is wrapped by ``guarded``: what fails here is reported once and never reaches training.
"""

from __future__ import annotations

import functools
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.modules import module as torch_modules
from torch.nn.parallel import DistributedDataParallel

from mpdiag.recording.tensors import Countable, beside_sharded, countable, tensors_in
from mpdiag.runs.schema import TOTAL
from mpdiag.tracing.dispatch import in_backward, is_traced
from mpdiag.tracing.names import NamedModule, NamedParameter, Subjects, shapes_of
from mpdiag.tracing.storages import WeakStorages

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from torch.optim import Optimizer

    from mpdiag.recording.ledger import Count, Ledger
    from mpdiag.recording.operations import OperationWatch
    from mpdiag.runs.schema import Kind, Stage


class Steps(Protocol):
    """What the observer tells the recorder about the course of training."""

    def forward_began(self) -> None:
        """A model was called, gradients on, outside any backward pass."""

    def forward_after_step(self) -> None:
        """A forward pass with gradients begins, and the present step is due to end."""

    def backward_reached(self) -> None:
        """A gradient arrived."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer applied a step."""

    def failed(self, where: str, error: Exception) -> None:
        """Recording failed at a place; training goes on."""


def guarded(where: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a hook method: runs only while active, one at a time, and never raises."""

    def decorate(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def hook(self: Observer, *args: Any, **kwargs: Any) -> None:
            if not self.active:
                return
            try:
                with (
                    self.lock,
                    self.governor,
                    torch.no_grad(),
                    torch._C.DisableTorchFunctionSubclass(),
                    self.unrecorded(),
                ):
                    method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self.steps.failed(where, error)

        return hook

    return decorate


class Observer:
    """Watches models and optimizers and notes what it counts in a ledger.

    Args:
        subjects: The modules and parameters to record.
        optimizers: The optimizers to watch.
        ledger: Where counts go.
        steps: Who is told how training proceeds.
        governor: Who measures what hooks cost.

    Attributes:
        active: Whether hooks do anything at all.
        recording: Whether the present step is recorded.
        step_due: Whether the present step ends with the next forward pass.
    """

    def __init__(
        self,
        subjects: Subjects,
        optimizers: Sequence[Optimizer],
        ledger: Ledger,
        steps: Steps,
        governor: AbstractContextManager[None],
    ) -> None:
        self.subjects = subjects
        self.ledger = ledger
        self.steps = steps
        self.active = False
        self.recording = False
        self.step_due = False
        self.lock = threading.RLock()
        self.micro = 0
        self._roots = {id(root): 0 for root in subjects.roots}  # calls in this step
        self._depth = 0
        self._in_training_forward = False
        self._step = 0
        self._counted: WeakStorages[Count] = WeakStorages()
        self._watched: dict[
            tuple[int, int], tuple[weakref.ref[torch.Tensor], list[NamedModule]]
        ] = {}
        self._before: dict[int, list[tuple[NamedParameter, Countable]]] = {}
        self._optimizers = list(optimizers)
        self._handles: list[Any] = []
        self._contributions: list[Any] = []
        self._unstepped: dict[int, Any] = {}  # hooks of parameters that no optimizer steps
        self._wrappers: set[int] = set()
        self.operations: OperationWatch | None = None
        self.governor = governor
        self._averaged: set[int] = set()  # parameters of which every rank keeps the same copy

    def unrecorded(self) -> AbstractContextManager[None]:
        """What this package computes is no operation of the training."""
        watch = self.operations
        return watch.quiet() if watch is not None and watch.recording else nullcontext()

    # -- life --------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Place every hook."""
        self._note_wrappers(self.subjects.roots)
        optimizers, self._optimizers = self._optimizers, []
        self._watch_optimizers(optimizers)
        self._watch_unstepped(self.subjects.parameters)
        self._handles.append(torch_modules.register_module_forward_pre_hook(self.before_forward))
        self._handles.append(
            torch_modules.register_module_forward_hook(self._after_forward, always_call=True)
        )
        self.active = True

    def adopt(self, roots: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Watch further models, which ``subjects`` has taken in already, and optimizers."""
        for root in roots:
            self._roots[id(root)] = 0
        self._note_wrappers(roots)
        self._watch_optimizers(optimizers)
        self._watch_unstepped({id(p): p for root in roots for p in root.parameters()})

    def enter(self, module: torch.nn.Module) -> None:
        """Let calls of a module inside a model count as forward passes: its loop calls it alone."""
        self._roots.setdefault(id(module), 0)

    def _note_wrappers(self, roots: Sequence[torch.nn.Module]) -> None:
        for root in roots:
            self._averaged.update(id(p) for p in beside_sharded(root))
            for module in root.modules():
                if isinstance(module, DistributedDataParallel):
                    self._note_wrapper(module)

    def _watch_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._adopt_strays(len(self._optimizers), optimizer)
            self._optimizers.append(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    handle = self._unstepped.pop(id(parameter), None)
                    if handle is not None:
                        handle.remove()

    def _watch_unstepped(self, among: Container[int]) -> None:
        """Gradients of parameters that no watched optimizer steps."""
        stepped = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        for key, named in self.subjects.parameters.items():
            if key in among and key not in stepped and named.parameter.requires_grad:
                hook = functools.partial(self._accumulated, named)
                handle = named.parameter.register_post_accumulate_grad_hook(hook)
                self._unstepped[key] = handle

    def detach(self) -> None:
        """Remove every hook; tensor hooks left in a graph that lives on do nothing any more."""
        self.active = self.recording = False
        for handle in [*self._handles, *self._contributions, *self._unstepped.values()]:
            handle.remove()
        self._handles, self._contributions, self._unstepped = [], [], {}
        self._forget()

    def begin_step(self, step: int, recording: bool, accumulating: bool) -> None:
        """A new step begins.

        Args:
            step: Its number.
            recording: Whether to record it.
            accumulating: Whether steps consist of several backward passes: then each pass's
                contribution to the weight gradients is recorded beside the total.
        """
        self._forget()
        self._step, self.recording, self.step_due = step, recording, False
        self.micro = 0
        self._roots = dict.fromkeys(self._roots, 0)
        for handle in self._contributions:
            handle.remove()
        self._contributions = []
        if recording and accumulating:
            for named in self.subjects.parameters.values():
                if named.parameter.requires_grad and named.parameter.is_leaf:
                    hook = functools.partial(self._contributed, named, step)
                    self._contributions.append(named.parameter.register_hook(hook))

    def _forget(self) -> None:
        self._counted.clear()
        self._watched.clear()
        self._before.clear()

    def _adopt_strays(self, i: int, optimizer: Optimizer) -> None:
        known = {id(p) for root in self.subjects.roots for p in root.parameters()}
        known.update(self.subjects.parameters)
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    self.subjects.add_stray(parameter, f"optimizer{i}.group{g}.{p}")

    def _note_wrapper(self, wrapper: DistributedDataParallel) -> None:
        """Parameters under DDP are copies of one, and so are their gradients once averaged."""
        self._wrappers.add(id(wrapper))
        ignored: Any = getattr(wrapper, "parameters_to_ignore", ())
        self._averaged.update(
            id(p) for name, p in wrapper.module.named_parameters() if name not in ignored
        )

    # -- forward -----------------------------------------------------------------------------------

    def before_forward(self, module: torch.nn.Module, _args: Any) -> None:
        """The global hook."""
        if is_traced() or not self.active:
            return
        if isinstance(module, DistributedDataParallel) and id(module) not in self._wrappers:
            self._note_wrapper(module)  # around the model that is recorded
        if self.step_due and torch.is_grad_enabled() and not in_backward():
            self.steps.forward_after_step()
        if id(module) in self._roots:
            self._depth += 1
            if self._depth == 1 and not in_backward():
                self._root_called(module)
        elif self._depth == 0 and self._operations_wait() and id(module) in self.subjects.modules:
            self.operations.resume()  # type: ignore[union-attr] # a part that the loop calls alone
        if self.operations is not None and self.operations.recording:
            self.operations.enter(module)

    def _operations_wait(self) -> bool:
        """Whether operations of this step are wanted, and nothing has begun to record them."""
        watch = self.operations
        waits = watch is not None and watch.wanted and not watch.recording
        return waits and torch.is_grad_enabled() and not in_backward()

    def _root_called(self, module: torch.nn.Module) -> None:
        self._in_training_forward = torch.is_grad_enabled()
        if self._in_training_forward:
            self.steps.forward_began()
            if self.operations is not None:
                self.operations.resume()
            self.micro = self._roots[id(module)]
            self._roots[id(module)] += 1

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if is_traced() or not self.active:
            return
        if self.operations is not None and self.operations.recording:
            self.operations.leave(module)
        if self.recording:
            named = self.subjects.modules.get(id(module))
            if named is not None and output is not None:
                # Inside a model's forward the model's own call decides: reentrant checkpointing and
                # frozen parts switch gradients off within it.
                inside = self._depth > 0
                trains = self._in_training_forward if inside else torch.is_grad_enabled()
                if trains or in_backward():
                    self._note_output(named, args, output)
        if id(module) in self._roots:
            self._depth = max(0, self._depth - 1)

    @guarded("a forward hook")
    def _note_output(self, named: NamedModule, args: Any, output: Any) -> None:
        recomputing = in_backward()
        if named.output_shapes is None:
            named.input_shapes = shapes_of(tensors_in(args))
            named.output_shapes = shapes_of(tensors_in(output))
        for tensor in tensors_in(output):
            # Checkpointing runs the forward again inside backward: the activation was counted then.
            if not recomputing:
                self._note_tensor("activation", [named], self.micro, tensor)
            if tensor.requires_grad:
                self._watch(named, tensor)

    # -- gradients of activations ------------------------------------------------------------------

    def _watch(self, named: NamedModule, tensor: torch.Tensor) -> None:
        """Hook a tensor once for each of its versions; modules that pass it on share the hook."""
        version = 0 if tensor.is_inference() else tensor._version
        key = (id(tensor), version)
        watched = self._watched.get(key)
        if watched is not None and watched[0]() is tensor:
            if named not in watched[1]:
                watched[1].append(named)
            return
        modules = [named]
        self._watched[key] = (weakref.ref(tensor), modules)
        tensor.register_hook(functools.partial(self._gradient, modules, self._step, self.micro))

    def _gradient(
        self, modules: list[NamedModule], step: int, micro: int, gradient: torch.Tensor
    ) -> None:
        if self.recording and step == self._step:
            self._note_gradient(modules, micro, gradient)

    @guarded("a gradient hook")
    def _note_gradient(
        self, modules: list[NamedModule], micro: int, gradient: torch.Tensor
    ) -> None:
        self.steps.backward_reached()
        self._note_tensor("activation_grad", modules, micro, gradient)

    # -- weights -----------------------------------------------------------------------------------

    def _contributed(self, named: NamedParameter, step: int, gradient: torch.Tensor) -> None:
        if self.recording and step == self._step:
            self._note_weight_gradient(named, gradient, self.micro)

    def _accumulated(self, named: NamedParameter, parameter: torch.Tensor) -> None:
        """A parameter that no watched optimizer steps: its gradient as it stands, last one counts."""
        if self.recording and parameter.grad is not None:
            self._note_weight_gradient(named, parameter.grad, TOTAL, supersede=True)

    @guarded("a weight gradient hook")
    def _note_weight_gradient(
        self, named: NamedParameter, gradient: torch.Tensor, micro: int, supersede: bool = False
    ) -> None:
        ready = countable(gradient)
        if isinstance(ready, str):
            named.reason = f"gradient: {ready}"
            return
        note = self.ledger.replace if supersede else self.ledger.note
        stage: Stage = "local"
        if micro == TOTAL:
            ready, stage = self._reduced(named, ready)
        note("weight_grad", named.name, micro, ready, self.ledger.count(ready), stage)
        named.seen.add("weight_grad")

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.operations is not None:
            self.operations.pause()
        if self.recording:
            self._note_before_step(optimizer, _closure(args, kwargs) is not None)

    @guarded("an optimizer hook")
    def _note_before_step(self, optimizer: Optimizer, closure: bool) -> None:
        kept = self._before[id(optimizer)] = []
        for named in self._parameters_of(optimizer):
            parameter = named.parameter
            if not closure:
                if parameter.grad is None:
                    continue
                self._note_weight_gradient(named, parameter.grad, TOTAL)
            ready = countable(parameter)
            if isinstance(ready, str):
                named.reason = ready
                continue
            copy = ready.values.clone() if ready.shared else ready.values
            kept.append((named, _with_values(ready, copy)))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.operations is not None:
            self.operations.pause()  # a closure may have run forward passes
        if self.recording:
            # With a closure, gradients came into being inside the step.
            self._note_after_step(optimizer, _closure(args, kwargs) is not None)
        if self.active:
            self.steps.optimizer_stepped(optimizer)

    @guarded("an optimizer hook")
    def _note_after_step(self, optimizer: Optimizer, closure: bool) -> None:
        for named, before in self._before.pop(id(optimizer), []):
            parameter = named.parameter
            if closure:
                if parameter.grad is None:
                    continue
                self._note_weight_gradient(named, parameter.grad, TOTAL)
            after = countable(parameter)
            if isinstance(after, str) or after.values.numel() != before.values.numel():
                named.reason = "changed shape during the step"
                continue
            before, stage = self._reduced(named, before)
            self.ledger.note_update(named.name, before, after, stage)
            named.seen.update(("weight", "update"))

    def note_weights(self) -> None:
        """Count the weights of parameters that no watched optimizer steps, or that are frozen."""
        if self.recording:
            self._note_weights()

    @guarded("reading the weights")
    def _note_weights(self) -> None:
        for named in self.subjects.parameters.values():
            if "weight" not in named.seen or (
                not self._optimizers and named.parameter.requires_grad
            ):
                ready = countable(named.parameter)
                if isinstance(ready, str):
                    named.reason = ready
                    continue
                count = self.ledger.count(ready)
                ready, stage = self._reduced(named, ready)
                self.ledger.note("weight", named.name, TOTAL, ready, count, stage)
                named.seen.add("weight")

    def _reduced(self, named: NamedParameter, ready: Countable) -> tuple[Countable, Stage]:
        """A parameter's tensor with its placement over the ranks, and its stage."""
        if id(named.parameter) in self._averaged:
            return replace(ready, placement="replicated"), "reduced"
        return ready, "local" if ready.placement == "local" else "reduced"

    def _parameters_of(self, optimizer: Optimizer) -> list[NamedParameter]:
        known = self.subjects.parameters
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [known[id(p)] for p in parameters if id(p) in known]

    # -- counting ----------------------------------------------------------------------------------

    def _note_tensor(
        self, kind: Kind, modules: list[NamedModule], micro: int, tensor: torch.Tensor
    ) -> None:
        ready = countable(tensor)
        if isinstance(ready, str):
            for named in modules:
                if named.reason is None and kind not in named.seen:
                    named.reason = f"{kind.replace('_', ' ')}: {ready}"
            return
        count = self._count_once(ready)
        for named in modules:
            self.ledger.note(kind, named.name, micro, ready, count)
            named.seen.add(kind)
            named.reason = None

    def _count_once(self, ready: Countable) -> Count:
        """Count memory of the same version once: an output is often its successor's output, too."""
        if not ready.shared or ready.version is None:
            return self.ledger.count(ready)
        values = ready.values
        key = (values.data_ptr(), values.numel(), ready.repeat, values.dtype, ready.version)
        # The storage must still be the same one, not a new one at an address that was freed.
        known = self._counted.get(key)
        if known is not None:
            return known
        count = self.ledger.count(ready)
        self._counted.put(key, values.untyped_storage(), count)
        return count


def _closure(args: Any, kwargs: Any) -> Any:
    """The closure given to ``optimizer.step``: hooks receive its arguments, the optimizer first."""
    if kwargs.get("closure") is not None:
        return kwargs["closure"]
    return next((a for a in args if callable(a) and not isinstance(a, torch.optim.Optimizer)), None)


def _with_values(ready: Countable, values: torch.Tensor) -> Countable:
    return replace(ready, values=values, shared=False, version=None)
