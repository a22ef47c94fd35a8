"""Measures the effect of running one operation in a narrow format and everything else in FP32.

::

    measured = measure(model, lambda: loss_fn(model(x), y))          # every operation, FP16
    measured = measure(model, step, fmt="fp8_e4m3", part="backward")

An operation *runs in FP16* if its inputs and results are rounded to FP16 and it accumulates in FP32,
as on a Tensor Core. Forward and backward passes are measured separately or together; the backward
pass of an operation is what autograd runs for it.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mpdiag.emulation.rounding import round_to
from mpdiag.errors import UsageError
from mpdiag.files.documents import finite
from mpdiag.files.paths import place
from mpdiag.numerics.formats import FP16, FloatFormat, format_named
from mpdiag.runs.results import OperationSensitivity, Sensitivities
from mpdiag.sensitivity import loss_estimate
from mpdiag.tracing import dispatch
from mpdiag.tracing.operation_calls import Site, Sites, floats

NarrowPasses = Literal["forward", "backward", "both"]


@dataclass(frozen=True)
class Sensitivity:
    """The effect of running some operations in a narrow format.

    Errors are relative: ‖narrow − FP32‖ / ‖FP32‖; infinite where the narrow result is not finite.

    Attributes:
        module: The module of the operations.
        op: The operation.
        sites: The calls that ran in the format.
        output_error: Error of the model's output; NaN if it was not called as a whole.
        loss_error: Error of the loss.
        gradient_error: Error of all weight gradients as one vector.
        gradient_cosine: Cosine between that vector and FP32's.
        gradient_errors: Relative error and cosine of each weight's gradient, by name.
    """

    module: str
    op: str
    sites: tuple[Site, ...]
    output_error: float
    loss_error: float
    gradient_error: float
    gradient_cosine: float
    gradient_errors: Mapping[str, tuple[float, float]]

    @property
    def worst_gradient(self) -> str | None:
        """The weight whose gradient has the largest relative error."""
        errors = self.gradient_errors
        return max(errors, key=lambda name: errors[name][0]) if errors else None


@dataclass(frozen=True)
class Pass:
    """The results of one forward and backward pass, and the calls it made."""

    loss: float
    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]
    sites: tuple[Site, ...]


class _Narrow(Sites):
    """Runs some calls in a narrow format."""

    def __init__(
        self, model: nn.Module, chosen: Collection[Site], fmt: FloatFormat, part: NarrowPasses
    ) -> None:
        super().__init__(model)
        self.met: list[Site] = []
        self._chosen = frozenset(chosen)
        self._fmt = fmt
        self._part = part

    def forward_operation(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        self.met.append(site)
        return self.recomputed_operation(site, func, args, kwargs)

    def recomputed_operation(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        if self._part == "backward" or site not in self._chosen:
            return func(*args, **kwargs)
        return self._run(func, args, kwargs)

    def backward_operation(self, site: Site | None, func: Any, args: Any, kwargs: Any) -> Any:
        if self._part == "forward" or site not in self._chosen:
            return func(*args, **kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Round inputs and results; in a backward pass both carry the loss scale."""

        def narrow(x: Any) -> Any:
            if isinstance(x, Tensor) and x.dtype == torch.float32:
                return round_to(x, self._fmt)
            return x

        if not func._schema.is_mutable:
            return tree_map(narrow, func(*tree_map(narrow, args), **tree_map(narrow, kwargs)))
        # Tensors that are written to stay the same objects: they are rounded in place, before and after.
        written = floats(dispatch.written(func, args, kwargs))
        for tensor in written:
            tensor.copy_(round_to(tensor, self._fmt))
        same = {id(t) for t in written}
        keep = lambda x: x if id(x) in same else narrow(x)  # noqa: E731 - a word for two lines
        result = func(*tree_map(keep, args), **tree_map(keep, kwargs))
        for tensor in written:
            tensor.copy_(round_to(tensor, self._fmt))
        return tree_map(keep, result)


def run_once(
    model: nn.Module,
    step: Callable[[], Tensor],
    sites: Collection[Site] = (),
    *,
    fmt: str = FP16.name,
    part: NarrowPasses = "both",
    scale: float = 1.0,
) -> Pass:
    """Run one forward and backward pass with some calls in a format and the rest in FP32.

    The model, its buffers and gradients, and torch's random state are left unchanged.

    Args:
        model: In FP32.
        step: Runs the model on its batch and returns the loss, a scalar.
        sites: The calls that run in the format.
        fmt: A format's name.
        part: Whether their forward pass, backward pass or both run in it.
        scale: The loss scale: gradients carry it while they are rounded.

    Raises:
        UsageError: If the step returns no loss, or trains nothing.
    """
    narrow = _Narrow(model, sites, format_named(fmt), part)
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        outputs[:] = [x.detach().clone() for x in floats(output)]

    trained = loss_estimate.trained_parameters(model)
    with loss_estimate.untouched(model):
        handle = model.register_forward_hook(keep)
        try:
            with narrow.forward():
                loss: Any = step()
        finally:
            handle.remove()
        loss_estimate.check_loss(loss)
        value = float(loss.detach())
        seed = torch.full_like(loss, scale)
        with narrow:
            parts: Any = torch.autograd.grad(loss, list(trained.values()), seed, allow_unused=True)
    gradients = {
        n: g.detach() / scale for n, g in zip(trained, parts, strict=True) if g is not None
    }
    return Pass(value, tuple(outputs), gradients, tuple(narrow.met))


def measure(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    fmt: str = FP16.name,
    part: NarrowPasses = "both",
    scale: float = 1.0,
) -> list[Sensitivity]:
    """Run each operation of a step in a narrow format, one after the other.

    All calls of an operation in a module run together: one pass for each, and one in FP32.

    Args:
        model: In FP32, in the mode it trains in.
        step: Runs the model on a batch and returns the loss.
        fmt: ``fp16``, ``bf16``, ``fp8_e4m3`` or ``fp8_e5m2``.
        part: Which pass runs in the format.
        scale: The loss scale.

    Returns:
        One result per module and operation, in the order of first calls.

    Raises:
        UsageError: If the step returns no loss or trains nothing, or ``part`` is invalid.
    """
    if part not in ("forward", "backward", "both"):
        raise UsageError(f"part must be forward, backward or both, not {part!r}")
    reference = run_once(model, step, scale=scale)
    groups: dict[tuple[str, str], list[Site]] = {}
    for site in reference.sites:
        groups.setdefault((site.module, site.op), []).append(site)
    return [
        compare(reference, run_once(model, step, sites, fmt=fmt, part=part, scale=scale), sites)
        for sites in groups.values()
    ]


def compare(reference: Pass, narrow: Pass, sites: Sequence[Site]) -> Sensitivity:
    """The errors of a pass relative to the exact one, with these calls of one operation narrow."""
    names = list(reference.gradients)
    pairs = [(reference.gradients[n], narrow.gradients[n]) for n in names]
    each = {n: (relative_error(*p), cosine(*p)) for n, p in zip(names, pairs, strict=True)}
    whole = [torch.cat([g.flatten() for g in side]) for side in zip(*pairs, strict=True)]
    outputs = [
        torch.cat([x.flatten() for x in p.outputs]) for p in (reference, narrow) if p.outputs
    ]
    loss = tuple(torch.tensor(one.loss, device="cpu") for one in (reference, narrow))
    return Sensitivity(
        module=sites[0].module,
        op=sites[0].op,
        sites=tuple(sites),
        output_error=relative_error(*outputs) if len(outputs) == 2 else math.nan,
        loss_error=relative_error(*loss),
        gradient_error=relative_error(*whole) if whole else math.nan,
        gradient_cosine=cosine(*whole) if whole else math.nan,
        gradient_errors=each,
    )


def relative_error(exact: Tensor, narrow: Tensor) -> float:
    """‖narrow − exact‖ / ‖exact‖ in FP64; infinite where narrow is not finite or exact is 0."""
    x, y = exact.double(), narrow.double()
    size, error = float(x.norm()), float((y - x).norm())
    if not math.isfinite(error):
        return math.inf
    return 0.0 if error == 0 else (error / size if size else math.inf)


def cosine(exact: Tensor, narrow: Tensor) -> float:
    """Cosine of the angle between two tensors, in FP64; 1 if both are 0, NaN if not finite."""
    x, y = exact.double().flatten(), narrow.double().flatten()
    if not bool(torch.isfinite(y).all()):
        return math.nan
    size = float(x.norm() * y.norm())
    if size == 0:
        return 1.0 if float(x.norm()) == float(y.norm()) else 0.0
    return max(-1.0, min(1.0, float(x @ y) / size))


def measure_sensitivity(
    model: nn.Module,
    step: Callable[[], Tensor],
    run: str | os.PathLike[str] | None = None,
    *,
    fmt: str = FP16.name,
    scale: float = 1.0,
) -> Sensitivities:
    """Measure the error of each operation of a step in a narrow format, one operation at a time.

    ::

        mpdiag.measure_sensitivity(model, lambda: loss_fn(model(x), y), "runs/ssd", scale=64)

    Each operation runs once in the narrow format while everything else stays in FP32, and one backward
    pass estimates all of them at once. The dashboard's *Operations* view ranks operations by the result.

    Args:
        model: The model in FP32, in its training mode. It is not changed.
        step: A function that runs the model on a batch and returns the loss, the same in each call.
        run: The run folder for ``sensitivity.json``; None to store nothing.
        fmt: ``fp16``, ``bf16``, ``fp8_e4m3`` or ``fp8_e5m2``.
        scale: The loss scale of the gradients.

    Raises:
        UsageError: If the step returns no loss, or no parameter gets a gradient.
        ValueError: If the format is unknown.
    """
    estimates = dict(
        loss_estimate.by_operation(loss_estimate.estimate(model, step, fmt=fmt, scale=scale))
    )
    rows = tuple(
        _row(found, estimates.get((found.module, found.op)))
        for found in measure(model, step, fmt=fmt, scale=scale)
    )
    result = Sensitivities(fmt, float(scale), rows)
    if run is not None:
        result.save(place(run))
    return result


def _row(found: Sensitivity, estimated: float | None) -> OperationSensitivity:
    return OperationSensitivity(
        module=found.module,
        op=found.op,
        calls=len(found.sites),
        output_error=finite(found.output_error),
        loss_error=finite(found.loss_error),
        gradient_error=finite(found.gradient_error),
        gradient_cosine=finite(found.gradient_cosine),
        worst_gradient=found.worst_gradient,
        estimate=finite(estimated),
        finite=math.isfinite(found.loss_error) and math.isfinite(found.gradient_error),
    )
