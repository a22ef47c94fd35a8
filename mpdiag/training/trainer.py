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

from mpdiag.display.wording import counted
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
    """Trains models in the precision that a plan asks for.

    Attributes:
        plan: The plan.
        precision: The level's properties, with the overrides applied.
        backend: ``native`` or ``emulated``.
        context: The wrapped models, casting, loss scale and monitor.
        run_log: The writer of ``training.jsonl``; None without a run folder.

    Args:
        model: A module or a list of modules. They are changed in place; ``close`` undoes it.
        optimizer: An optimizer, an object that wraps one, or a list of these.
        plan: A plan, or the path of one.
        level: O0 to O3. Default: the plan's level.
        backend: ``native`` computes in the device's own arithmetic. ``emulated`` stores the same
            tensors and computes in FP32. ``auto`` is native on accelerators and for BF16, and
            emulated for FP16 on a CPU. The format is the plan's in each case.
        run: The run folder for ``training.jsonl``: each step's loss, scale, skip and reason.
        overrides: Changes to the plan's precision and loss scale. Default: none.
        options: Settings of the trainer itself. Default: ``TrainerOptions()``.

    Raises:
        UsageError: If an argument has the wrong type or value, a model is not FP32, or another
            open ``MixedPrecision`` holds the model.
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
        overrides: PrecisionOverrides | None = None,
        options: TrainerOptions | None = None,
    ) -> None:
        overrides = AS_PLANNED if overrides is None else overrides
        options = DEFAULT_OPTIONS if options is None else options
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
            f"<MixedPrecision {self.precision.name} {self.precision.level} ({self.backend}), loss "
            f"scale {self.loss_scale:g}, {counted(self.steps, 'step')}, {self.skipped} skipped>"
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
        """Steps skipped so far."""
        return self.context.monitor.skipped

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step."""
        return self.context.scaling.scale

    @property
    def loss_scaler(self) -> Scaler:
        """The loss scaler with its state."""
        return self.context.scaling.scaler

    @property
    def tensor_cores(self) -> TensorCoreUse | None:
        """Whether Tensor Cores are in use; None in the first steps and without a GPU."""
        check = self.context.monitor.check
        return None if check is None else check.use

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Alarms: the gradients left the range that the plan's recording predicted."""
        return tuple(self.context.monitor.drift.alarms)

    # -- forward and backward ----------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which to run the forward pass and compute the loss."""
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
        """Multiply a loss by the loss scale, in FP32, because FP16 could overflow."""
        arguments.check_loss(loss)
        self.context.scaling.scaled_by_loop = True
        return self.context.scaling.scaled(loss)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Scale a loss and run its backward pass; gradients add up until ``step``.

        Args:
            loss: The unscaled loss.
            options: As for ``Tensor.backward``: ``retain_graph``, ``create_graph``, ``inputs``.
        """
        stepping.note_loss(self.context, loss)
        with self.context.casting.backward():
            self.context.scaling.scaled(loss).backward(**options)
        if not self._casts:
            self._casts = True  # said once
            logger.warning("%s", _NEVER_CAST)

    def add_regularizer(self, function: Regularizer) -> None:
        """Add a penalty on the weights, evaluated on the FP32 masters.

        Args:
            function: Takes a dict of parameters by name (FP32, as the optimizer holds them) and
                returns a scalar. Its gradient is added to the unscaled gradients before clipping.
        """
        self._regularizers.append(function)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer during training, at the levels with FP32 weights (O0, O1).

        Raises:
            UsageError: At O2 and O3, or if it is not an optimizer.
        """
        if self.precision.low_precision_model:
            raise UsageError(
                f"level {self.precision.level} casts the optimizers' parameters: pass all optimizers to "
                "MixedPrecision()"
            )
        added = arguments.listed_optimizers(optimizer)
        held = self.context.wrapped.optimizers
        held += [one for one in added if not any(one is o for o in held)]
        self._guard.watch(added)

    def apply_reduction(self, model: nn.Module) -> None:
        """Apply the plan's gradient reduction to a model that DDP wrapped after this was made.

        At O2 and O3, which cast weights, pass the model to ``MixedPrecision`` first and wrap it in
        DDP then. A model that is passed inside DDP needs no call of this.

        Raises:
            UsageError: If the model is not a DDP model.
        """
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"apply_reduction() needs a DistributedDataParallel, not {type(model).__name__}"
            )
        apply_reduction([model], self.plan.reduction)

    def scaler(self) -> LoopScaler:
        """The scaler for a loop that was written for ``torch.amp.GradScaler``.

        It has GradScaler's ``scale``, ``unscale_``, ``step`` and ``update``. Each call returns the
        same object.

        Raises:
            UsageError: If two optimizers hold the same parameter.
        """
        refuse_shared_parameters(self.context.wrapped.optimizers)
        return self._loop_scaler

    def master_parameters(self) -> list[Tensor]:
        """The tensors that the optimizers step, each once. Pass them to ``clip_grad_norm_``.

        At O2 these are FP32 masters of the model's half-precision weights. At the other levels they
        are the model's own parameters. Pending gradients are unscaled first, as by ``unscale``, so
        ``.grad`` is the gradient that the optimizer will use. If you change a master, the model
        uses the new value in its next forward pass.
        """
        if self.context.scaling.waiting:
            self.unscale()
        wrapped = self.context.wrapped
        self.context.masters.adopt()
        held = (p for o in wrapped.optimizers for p in parameters_of(o))
        return list(dict.fromkeys(held))

    def unscale(self, optimizer: Optimizer | None = None) -> None:
        """Divide the gradients by the loss scale, so that you can read or change them before ``step``.

        Afterwards ``.grad`` of the model's parameters and of ``master_parameters`` is in FP32.
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
            loss: The unscaled loss. ``step`` runs its backward pass. None if you called ``backward``.
            optimizer: The optimizer to step. Default: all of them.
            clip_norm: Clip the gradients to this total L2 norm.
            clip_value: Clip each gradient element to this absolute value.
            closure: For optimizers that evaluate the loss several times (LBFGS): a function that
                returns the loss. It must neither call ``zero_grad`` nor ``backward``.
            replay: A function that returns the loss of the same batch again. A skipped step calls it
                in FP32 and in mixed precision, both at scale 1, to find whether the scale or the
                model is at fault. From the second skip in a row, it is also called unchanged, to
                find the first operation at fault.
            batch: The step's inputs: tensors and plain values, nested as you like. The first few
                skipped steps are written into the run with them, as skip capsules for ``mpdiag why``.

        Raises:
            TrainingDiverged: If too many steps in a row were skipped, or a weight overflowed.
            UsageError: If there is no gradient, a gradient was computed without the loss scale, or an
                argument has the wrong type or value.
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
        """Return models and optimizers to FP32, with the masters' values. A second call does nothing.

        Changes that you made to the model since its last step are kept. A weight that was cast and is
        in no optimizer has no master, so it keeps its value in half precision.
        """
        setup.let_go(self.context.wrapped.models, self._loop_scaler)
        if self.context.monitor.check is not None:
            self.context.monitor.check.close()
        self._release()

    def __enter__(self) -> "MixedPrecision":  # noqa: PYI034 - typing.Self is Python 3.11's
        """Return this trainer; the constructor has done the work."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Close. An exception marks the run as failed, Ctrl-C as interrupted."""
        if self.run_log is not None and kind is not None:
            self.run_log.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")
        self.close()

    def log_metric(self, name: str, value: float, *, higher_is_better: bool = True) -> None:
        """Log a metric, such as an accuracy, into the run, for ``mpdiag compare``."""
        if self.run_log is None:
            raise UsageError("log_metric() needs a run folder: pass run= to MixedPrecision")
        self.run_log.note_metric(name, value, higher_is_better=higher_is_better)

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The full state, with models and optimizers, from which training continues bit for bit.

        It holds plain values and tensors, so ``torch.load(weights_only=True)`` reads it.
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
        """Continue from a state. If the plan has changed since, a warning says so and the new one holds.

        Raises:
            StateMismatch: If the state belongs to another level or model.
        """
        loaded = checkpoint.load(
            state, self.plan, self.precision, self.context.wrapped, self.loss_scaler
        )
        self.resume(loaded)

    def resume(self, progress: checkpoint.Progress) -> None:
        """Continue from a training's progress. Load the models and optimizers yourself."""
        monitor = self.context.monitor
        monitor.steps, monitor.skipped = progress.steps, progress.skipped
        monitor.skips.restore(progress.skips)
        if self.context.wrapped.policy.products is not None:
            self.context.wrapped.policy.products.restart()
        self.context.scaling.scaler = progress.scaler
        if not stepping.gradients_wait(self.context.wrapped):  # else they have the scale of before
            self.context.scaling.forget_all()
        self.context.wrapped.start.ended()

    def fp32_state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """A model's state dict in FP32 at every level, with the values of its masters.

        It includes changes that you made to the model since its last step.

        Args:
            model: The model. Default: the first.
        """
        wrapped = self.context.wrapped
        return wrapped.fp32_state(wrapped.models[0] if model is None else model)


def _release(parts: setup.Setup, guard: StepGuard) -> None:
    guard.release()
    parts.release()
