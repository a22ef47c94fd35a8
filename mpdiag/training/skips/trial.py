"""Run a failed step again, to find what went non-finite first and what was at fault."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpdiag.training.results import NonFinite, NonFiniteKind
from mpdiag.training.skips.random_state import random_as_before
from mpdiag.training.weights.held import HeldParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class Trial:
    """One repetition of a failed step.

    Attributes:
        forward: What was not finite first in the forward pass, if anything.
        backward: What was not finite first in the backward pass, if anything.
    """

    forward: NonFinite | None
    backward: NonFinite | None

    @property
    def finite(self) -> bool:
        """Whether the whole step was finite."""
        return not self.found

    @property
    def found(self) -> list[NonFinite]:
        """What was not finite first, the forward pass before the backward pass."""
        return [f for f in (self.forward, self.backward) if f is not None]


def kind_of(tensor: Tensor) -> NonFiniteKind | None:
    """``NaN``, ``Inf``, or None where all is finite."""
    if bool(torch.isnan(tensor).any()):
        return "NaN"
    return "Inf" if bool(torch.isinf(tensor).any()) else None


class NonFiniteWatch:
    """Notes what is not finite first, forward and backward."""

    def __init__(self) -> None:
        self.first: dict[str, NonFinite] = {}

    def note(self, name: str, tensor: Tensor, where: Literal["forward", "backward"]) -> None:
        """Look at a tensor, unless something was found in this direction already."""
        if where not in self.first and (kind := kind_of(tensor)):
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
) -> Trial:
    """Run a forward and a backward pass and watch every module.

    Gradients and the random state are restored afterwards.

    Args:
        models: The models, whose modules are watched.
        loss_of: Runs the forward pass.
        backward: Runs the backward pass of a loss.
        random: Torch's random state before the step: dropout draws the same again.
    """
    watch = NonFiniteWatch()
    named = {p: n for m in models for n, p in m.named_parameters()}
    before = [p.grad for p in named]
    with ExitStack() as stack:
        stack.enter_context(random_as_before(random))
        for model in models:
            for name, module in model.named_modules():
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
    return Trial(watch.first.get("forward"), watch.first.get("backward"))
