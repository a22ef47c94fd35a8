"""An estimate of how far each operation in a narrow format would change the weight gradients.

The change of the gradients g along a direction v is the change of the number h = v·g, and to first
order that is ∑ b·e: errors e of everything stored, forward *and* backward, times adjoints b = ∂h/∂y,
which a second backward pass gives for all of them at once. Over random directions the mean square of
that change is ‖Δg‖² (each v is standard normal), so a few directions estimate it for every operation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.errors import UsageError
from mpdiag.numerics.formats import FP16
from mpdiag.sensitivity.loss_estimate import (
    Estimator,
    _matched,
    _nodes,
    _PendingCall,
    check_loss,
    trained_parameters,
    untouched,
)
from mpdiag.tracing.source_lines import present_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from mpdiag.tracing.operation_calls import Site

DIRECTIONS = 4


@dataclass(frozen=True)
class GradientEstimate:
    """What one call of an operation in a narrow format would do to all weight gradients.

    Attributes:
        site: The call.
        forward: ‖Δg‖ / ‖g‖ if its forward pass were narrow; infinite where a value leaves the range.
        backward: The same for its backward pass.
    """

    site: Site
    forward: float
    backward: float


class _Twice(Estimator):
    """Also keeps the errors of backward operations, whose nodes exist once autograd differentiates."""

    def __init__(self, model: nn.Module, fmt: str, scale: float) -> None:
        super().__init__(model, fmt, scale)
        self.backward_calls: dict[int, _PendingCall] = {}

    @property
    def forward_calls(self) -> dict[int, _PendingCall]:
        return self._waiting

    @property
    def sites(self) -> list[Site]:
        return self._sites

    def backward_operation(self, site: Site | None, func: Any, args: Any, kwargs: Any) -> Any:
        if site is None:
            return func(*args, **kwargs)
        number = present_number()
        result, errors = self.run_both(func, args, kwargs)
        overflows = not all(bool(e.isfinite().all()) for e in errors)
        if number not in self.backward_calls:
            self.backward_calls[number] = _PendingCall(site, errors, overflows)
        return result


def estimate_gradients(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    fmt: str = FP16.name,
    scale: float = 1.0,
    directions: int = DIRECTIONS,
) -> list[GradientEstimate]:
    """Estimate, for every call of a step, how far its rounding changes the weight gradients.

    Costs one forward pass and ``directions`` + 1 backward passes, however many operations there are.

    Args:
        model: In FP32.
        step: Runs the model on a batch and returns the loss.
        fmt: ``fp16``, ``bf16``, ``fp8_e4m3`` or ``fp8_e5m2``.
        scale: The loss scale.
        directions: Random directions; the estimate scatters by about 1 / sqrt(2 · directions).

    Raises:
        UsageError: If torch cannot differentiate an operation twice, or the step returns no loss or
            trains nothing.
    """
    twice = _Twice(model, fmt, scale)
    trained = list(trained_parameters(model).values())
    with untouched(model):
        with twice.forward():
            loss = step()
        check_loss(loss)
        forward_calls = dict(twice.forward_calls)
        with twice:
            # The gradient of the seed also reaches results that depend on no weight.
            seed = torch.full_like(loss, scale, requires_grad=True)
            parts: Any = torch.autograd.grad(
                loss, trained, seed, create_graph=True, allow_unused=True
            )
        gradients = [g for g in parts if g is not None]
        size = math.sqrt(sum(float(g.detach().double().pow(2).sum()) for g in gradients))
        changes = _Changes()
        handles: list[Any] = []
        for g in gradients:
            for node in _nodes(g.grad_fn):
                changes.watch(node, forward_calls, twice.backward_calls, handles)
        try:
            for _ in range(directions):
                along = sum((g * torch.randn_like(g)).sum() for g in gradients)
                torch.autograd.grad(along, [*trained, seed], retain_graph=True, allow_unused=True)
                changes.finish_direction()
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            message = (
                f"torch cannot differentiate this model twice ({str(error).splitlines()[0]}): for "
                "attention, run the step inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )
            raise UsageError(message) from error
        finally:
            for handle in handles:
                handle.remove()
    size = size or 1.0
    return [
        GradientEstimate(s, *(math.sqrt(q / directions) / size for q in changes.of(s)))
        for s in twice.sites
    ]


class _Changes:
    """Adds up ∑ b·e by call: within a direction, then squared over directions."""

    def __init__(self) -> None:
        self._now: tuple[dict[Site, float], ...] = (defaultdict(float), defaultdict(float))
        self._squares: tuple[dict[Site, float], ...] = (defaultdict(float), defaultdict(float))
        self._watched: set[Any] = set()

    def watch(
        self,
        node: Any,
        forward: dict[int, _PendingCall],
        backward: dict[int, _PendingCall],
        handles: list[Any],
    ) -> None:
        """Register for the adjoints of a node, if it belongs to a call."""
        if node in self._watched:
            return
        self._watched.add(node)
        number = node._sequence_nr()
        for total, calls in zip(self._now, (forward, backward), strict=True):
            held = calls.get(number)
            if held is not None:
                handles.append(node.register_prehook(_hook(held, total)))
                return

    def finish_direction(self) -> None:
        """Square the sums of this direction, and reset them."""
        for now, squares in zip(self._now, self._squares, strict=True):
            for site, change in now.items():
                squares[site] += change * change
            now.clear()

    def of(self, site: Site) -> tuple[float, float]:
        """Sums of squares of a call, forward and backward."""
        forward, backward = (squares.get(site, 0.0) for squares in self._squares)
        return forward, backward


def _hook(held: _PendingCall, total: dict[Site, float]) -> Callable[[Sequence[Any]], None]:
    def hook(grad_outputs: Sequence[Any]) -> None:
        change = sum(
            float((e.double() * a.double()).sum()) for e, a in _matched(held.errors, grad_outputs)
        )
        if held.overflows or not math.isfinite(change):
            change = math.inf
        total[held.site] += change

    return hook
