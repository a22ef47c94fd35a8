"""Why a step was skipped: what was not finite first, and what was at fault."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpdiag.tracing.nonfinite import Producer, find_nonfinite
from mpdiag.tracing.precision import HALF
from mpdiag.training.casting import Casting
from mpdiag.training.judgement import rank, values_of
from mpdiag.training.results import NonFinite, NonFiniteKind, SkipCause
from mpdiag.training.skips.step_start import random_as_before
from mpdiag.training.weights.held import HeldParameter
from mpdiag.training.weights.wrapping import Wrapped


@dataclass(frozen=True, eq=False)
class FailedStep:
    """What is known of a step that cannot be taken.

    Attributes:
        held: Parameters as the optimizers hold them, with their gradients.
        scale: The step's loss scale.
        loss: The unscaled loss; None if it is not known.
        root: The ``grad_fn`` of the loss; None if it is not known.
        bad_ranks: Ranks that saw something; another's is named where this one saw nothing.
        misfit: What did not fit its format after the update, which is known then.
    """

    held: Sequence[Tensor]
    scale: float
    loss: float | None
    root: Any = None
    bad_ranks: Sequence[int] = ()
    misfit: NonFinite | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Why a step failed.

    Attributes:
        found: What was not finite, in the order in which the backward pass meets it.
        cause: What was at fault.
        reason: Both, in a sentence.
        operation: The first operation that produced an infinity or a NaN, if it was looked for.
    """

    found: tuple[NonFinite, ...]
    cause: SkipCause
    reason: str
    operation: Producer | None = None


def diagnose(
    wrapped: Wrapped,
    casting: Casting,
    failed: FailedStep,
    loss_of: Callable[[], Tensor] | None = None,
    *,
    locate: bool = False,
) -> Diagnosis:
    """Find out why a step failed; the models' buffers are as before the step afterwards.

    Args:
        wrapped: The models.
        casting: Their arithmetic.
        failed: The step.
        loss_of: Runs the forward pass again, if the caller can.
        locate: Whether to look for the operation at fault, too; it needs ``loss_of``.
    """
    precision = wrapped.precision
    found = [failed.misfit] if failed.misfit else find_nonfinite_parts(wrapped, failed)
    wrapped.buffers.restore()
    cause = blame(precision.level, failed.loss, failed.scale)
    if failed.misfit is not None:
        cause = "format"
    elif loss_of is not None:
        cause, first = run_again(wrapped, loss_of, _backward_at(casting, None))
        found = [*first, *(f for f in found if f not in first)]
    operation = None
    if loss_of is not None and locate:
        operation = find_operation(wrapped, loss_of, _backward_at(casting, failed.scale))
    reason = reason_of(found, failed.scale, cause, precision.format)
    if operation is not None:
        reason += f"; {operation}"
    return Diagnosis(tuple(found), cause, reason, operation)


def _backward_at(casting: Casting, scale: float | None) -> Callable[[Tensor], None]:
    """A backward pass in mixed precision, at a scale or without one."""

    def backward(loss: Tensor) -> None:
        with casting.backward():
            (loss.float() if scale is None else loss.float() * scale).backward()

    return backward


def find_nonfinite_parts(wrapped: Wrapped, failed: FailedStep) -> list[NonFinite]:
    """What is not finite, in the order in which the backward pass meets it.

    Args:
        wrapped: The models, whose changed buffers are looked at too.
        failed: The step.
    """
    found: list[NonFinite] = []
    loss, held = failed.loss, failed.held
    if loss is not None and not math.isfinite(loss):
        found.append(NonFinite("the loss", "NaN" if math.isnan(loss) else "Inf", "forward"))
    buffers = wrapped.buffers.spoiled()
    for name, kind in non_finite(wrapped.buffers.names_of(buffers), buffers):
        found.append(NonFinite(name, kind, "buffers"))
    order = backward_order(failed.root) if failed.root is not None else {}
    model_side = wrapped.masters.model_parameter

    def reached(i: int) -> int:
        return order.get(id(model_side(held[i])), len(order) + len(held) - i)

    names = wrapped.names_of(held)
    indices = [i for i in sorted(range(len(held)), key=reached) if held[i].grad is not None]
    grads = [g for i in indices if (g := held[i].grad) is not None]
    for name, kind in non_finite([names[i] for i in indices], grads):
        found.append(NonFinite(name, kind, "backward"))
    if not found:
        others = [r for r in failed.bad_ranks if r != rank()]
        found += [NonFinite(f"rank {r}", "Inf", "other rank") for r in others]
    return found


def non_finite(names: Sequence[str], tensors: Sequence[Tensor]) -> list[tuple[str, NonFiniteKind]]:
    """Names of the tensors that are not finite, each with ``NaN`` or ``Inf``."""
    found: list[tuple[str, NonFiniteKind]] = []
    for name, tensor in zip(names, tensors, strict=True):
        if kind := kind_of(values_of(tensor)):
            found.append((name, kind))
    return found


def kind_of(tensor: Tensor) -> NonFiniteKind | None:
    """``NaN``, ``Inf``, or None where all is finite."""
    if bool(torch.isnan(tensor).any()):
        return "NaN"
    return "Inf" if bool(torch.isinf(tensor).any()) else None


def backward_order(root: Any, limit: int = 1_000_000) -> dict[int, int]:
    """When a backward pass reaches each parameter: ``id(parameter)`` -> rank, 0 the first.

    Autograd runs nodes in the reverse order of their creation; a parameter counts when the first
    operation that used it is reached.

    Args:
        root: The ``grad_fn`` of the loss, whose graph may be freed already.
        limit: Nodes to visit at most.
    """
    latest: dict[int, int] = {}
    seen = {root}
    stack = [root]
    while stack and len(seen) < limit:
        node = stack.pop()
        for child, _ in getattr(node, "next_functions", ()):
            if child is None:
                continue
            variable = getattr(child, "variable", None)
            if variable is not None:
                number = node._sequence_nr()
                latest[id(variable)] = max(latest.get(id(variable), -1), number)
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    order = sorted(latest, key=lambda key: -latest[key])
    return {key: rank for rank, key in enumerate(order)}


def blame(level: str, loss: float | None, scale: float) -> SkipCause:
    """What was at fault, as far as it shows without running the batch again."""
    if level == "O0":
        return "model"
    # A finite loss says that the forward pass was fine; the scale comes after it.
    if loss is not None and math.isfinite(loss) and scale > 1:
        return "scale"
    return "unknown"


def reason_of(found: Sequence[NonFinite], scale: float, cause: SkipCause, precision: str) -> str:
    """The reason of a skip, in a sentence."""
    what = str(found[0]) if found else "gradients whose squares leave FP32's range"
    at = f" at loss scale {scale:g}" if scale != 1 else ""
    why = {
        "scale": ", too large a scale",
        "format": f", beyond {precision.upper()} at any scale",
        "model": ", in FP32 as well",
        "unknown": "",
    }[cause]
    return f"{what}{at}{why}"


def run_again(
    wrapped: Wrapped, loss_of: Callable[[], Tensor], backward: Callable[[Tensor], None]
) -> tuple[SkipCause, list[NonFinite]]:
    """Run the batch again in mixed precision at scale 1, and in FP32 at scale 1.

    Weights, buffers and gradients are as before afterwards.

    Args:
        wrapped: The models.
        loss_of: Runs the forward pass.
        backward: Runs a backward pass in mixed precision, without a scale.

    Returns:
        The cause, and what was not finite first in the forward and in the backward pass.
    """
    wrapped.start.hold()
    parameters = list({p: None for m in wrapped.models for p in m.parameters()})
    values = [(p.data, p.grad) for p in parameters]
    halves = [(b, b.data) for m in wrapped.models for b in m.buffers() if b.dtype in HALF]
    try:
        mixed = run_trial(wrapped.models, loss_of, backward, wrapped.start.random)
        wrapped.switch.on = False
        for b, _ in halves:
            b.data = b.data.float()
        for p in parameters:
            p.grad = None
            p.data = wrapped.masters.master(p).detach().float()
        plain = run_trial(wrapped.models, loss_of, Tensor.backward, wrapped.start.random)
    finally:
        wrapped.switch.on = True
        for b, value in halves:
            b.data = value
        for p, (value, gradient) in zip(parameters, values, strict=True):
            p.data, p.grad = value, None
            p.grad = gradient
        wrapped.buffers.restore()
    if plain:
        return "model", plain
    return ("format", mixed) if mixed else ("scale", [])


def find_operation(
    wrapped: Wrapped, loss_of: Callable[[], Tensor], backward: Callable[[Tensor], None]
) -> Producer | None:
    """Run the batch again as it was skipped, and find the operation that went non-finite first.

    Args:
        wrapped: The models; their gradients and buffers are as before afterwards.
        loss_of: Runs the forward pass.
        backward: Runs a backward pass in mixed precision, with the loss scale.
    """
    if any(isinstance(m, torch.jit.ScriptModule) for top in wrapped.models for m in top.modules()):
        return None  # its interpreter may fail under a mode
    trace = find_nonfinite(wrapped.models)
    wrapped.start.hold()
    try:
        with trace:
            run_trial(wrapped.models, loss_of, backward, wrapped.start.random)
    finally:
        wrapped.buffers.restore()
    return trace.first


class NonFiniteWatch:
    """Notes what is not finite first, forward and backward."""

    def __init__(self) -> None:
        self.first: dict[str, NonFinite] = {}

    def note(self, name: str, tensor: Tensor | None, where: Literal["forward", "backward"]) -> None:
        """Look at a tensor, unless something was found in this direction already.

        Autograd gives None for the gradient of an output that nothing needs.
        """
        if tensor is not None and where not in self.first and (kind := kind_of(tensor)):
            self.first[where] = NonFinite(name, kind, where)

    def hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """A forward hook that watches a module's outputs and their gradients."""

        def watch(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                    continue
                self.note(name, tensor.detach(), "forward")
                if tensor.requires_grad:
                    tensor.register_hook(lambda g: self.note(name, g, "backward"))

        return watch


def run_trial(
    models: Sequence[nn.Module],
    loss_of: Callable[[], Tensor],
    backward: Callable[[Tensor], None],
    random: Mapping[str, Tensor],
) -> list[NonFinite]:
    """Run a forward and a backward pass and watch every module.

    Gradients and the random state are restored afterwards.

    Args:
        models: The models, whose modules are watched.
        loss_of: Runs the forward pass.
        backward: Runs the backward pass of a loss.
        random: Torch's random state before the step: dropout draws the same again.

    Returns:
        What was not finite first, the forward pass before the backward pass.
    """
    watch = NonFiniteWatch()
    named = {p: n for m in models for n, p in m.named_parameters()}
    before = [p.grad for p in named]
    with ExitStack() as stack:
        stack.enter_context(random_as_before(random))
        for model in models:
            for name, module in model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                    continue
                handle = module.register_forward_hook(watch.hook(name or "the model's output"))
                stack.callback(handle.remove)
        for p in named:
            p.grad = None
        try:
            loss = loss_of()
            watch.note("the loss", loss.detach(), "forward")
            backward(loss)
            for p, name in named.items():
                if p.grad is not None:
                    watch.note(name, p.grad, "backward")
        finally:
            for p, gradient in zip(named, before, strict=True):
                p.grad = None
                fits = gradient is not None and gradient.dtype == p.dtype
                if fits or isinstance(p, HeldParameter):
                    p.grad = gradient
    return [watch.first[where] for where in ("forward", "backward") if where in watch.first]
