"""Accelerate: an ``Accelerator`` that trains by a plan.

::

    accelerator = apply_plan(Accelerator(), "plan.json")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # … the loop as it was: accelerator.backward(loss), accelerator.clip_grad_norm_(…), …

All models and optimizers of a training belong into one call of ``prepare``.
"""

from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch

from mpdiag.errors import UsageError
from mpdiag.installation.extras import EXTRAS
from mpdiag.integrations.shared import TrainingState
from mpdiag.plan import PrecisionPlan
from mpdiag.recording.contract import optimizers_of
from mpdiag.training.trainer import MixedPrecision

with EXTRAS["accelerate"].imports("mpdiag.integrations.accelerate"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import convert_to_fp32

import os
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from mpdiag.training.results import StepResult


def apply_plan(
    accelerator: Accelerator, plan: PrecisionPlan | str | os.PathLike[str], **options: Any
) -> "PlanAccelerator":
    """Make an ``Accelerator`` train by a plan. It is changed in place and returned.

    Args:
        accelerator: An ``Accelerator`` with ``mixed_precision="no"`` that has prepared nothing yet.
        plan: A plan, or the path of one.
        options: As for ``mpdiag.MixedPrecision``: ``run``, ``backend``, ``level`` …

    Raises:
        UsageError: If its mixed precision is on, or it has already prepared a model.
    """
    loaded = plan if isinstance(plan, PrecisionPlan) else PrecisionPlan.load(plan)
    if accelerator.mixed_precision != "no":
        raise UsageError(
            f"the Accelerator has mixed_precision={accelerator.mixed_precision!r}: pass "
            "mixed_precision='no', because the plan sets the precision"
        )
    if accelerator._models or accelerator._optimizers:
        message = "the Accelerator has already prepared models: apply the plan before prepare()"
        raise UsageError(message)
    # Its class is changed rather than made anew: a Trainer makes its own, and others refer to it.
    accelerator.__class__ = PlanAccelerator
    planned = cast("PlanAccelerator", accelerator)
    planned.plan, planned.plan_options, planned.mp = loaded, options, None
    return planned


class PlanAccelerator(Accelerator):
    """An ``Accelerator`` that trains by a plan. Call ``apply_plan`` to make one.

    Attributes:
        plan: The plan.
        mp: The ``MixedPrecision``; None before a model and an optimizer are prepared.
    """

    plan: PrecisionPlan
    plan_options: dict[str, Any]
    mp: MixedPrecision | None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as ``Accelerator`` does, and put models and optimizers under the plan."""
        prepared = super().prepare(*args, **kwargs)
        self._begin()
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare a model whose forward pass runs by the plan, with outputs in FP32."""
        if not isinstance(model.forward, _PlannedForward):
            model.forward = _PlannedForward(self, model.forward)
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Optimizer:
        """Prepare an optimizer that the plan steps."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            prepared: Optimizer = super().prepare_optimizer(optimizer, device_placement)
            return prepared
        placed = self.device_placement if device_placement is None else device_placement
        wrapped = PlanOptimizer(optimizer, device_placement=placed)
        wrapped.accelerator = self
        wrapped._is_accelerate_prepared = True
        self._optimizers.append(wrapped)
        return wrapped

    def _begin(self) -> MixedPrecision | None:
        """Put everything prepared under the plan, once there is a model and an optimizer."""
        if self.mp is None and self._models and self._optimizers:
            self.mp = MixedPrecision(
                list(self._models), optimizers_of(self._optimizers), self.plan, **self.plan_options
            )
            self.register_for_checkpointing(TrainingState(self.mp))
        elif self.mp is not None:
            held = len(self.mp.context.wrapped.optimizers)
            if len(self._optimizers) > held:
                raise UsageError(
                    "an optimizer was prepared after the training began: pass all optimizers to one "
                    "call of prepare()"
                )
        return self.mp

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss, divided among accumulated batches, and run backward."""
        if self.mp is None:
            super().backward(loss, **kwargs)
            return
        self.mp.backward(loss / self.gradient_accumulation_steps, **kwargs)

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """A context in which the plan's operations are cast."""
        if self.mp is None:
            with super().autocast(autocast_handler):
                yield
            return
        with self.mp.autocast():
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by their scale."""
        if self.mp is None:
            return
        given = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            self.mp.unscale(*optimizers_of(one))

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clip unscaled gradients: those of the FP32 masters, where there are any."""
        return super().clip_grad_norm_(self._held(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> Any:
        """Clip unscaled gradients: those of the FP32 masters, where there are any."""
        return super().clip_grad_value_(self._held(parameters), clip_value)

    def _held(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.mp is None:
            return given
        self.unscale_gradients()
        return [self.mp.context.wrapped.masters.master(parameter) for parameter in given]

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as ``Accelerator`` does; the masters of half-precision weights are saved, too."""
        self.complete_model()
        return super().save_state(*args, **kwargs)

    def complete_model(self) -> None:
        """Copy changes of the masters since the last forward pass into the model."""
        if self.mp is not None:
            self.mp.context.wrapped.look()

    def end_plan(self) -> None:
        """Return models and optimizers to FP32."""
        if self.mp is not None:
            self.mp.close()
            self.mp = None


class _PlannedForward:
    """A model's forward pass by the plan, with outputs in FP32; copies of the model have their own."""

    def __init__(self, accelerator: PlanAccelerator, forward: Callable[..., Any]) -> None:
        self._accelerator = accelerator
        self._forward = forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run it; by the plan once it has begun."""
        begun = self._accelerator._begin() is not None
        with self._accelerator.autocast() if begun else nullcontext():
            output = self._forward(*inputs, **named)
        return convert_to_fp32(output)

    def __reduce__(self) -> Any:
        """Pickled and copied as the model's own."""
        return _unplanned, (self._forward,)


def _unplanned(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class PlanOptimizer(AcceleratedOptimizer):
    """An optimizer that a plan steps, or skips with a reason.

    Attributes:
        last: The result of the last step.
    """

    accelerator: PlanAccelerator
    last: StepResult | None = None

    def step(self, closure: Any = None) -> None:
        """Step, once all accumulated batches have run backward."""
        mp = self.accelerator.mp
        if mp is None:
            super().step(closure)
            return
        if not self.gradient_state.sync_gradients:
            return
        if closure is not None:
            message = (
                "step() takes no closure with a plan under Accelerate: use MixedPrecision.step"
            )
            raise UsageError(message)
        self.last = mp.step(optimizer=optimizers_of(self)[0])
        self._is_overflow = self.last.skipped
