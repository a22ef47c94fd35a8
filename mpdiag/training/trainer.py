"""``MixedPrecision``: train by a plan.

::

    mp = mpdiag.MixedPrecision(model, optimizer, plan)
    for x, y in loader:
        with mp.autocast():
            loss = loss_fn(model(x), y)
        result = mp.step(loss, clip_norm=1.0)

Sources: NVIDIA, *Training with Mixed Precision User Guide* (loss scaling); *Mixed Precision
Training* (sections 3.1 and 3.2); OpenSeq2Seq, *Mixed Precision Training* (regularisers).
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpdiag.errors import UsageError
from mpdiag.numerics.loss_scalers import Scaler
from mpdiag.plan import PrecisionPlan
from mpdiag.tracing.capture import refuse_capture
from mpdiag.tracing.uncompiled import UncompiledContext, uncompiled
from mpdiag.training import arguments, checkpoint, setup, stepping, updates
from mpdiag.training.judgement import NO_CLIP, Clip
from mpdiag.training.loop_scaler import LoopScaler, refuse_shared_parameters
from mpdiag.training.monitor import Alarm
from mpdiag.training.options import (
    AS_PLANNED,
    DEFAULT_OPTIONS,
    Backend,
    PrecisionOverrides,
    TrainerOptions,
)
from mpdiag.training.results import StepResult
from mpdiag.training.scaling import parameters_of
from mpdiag.training.setup import apply_reduction
from mpdiag.training.skips.capsule import CapsuleWriter
from mpdiag.training.stepping import Regularizer
from mpdiag.training.tensor_core_check import TensorCoreUse
from mpdiag.training.updates import StepGuard

logger = logging.getLogger("mpdiag")

_NEVER_CAST = (
    "no forward pass ran inside mp.autocast(), so the plan's casts were not applied: put the model's "
    "call and the loss inside `with mp.autocast():`"
)
_ADVICE = "pass replay= to step() to learn whether the scale or the model is at fault"


@uncompiled("scale", "backward", "unscale", "step", "master_parameters", "close")
class MixedPrecision:
    """Trains models in the precision a plan asks for.

    Attributes:
        plan: The plan obeyed.
        precision: The level's properties, overrides applied.
        backend: ``native`` or ``emulated``.
        context: The parts at work: wrapped models, casting, loss scale, monitor.
        run_log: What writes ``training.jsonl``; None without a run folder.

    Args:
        model: A module or a list of them; they are changed in place, and ``close`` undoes it.
        optimizer: An optimizer or a list of them; or what wraps one and steps as one does.
        plan: A plan, or the path of one.
        level: O0 to O3; default: the plan's.
        backend: ``native`` is the device's own arithmetic; ``emulated`` stores the same tensors and
            computes in FP32; ``auto`` is native on accelerators and for BF16, emulated for FP16 on
            a CPU. The format is never changed.
        run: A run folder to write ``training.jsonl`` into: each step's loss, scale, skip and reason.
        overrides: What to change in the plan's precision and loss scale.
        options: How the trainer works, whatever the precision.

    Raises:
        UsageError: If an argument makes no sense, a model is not FP32, or another live
            ``MixedPrecision`` holds it.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        plan: PrecisionPlan | str | os.PathLike[str],
        *,
        level: str | None = None,
        backend: Backend = "auto",
        run: str | os.PathLike[str] | None = None,
        overrides: PrecisionOverrides = AS_PLANNED,
        options: TrainerOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.plan = plan if isinstance(plan, PrecisionPlan) else PrecisionPlan.load(plan)
        models = arguments.listed(model, nn.Module, "model")
        optimizers = arguments.listed_optimizers(optimizer)
        arguments.check_type(overrides, PrecisionOverrides, "overrides")
        arguments.check_type(options, TrainerOptions, "options")
        parts = setup.set_up(
            models,
            optimizers,
            self.plan,
            setup.Request(level, backend, run, overrides, options),
            setup.Surroundings(_ADVICE),
        )
        self.precision = parts.precision
        self.backend = parts.backend
        self.context = parts.context
        self.run_log = parts.context.monitor.log
        self._casts = not self.precision.operation_casts  # whether a forward pass asked for them
        self._regularizers: list[Regularizer] = []
        self._guard = StepGuard(optimizers, self.context.waiting_parameters)
        self._loop_scaler = LoopScaler(self.context, self._guard, self._regularizers)
        self._capsules = CapsuleWriter(
            self.run_log,
            self.context.wrapped,
            {
                "level": self.precision.level,
                "backend": self.backend,
                "device": self.context.ranks.device.type,
                "plan": self.plan.to_json(),
            },
        )
        # What ``scaler()`` returns lives as long as this or a loop has it, and the models with it.
        self._release = weakref.finalize(self._loop_scaler, _release, parts, self._guard)
        setup.hold(models, self._loop_scaler)

    def __repr__(self) -> str:
        return (
            f"<MixedPrecision {self.precision.format} {self.precision.level} ({self.backend}), loss "
            f"scale {self.loss_scale:g}, {self.steps} steps, {self.skipped} of them skipped>"
        )

    def __reduce__(self) -> Any:
        """Refuse to be pickled or copied: the models would be held twice."""
        raise TypeError("a MixedPrecision cannot be pickled or copied: save mp.state_dict()")

    # -- state -------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Calls of ``step`` so far."""
        return self.context.monitor.steps

    @property
    def skipped(self) -> int:
        """How many of them were skipped."""
        return self.context.monitor.skipped

    @property
    def loss_scale(self) -> float:
        """The scale in force."""
        return self.context.scaling.scale

    @property
    def loss_scaler(self) -> Scaler:
        """The loss scaler's present state."""
        return self.context.scaling.scaler

    @property
    def tensor_cores(self) -> TensorCoreUse | None:
        """Whether Tensor Cores are in use; None before a few steps have passed, and off a GPU."""
        check = self.context.monitor.check
        return None if check is None else check.use

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Where training has left what the recording predicted."""
        return tuple(self.context.monitor.drift.alarms)

    # -- forward and backward ----------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[None]:
        """A context for the forward pass and the loss."""
        return UncompiledContext(self._autocast)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if torch.is_grad_enabled():
            self._casts = True
            refuse_capture()
        self._forget_abandoned()
        start = self.context.wrapped.start
        around = start.enter(grad=torch.is_grad_enabled())
        try:
            with self.context.casting.forward():
                yield
        finally:
            start.leave(around)

    def _forget_abandoned(self) -> None:
        """Forget gradients that the loop cleared without a step."""
        context = self.context
        if context.scaling.waiting and not stepping.gradients_wait(context.wrapped):
            context.scaling.forget_all()
            context.wrapped.start.ended()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in FP32: an FP16 loss could not hold the product."""
        arguments.check_loss(loss)
        self.context.scaling.scaled_by_loop = True
        return self.context.scaling.scaled(loss)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Scale a loss and run its backward pass; gradients add up until ``step``.

        Args:
            loss: The unscaled loss.
            options: As for ``Tensor.backward``: ``retain_graph``, ``create_graph``, ``inputs``.
        """
        stepping.run_backward(self.context, loss, **options)
        if not self._casts:
            self._casts = True  # said once
            logger.warning("%s", _NEVER_CAST)

    def add_regularizer(self, function: Regularizer) -> None:
        """Add a penalty on the weights, evaluated on the FP32 masters.

        Args:
            function: From parameters by name (FP32, as the optimizer holds them) to a scalar, which
                stands beside the loss: its gradient is added to the unscaled gradients before
                clipping.
        """
        self._regularizers.append(function)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take in an optimizer that was made later, at the levels with FP32 weights (O0, O1).

        Raises:
            UsageError: At O2 and O3, or if it is no optimizer.
        """
        if self.precision.low_precision_model:
            raise UsageError(
                f"level {self.precision.level} casts what optimizers hold: give all optimizers to "
                "MixedPrecision when it is made"
            )
        added = arguments.listed_optimizers(optimizer)
        held = self.context.wrapped.optimizers
        held += [one for one in added if not any(one is o for o in held)]
        self._guard.watch(added)

    def apply_reduction(self, model: nn.Module) -> None:
        """Reduce the gradients of a model that was wrapped in DDP only now as the plan says.

        Where weights are cast (O2, O3) a model must be given before DDP wraps it; models that come
        inside DDP are reduced by the plan from the start.

        Raises:
            UsageError: If it is not a DDP model.
        """
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"apply_reduction() needs a DistributedDataParallel, not {type(model).__name__}"
            )
        apply_reduction([model], self.plan.reduction)

    def scaler(self) -> LoopScaler:
        """For loops written for ``torch.amp.GradScaler``: scale, unscale_, step and update as theirs.

        The same one each time; see ``training/loop_scaler.py``.

        Raises:
            UsageError: If two optimizers hold the same parameter, see ``refuse_shared_parameters``.
        """
        refuse_shared_parameters(self.context.wrapped.optimizers)
        return self._loop_scaler

    def master_parameters(self) -> list[Tensor]:
        """What the optimizers step, each tensor once: what ``clip_grad_norm_`` takes.

        At O2 these are FP32 masters of the model's half-precision weights, at every other level the
        model's own parameters. Gradients that wait for a step are unscaled first, as by ``unscale``,
        so ``.grad`` is what the optimizer will use. A value written into a master is seen by the
        model in its next forward pass.
        """
        if self.context.scaling.waiting:
            self.unscale()
        wrapped = self.context.wrapped
        self.context.masters.adopt()
        held = (p for o in wrapped.optimizers for p in parameters_of(o))
        return list(dict.fromkeys(held))

    def unscale(self, optimizer: Optimizer | None = None) -> None:
        """Divide the gradients by their scale now, to look at or to change them before ``step``.

        After this they are found as ``parameter.grad`` of the model's parameters and of what the
        optimizer holds (``master_parameters``), in FP32.
        """
        for one in self.context.chosen(optimizer):
            stepping.unscale_gradients(self.context, one)

    def step(
        self,
        loss: Tensor | None = None,
        *,
        optimizer: Optimizer | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        closure: Callable[[], Tensor] | None = None,
        replay: Callable[[], Tensor] | None = None,
        batch: Any = None,
    ) -> StepResult:
        """Take one training step, or skip it with a reason.

        Args:
            loss: The unscaled loss, whose backward pass is run here; None if ``backward`` was
                called before.
            optimizer: The one to step; default: all, together.
            clip_norm: Largest Euclidean norm of all gradients.
            clip_value: Largest |gradient|.
            closure: For optimizers that evaluate the loss several times (LBFGS): clears nothing,
                returns the loss, without a backward pass of its own.
            replay: Returns the loss of the same batch once more; on a skip it is run in FP32 at
                scale 1, and in mixed precision at scale 1, to find what was at fault; from the second
                skip in a row on, also as it was, to find the first operation at fault.
            batch: The step's inputs, a nest of tensors and plain values; a skipped step is written
                with them into the run as a capsule (the first few), see
                ``training/skips/capsule.py``.

        Raises:
            TrainingDiverged: If too many steps in a row were skipped, or a weight left the format.
            UsageError: If there is no gradient, or it never had the loss scale, or an argument makes no
                sense.
        """
        refuse_capture()
        clip = NO_CLIP if clip_norm is clip_value is None else Clip(clip_norm, clip_value)
        chosen = self.context.chosen(optimizer)
        context = self.context
        if batch is not None:
            self._capsules.check(batch)
        with context.masters.updating(chosen):
            if closure is not None:
                result = self._step_with_closure(chosen, closure, clip)
            else:
                if loss is not None:
                    self.backward(loss)  # a subclass may have its own
                stepping.prepare_gradients(context, chosen, self._regularizers)
                update = functools.partial(updates.update_weights, context, chosen, self._guard)
                result = stepping.take_step(context, chosen, update, clip=clip, replay=replay)
        if result.skipped and batch is not None:
            self._capsules.write(batch, result)
        for one in chosen:
            one.zero_grad()
        context.scaling.forget(chosen)
        stepping.note_step(context, chosen, result)
        return result

    def _step_with_closure(
        self, chosen: list[Optimizer], closure: Callable[[], Tensor], clip: Clip
    ) -> StepResult:
        """A step of an optimizer that evaluates the loss itself."""
        if len(chosen) != 1:
            raise UsageError("step(closure=…) needs optimizer=…: name the one that evaluates it")
        (optimizer,) = chosen
        context = self.context
        masters = context.masters
        masters.settle()  # the evaluation below overwrites the model before any device was waited for
        masters.begin_update(chosen)
        masters.device_answered(chosen)

        def evaluate() -> updates.Evaluation:
            # The optimizer has moved its masters; the model must see them.
            masters.give_weights(parameters_of(optimizer))
            torch.clear_autocast_cache()
            optimizer.zero_grad()
            loss = closure()
            self.backward(loss)
            stepping.prepare_gradients(context, chosen, self._regularizers)
            value = float(loss.detach())
            return updates.Evaluation(value, value)

        with self._guard:
            result, _ = updates.step_with_closure(
                context, optimizer, optimizer.step, evaluate, clip=clip
            )
        masters.give_weights(parameters_of(optimizer))
        if result is None:
            raise UsageError("step(closure=…) found no gradient: the closure must return the loss")
        return result

    # -- life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give models and optimizers back in FP32, with the masters' bits; a second call does nothing.

        What was written into the model since its last step is kept. A weight that was cast and that no
        optimizer holds has no master: it comes back as half precision holds it.
        """
        setup.let_go(self.context.wrapped.models, self._loop_scaler)
        if self.context.monitor.check is not None:
            self.context.monitor.check.close()
        self._release()

    def __enter__(self) -> MixedPrecision:  # noqa: PYI034 - typing.Self is Python 3.11's
        """Nothing more than the constructor did."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Close; an exception marks the run as failed, Ctrl-C as interrupted."""
        if self.run_log is not None and kind is not None:
            self.run_log.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")
        self.close()

    def log_metric(self, name: str, value: float, *, higher_is_better: bool = True) -> None:
        """Write a figure of merit into the run, for ``mpdiag compare``."""
        if self.run_log is None:
            raise UsageError("log_metric() needs a run folder: pass run= to MixedPrecision")
        self.run_log.note_metric(name, value, higher_is_better=higher_is_better)

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit for bit, models and optimizers included.

        Plain values and tensors: ``torch.load(weights_only=True)`` reads it.
        """
        self._forget_abandoned()
        if self.context.scaling.waiting and stepping.gradients_matter(self.context.wrapped):
            raise UsageError(
                "state_dict() in the middle of an accumulation would lose its gradients: step first, "
                "or clear them with zero_grad()"
            )
        monitor = self.context.monitor
        progress = checkpoint.Progress(
            self.loss_scaler, monitor.steps, monitor.skipped, monitor.skips.to_plain()
        )
        return checkpoint.save(self.plan, self.precision, progress, self.context.wrapped)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; a plan that was edited since is obeyed from here on, and said.

        Raises:
            StateMismatch: If it belongs to another level or model.
        """
        loaded = checkpoint.load(
            state, self.plan, self.precision, self.context.wrapped, self.loss_scaler
        )
        self.resume(loaded)

    def resume(self, progress: checkpoint.Progress) -> None:
        """Go on from where a training had got; models and optimizers are the caller's to load."""
        monitor = self.context.monitor
        monitor.steps, monitor.skipped = progress.steps, progress.skipped
        monitor.skips.restore(progress.skips)
        self.context.scaling.scaler = progress.scaler
        if not stepping.gradients_wait(self.context.wrapped):  # else they have the scale of before
            self.context.scaling.forget_all()
        self.context.wrapped.start.ended()

    def fp32_state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """A model's state dict in FP32, with all bits of its masters, whatever the level holds.

        What was written into the model since its last step is in it.

        Args:
            model: Which model; default: the first.
        """
        wrapped = self.context.wrapped
        return wrapped.fp32_state(wrapped.models[0] if model is None else model)


def _release(parts: setup.Setup, guard: StepGuard) -> None:
    guard.release()
    parts.release()
