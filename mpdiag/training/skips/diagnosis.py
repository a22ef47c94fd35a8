"""Why a step was skipped: what was not finite first, and what was at fault."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mpdiag.tracing.nonfinite import find_nonfinite
from mpdiag.training.gradients import arithmetic, ranks
from mpdiag.training.results import Cause, NonFinite, StepResult
from mpdiag.training.skips.trial import run_trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from mpdiag.tracing.nonfinite import Producer
    from mpdiag.training.weights.wrapping import Wrapped


def find_culprits(
    wrapped: Wrapped,
    held: Sequence[Tensor],
    names: Sequence[str],
    root: Any,
    loss: float | None,
    bad_ranks: Sequence[int],
) -> list[NonFinite]:
    """What is not finite, in the order in which the backward pass meets it.

    Args:
        wrapped: The models, whose changed buffers are looked at too.
        held: Parameters as the optimizer holds them, with gradients.
        names: Their names.
        root: The ``grad_fn`` of the loss, None if it is not known.
        loss: The unscaled loss, None if it is not known.
        bad_ranks: Ranks that saw something; another's is named where this one saw nothing.
    """
    found: list[NonFinite] = []
    if loss is not None and not math.isfinite(loss):
        found.append(NonFinite("the loss", "NaN" if math.isnan(loss) else "Inf", "forward"))
    buffers = wrapped.buffers.changed()
    for name, kind in arithmetic.non_finite(wrapped.buffers.names_of(buffers), buffers):
        found.append(NonFinite(name, kind, "buffers"))
    order = arithmetic.backward_order(root) if root is not None else {}
    model_side = wrapped.masters.model_parameter

    def reached(i: int) -> int:
        return order.get(id(model_side(held[i])), len(order) + len(held) - i)

    indices = [i for i in sorted(range(len(held)), key=reached) if held[i].grad is not None]
    grads = [g for i in indices if (g := held[i].grad) is not None]
    for name, kind in arithmetic.non_finite([names[i] for i in indices], grads):
        found.append(NonFinite(name, kind, "backward"))
    if not found:
        others = [r for r in bad_ranks if r != ranks.rank()]
        found += [NonFinite(f"rank {r}", "Inf", "other rank") for r in others]
    return found


def blame(level: str, loss: float | None, scale: float) -> Cause:
    """What was at fault, as far as it shows without running the batch again."""
    if level == "O0":
        return "model"
    # A finite loss says that the forward pass was fine; the scale comes after it.
    if loss is not None and math.isfinite(loss) and scale > 1:
        return "scale"
    return "unknown"


def tell_reason(found: Sequence[NonFinite], scale: float, cause: Cause, precision: str) -> str:
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


def farewell(result: StepResult, in_a_row: int, unknown: str, *, at_floor: bool) -> str:
    """Why training stops, and what to do; ``unknown``: what helps to learn the cause."""
    why = (
        f"the loss scale is at its floor of {result.scale:g} and gradients still overflow"
        if at_floor
        else f"{in_a_row} steps in a row were skipped"
    )
    advice = {
        "model": "the model itself diverges: look at the data, the learning rate, the loss",
        "scale": "allow smaller scales (min_scale) or analyze a new recording",
        "format": "keep that layer in FP32 (fp32_modules) or train in BF16",
        "unknown": unknown,
    }[result.cause or "unknown"]
    return f"training stopped at step {result.step}: {why} ({result.reason}); {advice}"


def replay(
    wrapped: Wrapped, loss_of: Callable[[], Tensor], backward: Callable[[Tensor], None]
) -> tuple[Cause, list[NonFinite]]:
    """Run the batch again in mixed precision at scale 1, and in FP32 at scale 1.

    Weights, buffers and gradients are as before afterwards.

    Args:
        wrapped: The models.
        loss_of: Runs the forward pass.
        backward: Runs a backward pass in mixed precision, without a scale.

    Returns:
        The cause, and what was not finite first in the forward and in the backward pass.
    """
    wrapped.fresh = False
    parameters = list({p: None for m in wrapped.models for p in m.parameters()})
    values = [p.data for p in parameters]
    try:
        mixed = run_trial(wrapped.models, loss_of, backward, wrapped.random)
        wrapped.switch.on = False
        for p in parameters:
            p.grad = None
            p.data = wrapped.masters.master(p).detach().float()
        plain = run_trial(wrapped.models, loss_of, _plain_backward, wrapped.random)
    finally:
        wrapped.switch.on = True
        for p, value in zip(parameters, values, strict=True):
            p.data = value
        wrapped.buffers.restore()
    if not plain.finite:
        return "model", plain.found
    return ("scale", []) if mixed.finite else ("format", mixed.found)


def locate(
    wrapped: Wrapped, loss_of: Callable[[], Tensor], backward: Callable[[Tensor], None]
) -> Producer | None:
    """Run the batch again as it was skipped, and find the operation that went non-finite first.

    Args:
        wrapped: The models; their gradients and buffers are as before afterwards.
        loss_of: Runs the forward pass.
        backward: Runs a backward pass in mixed precision, with the loss scale.
    """
    trace = find_nonfinite(wrapped.models)
    wrapped.fresh = False
    try:
        with trace:
            run_trial(wrapped.models, loss_of, backward, wrapped.random)
    finally:
        wrapped.buffers.restore()
    return trace.first


def _plain_backward(loss: Tensor) -> None:
    loss.backward()
