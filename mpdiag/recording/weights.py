"""Weights, their gradients and their updates: what an optimizer's step hooks and parameters show.

A parameter is counted before and after the step of its optimizer; its gradient just before. Hooks on
parameters serve two cases: steps of several backward passes, in which each pass's contribution is
recorded beside the total, and parameters that no watched optimizer steps.

Copies of parameters from before a step are whole while they fit a budget. Of parameters for which they
do not, the same blocks are copied in every step: they lie at equal distances, so that each part of a
parameter has its share.
"""

import functools
import os
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mpdiag.errors import UsageError
from mpdiag.recording.counting.tensors import Countable, beside_sharded, countable, own_part
from mpdiag.recording.failures import HookGuard, guarded
from mpdiag.recording.ledger import Ledger, ParameterUpdate
from mpdiag.recording.step_clock import Step, StepListener
from mpdiag.recording.step_tap import StepTap
from mpdiag.recording.trace import TraceWatch
from mpdiag.runs import provenance
from mpdiag.runs.schema import TOTAL, Stage
from mpdiag.tracing.capture import is_captured
from mpdiag.tracing.dispatch import in_backward, is_traced
from mpdiag.tracing.names import NamedParameter, Subjects
from mpdiag.tracing.source_lines import is_inner_step
from mpdiag.tracing.uncompiled import apart

BLOCK = 4096
"""Values copied together."""
SHARE = 0.25
"""Share of the memory free at the first recorded step that copies may take, where none is stated."""


class CopiedParameters:
    """Parameters of which every rank keeps the same copy, and whose gradients are averaged."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._wrappers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether every rank has this one."""
        return id(parameter) in self._ids

    def wrappers(self) -> list[torch.nn.Module]:
        """DDP's modules that were seen."""
        return list(self._wrappers)

    def search(self, models: Iterable[torch.nn.Module]) -> None:
        """Take in those of tensor-parallel models, and those under DDP."""
        for model in models:
            self._ids.update(id(p) for p in beside_sharded(model))
            for module in model.modules():
                self.add_wrapped(module)

    def add_wrapped(self, module: torch.nn.Module) -> None:
        """Take in the parameters under a module, if it is DDP's and new."""
        if not isinstance(module, DistributedDataParallel) or module in self._wrappers:
            return
        self._wrappers.add(module)
        ignored: Any = getattr(module, "parameters_to_ignore", ())
        self._ids.update(
            id(p) for name, p in module.module.named_parameters() if name not in ignored
        )


class WeightCopies:
    """Decides how much of each parameter is copied, and copies it.

    Args:
        budget: Bytes that the copies of one optimizer's step may take on a device; None for ``SHARE``
            of what is free there.

    Raises:
        UsageError: If the budget is no number of bytes.
    """

    def __init__(self, budget: int | None = None) -> None:
        if budget is not None and (type(budget) is not int or budget < 0):
            raise UsageError(f"copy_budget must be a number of bytes, 0 or more, not {budget!r}")
        self._stated = budget
        self._budgets: dict[torch.device, float] = {}
        self._shares: dict[int, tuple[int, dict[torch.device, float]]] = {}

    def decide(self, key: int, parameters: Iterable[torch.Tensor]) -> None:
        """Decide what share of an optimizer's parameters is copied: once, so that it stays the same.

        Args:
            key: What the optimizer is known by.
            parameters: All that it steps. With further ones it is decided anew.
        """
        held = list(parameters)
        known = self._shares.get(key)
        if known is not None and known[0] == len(held):
            return
        sizes: dict[torch.device, int] = {}
        for parameter in held:
            local = own_part(parameter)
            size = local.numel() * local.element_size()
            sizes[local.device] = sizes.get(local.device, 0) + size
        shares = {
            device: self._budget(device) / size if size else 1.0 for device, size in sizes.items()
        }
        self._shares[key] = len(held), shares

    def blocks(self, key: int, ready: Countable) -> torch.Tensor | None:
        """The blocks to copy of a parameter, int64 (k,), by number; None for all of it."""
        _, shares = self._shares[key]
        share = shares.get(ready.values.device, 1.0)
        whole = ready.values.numel() // BLOCK
        if share >= 1.0 or whole < 2:
            return None
        wanted = max(1, int(whole * share))
        numbers = torch.arange(wanted, device=ready.values.device)
        return torch.div(numbers * whole, wanted, rounding_mode="floor")

    def _budget(self, device: torch.device) -> float:
        if self._stated is not None:
            return float(self._stated)
        if device not in self._budgets:
            free = free_memory(device)
            self._budgets[device] = float("inf") if free is None else SHARE * free
        return self._budgets[device]


def sampled(ready: Countable, blocks: torch.Tensor | None) -> Countable:
    """A parameter's values for an update: a view of all of them, or a copy of some blocks."""
    if blocks is None:
        return ready
    whole = ready.values.numel() // BLOCK
    rows = ready.values[: whole * BLOCK].view(whole, BLOCK)
    return ready._replace(values=rows.index_select(0, blocks).view(-1), shared=False)


def copied(ready: Countable, blocks: torch.Tensor | None) -> Countable:
    """A copy of a parameter's values, or of some blocks of them."""
    some = sampled(ready, blocks)
    values = some.values.clone() if some.shared else some.values
    return some._replace(values=values, shared=False)


@dataclass(frozen=True, eq=False)
class _Kept:
    """A parameter from before a step: a copy of its ``numel`` values, or of some blocks of them."""

    named: NamedParameter
    before: Countable
    numel: int
    blocks: torch.Tensor | None


class WeightObserver(StepListener):
    """Counts parameters, their gradients and their updates into a ledger.

    Args:
        subjects: The parameters to record.
        optimizers: The optimizers to watch.
        copied: Which parameters every rank has.
        ledger: Where counts go.
        guard: Around every hook; has the clock, and the watch of operations.
        copies: How parameters are copied before a step.
        inside: Looks on while optimizers step.
        trace: Is shown gradients, in a traced step.
    """

    def __init__(
        self,
        subjects: Subjects,
        optimizers: Sequence[Optimizer],
        copied: CopiedParameters,
        ledger: Ledger,
        guard: HookGuard,
        copies: WeightCopies,
        inside: StepTap,
        trace: TraceWatch,
    ) -> None:
        self.guard = guard
        self._inside = inside
        self._trace = trace
        self._copies = copies
        self._subjects = subjects
        self._copied = copied
        self._ledger = ledger
        self._waiting = list(optimizers)  # to be watched from ``attach`` on
        self._optimizers: list[Optimizer] = []
        self._handles: list[Any] = []
        self._contributions: list[Any] = []  # hooks of this step
        self._left_out: set[int] = set()  # parameters that the names to record leave out
        self._unstepped: dict[int, Any] = {}  # hooks of parameters that no optimizer steps
        self._unreduced: dict[int, NamedParameter] = {}  # until ranks have reduced their gradients
        self._evaluating: Optimizer | None = None  # steps, and calls a closure
        self._before: dict[int, list[_Kept]] = {}

    # -- hooks come and go -------------------------------------------------------------------------

    def attach(self) -> None:
        """Place hooks on optimizers, and on parameters that none of them steps."""
        optimizers, self._waiting = self._waiting, []
        self._watch_optimizers(optimizers)
        self._watch_unstepped(self._subjects.parameters)

    def adopt(self, roots: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Watch further optimizers, and parameters of models that ``subjects`` holds already."""
        self._watch_optimizers(optimizers)
        self._watch_unstepped({id(p): p for root in roots for p in root.parameters()})

    def stopped(self) -> None:
        """Remove every hook from optimizers and parameters."""
        for handle in [*self._handles, *self._contributions, *self._unstepped.values()]:
            handle.remove()
        self._handles, self._contributions, self._unstepped = [], [], {}
        self._before.clear()

    def _watch_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._adopt_strays(len(self._optimizers), optimizer)
            self._optimizers.append(optimizer)
            before = functools.partial(apart, self._before_step)
            after = functools.partial(apart, self._after_step)
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    handle = self._unstepped.pop(id(parameter), None)
                    if handle is not None:
                        handle.remove()

    def _adopt_strays(self, i: int, optimizer: Optimizer) -> None:
        """Take in parameters that are not known: a model has grown, or no model holds them.

        Those that no model holds get names of their own.
        """
        held = [
            (f"optimizer{i}.group{g}.{p}", parameter)
            for g, group in enumerate(optimizer.param_groups)
            for p, parameter in enumerate(group["params"])
        ]
        known = self._subjects.parameters
        if all(id(parameter) in known or id(parameter) in self._left_out for _, parameter in held):
            return
        self._subjects.grow()
        inside = {id(p) for root in self._subjects.roots for p in root.parameters()}
        for name, parameter in held:
            if id(parameter) not in known and id(parameter) not in inside:
                self._subjects.add_stray(parameter, name)
        self._left_out = {id(parameter) for _, parameter in held} - set(known) | self._left_out

    def _watch_unstepped(self, among: Container[int]) -> None:
        stepped = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        for key, named in self._subjects.parameters.items():
            if key in among and key not in stepped and named.parameter.requires_grad:
                hook = functools.partial(self._accumulated, named)
                handle = named.parameter.register_post_accumulate_grad_hook(hook)
                self._unstepped[key] = handle

    def step_began(self, step: Step) -> None:
        """Hook parameters if each backward pass's contribution to their gradients is wanted."""
        self._before.clear()
        if step.recorded and self._evaluating is not None:  # its closure has begun this step
            self._note_before_step(self._evaluating, closure=True)
        for handle in self._contributions:
            handle.remove()
        self._contributions = []
        if step.recorded and step.accumulating:
            for named in self._subjects.parameters.values():
                if named.parameter.requires_grad and named.parameter.is_leaf:
                    hook = functools.partial(self._contributed, named, step.number)
                    self._contributions.append(named.parameter.register_hook(hook))

    def step_ended(self, step: Step) -> None:
        """Count weights that no step shows; with optimizers once, as only frozen ones remain."""
        self._note_reduced(self._unreduced)
        if step.recorded and (not self._optimizers or self._ledger.steps_closed == 0):
            self._note_weights()

    # -- gradients ---------------------------------------------------------------------------------

    def optimizer_begins(self) -> None:
        """The backward pass has ended, and ranks have reduced what it left."""
        if not in_backward():
            self._note_reduced(self._unreduced.keys() & self._unstepped.keys())

    def _note_reduced(self, parameters: Iterable[int]) -> None:
        for named in [self._unreduced.pop(key) for key in list(parameters)]:
            if self.guard.clock.recording and named.parameter.grad is not None:
                self._note_gradient(named, named.parameter.grad, TOTAL, supersede=True)

    def _contributed(self, named: NamedParameter, step: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and self.guard.clock.recording and step == self.guard.clock.number:
            self._note_gradient(named, gradient, self.guard.clock.micro)

    def _accumulated(self, named: NamedParameter, parameter: torch.Tensor) -> None:
        """A parameter that no watched optimizer steps: its gradient as it stands, last one counts."""
        if self._optimizers and provenance.ranks()[1] > 1:
            self._unreduced[id(parameter)] = named
        elif self.guard.clock.recording and parameter.grad is not None:
            self._note_gradient(named, parameter.grad, TOTAL, supersede=True)

    @guarded("a weight gradient hook")
    def _note_gradient(
        self, named: NamedParameter, gradient: torch.Tensor, micro: int, supersede: bool = False
    ) -> None:
        if micro == TOTAL:
            self._trace_gradient(named, gradient)
        ready = countable(gradient)
        if isinstance(ready, str):
            named.reason = f"gradient: {ready}"
            return
        stage: Stage = "local"
        if micro == TOTAL:
            ready, stage = self._reduced(named, ready)
        count = self._ledger.count(ready)
        self._ledger.note(
            "weight_grad", named.name, micro, ready, count, stage, supersede=supersede
        )
        named.seen.add("weight_grad")

    def _trace_gradient(self, named: NamedParameter, gradient: torch.Tensor) -> None:
        module = named.name.rpartition(".")[0]
        self._trace.take("weight_grad", module, gradient, name=named.name)

    @guarded("a weight gradient hook")
    def _note_gradients(self, held: Sequence[NamedParameter]) -> None:
        """Count the gradients that an optimizer steps by, on a device together."""
        found = []
        for named in held:
            self._unreduced.pop(id(named.parameter), None)
            try:
                gradient = named.parameter.grad
                ready = "none" if gradient is None else countable(gradient)
                if gradient is not None:
                    self._trace_gradient(named, gradient)
            except Exception as error:  # noqa: BLE001 - the others are counted all the same
                self.guard.failures.note("a weight gradient hook", error)
                continue
            if isinstance(ready, str):
                named.reason = f"gradient: {ready}"
            else:
                found.append((named, *self._reduced(named, ready)))
        counts = self._ledger.count_many([ready for _, ready, _ in found])
        for (named, ready, stage), count in zip(found, counts, strict=True):
            self._ledger.note("weight_grad", named.name, TOTAL, ready, count, stage)
            named.seen.add("weight_grad")

    # -- an optimizer's step -----------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_captured() or is_inner_step(optimizer):
            return None
        self.guard.operations.pause()
        closure = _closure(args, kwargs)
        if self.guard.clock.active:
            self.guard.clock.optimizer_begins(optimizer, evaluates=closure is not None)
        if self.guard.clock.recording:
            self._note_before_step(optimizer, closure is not None)
        if closure is None or is_traced():
            if closure is None and self.guard.clock.active:
                self._inside.begin(optimizer)
            return None
        self._evaluating = optimizer
        told = self._told(optimizer, closure)
        return (
            tuple(told if a is closure else a for a in args),
            {name: told if a is closure else a for name, a in kwargs.items()},
        )

    def _told(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """A closure that tells the clock of each time it is evaluated."""

        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            if not self.guard.clock.active:
                return closure(*args, **kwargs)
            self.guard.clock.evaluation_began(optimizer)
            try:
                return closure(*args, **kwargs)
            finally:
                self.guard.clock.evaluation_ended()

        return evaluate

    @guarded("an optimizer hook")
    def _note_before_step(self, optimizer: Optimizer, closure: bool) -> None:
        place = next((i for i, o in enumerate(self._optimizers) if o is optimizer), 0)
        self._adopt_strays(place, optimizer)  # groups may have been added
        kept = self._before[id(optimizer)] = []
        held = self._parameters_of(optimizer)
        self._copies.decide(id(optimizer), (named.parameter for named in held))
        if not closure:
            held = [named for named in held if named.parameter.grad is not None]
            self._note_gradients(held)
        for named in held:
            ready = countable(named.parameter)
            if isinstance(ready, str):
                named.reason = ready
                continue
            blocks = self._copies.blocks(id(optimizer), ready)
            if blocks is not None:  # weights are counted whole, though their updates are not
                self._note_weight(named, ready)
            kept.append(_Kept(named, copied(ready, blocks), ready.values.numel(), blocks))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_inner_step(optimizer):
            return
        self._inside.end()
        if is_captured():
            return
        self.guard.operations.pause()  # a closure may have run forward passes
        self._evaluating = None
        if self.guard.clock.recording:
            self._note_after_step(optimizer, _closure(args, kwargs) is not None)
        if self.guard.clock.active:
            self.guard.clock.optimizer_stepped(optimizer)

    @guarded("an optimizer hook")
    def _note_after_step(self, optimizer: Optimizer, closure: bool) -> None:
        before = self._before.pop(id(optimizer), [])
        if closure:  # then gradients came into being inside the step
            before = [kept for kept in before if kept.named.parameter.grad is not None]
            self._note_gradients([kept.named for kept in before])
        whole = []
        for kept in before:
            update = self._update(kept)
            if update is None:
                continue
            # Its blocks are copies, which need not all be in memory together.
            if update.sampled_from:
                self._ledger.note_updates([update])
            else:
                whole.append(update)
            kept.named.seen.update(("weight", "update"))
        self._ledger.note_updates(whole)

    def _update(self, kept: _Kept) -> ParameterUpdate | None:
        """What a step made of a parameter; None if it is no longer the same one."""
        after = countable(kept.named.parameter)
        if isinstance(after, str) or after.values.numel() != kept.numel:
            kept.named.reason = "changed shape during the step"
            return None
        before, stage = self._reduced(kept.named, kept.before)
        sampled_from = 0 if kept.blocks is None else kept.numel
        some = sampled(after, kept.blocks)
        return ParameterUpdate(kept.named.name, before, some, stage, sampled_from)

    # -- weights -----------------------------------------------------------------------------------

    @guarded("reading the weights")
    def _note_weights(self) -> None:
        """Count the weights of parameters that no watched optimizer steps, or that are frozen."""
        for named in self._subjects.parameters.values():
            if "weight" not in named.seen or (
                not self._optimizers and named.parameter.requires_grad
            ):
                ready = countable(named.parameter)
                if isinstance(ready, str):
                    named.reason = ready
                    continue
                self._note_weight(named, ready)

    def _note_weight(self, named: NamedParameter, ready: Countable) -> None:
        count = self._ledger.count(ready)
        ready, stage = self._reduced(named, ready)
        self._ledger.note("weight", named.name, TOTAL, ready, count, stage)
        named.seen.add("weight")

    def _reduced(self, named: NamedParameter, ready: Countable) -> tuple[Countable, Stage]:
        """A parameter's tensor with its placement over the ranks, and its stage."""
        if named.parameter in self._copied:
            return ready._replace(placement="replicated"), "reduced"
        return ready, "local" if ready.placement == "local" else "reduced"

    def _parameters_of(self, optimizer: Optimizer) -> list[NamedParameter]:
        known = self._subjects.parameters
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [known[id(p)] for p in parameters if id(p) in known]


def _closure(args: Any, kwargs: Any) -> Any:
    """The closure given to ``optimizer.step``: hooks receive its arguments, the optimizer first."""
    if kwargs.get("closure") is not None:
        return kwargs["closure"]
    return next((a for a in args if callable(a) and not isinstance(a, torch.optim.Optimizer)), None)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had on a device, None where it does not say."""
    if device.type == "cuda":
        # What torch keeps of freed tensors can be had, too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type != "cpu":
        return None
    found = [free for free in (_available(), _left_in_group()) if free is not None]
    return min(found, default=None)


def _available() -> int | None:
    """What the system can give without swapping."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _left_in_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves."""
    with suppress(OSError, ValueError):  # no such file, or the word "max": no limit
        limit = int((folder / "memory.max").read_text())
        return max(0, limit - int((folder / "memory.current").read_text()))
    return None
