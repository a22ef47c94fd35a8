"""How a step is taken: the order that makes it safe.

::

    scale the loss (in FP32) → backward → gradients to the masters → ranks agree: all finite? →
    unscale → regularisers → clip → optimizer step, or skip and restore → adjust the scale
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpdiag.emulation import policy
from mpdiag.errors import TrainingDiverged, UsageError
from mpdiag.training import arguments
from mpdiag.training.arguments import parameters_of
from mpdiag.training.drift import Alarm, DriftWatch
from mpdiag.training.gradients import arithmetic, ranks
from mpdiag.training.results import NonFinite, StepResult
from mpdiag.training.skips import diagnosis
from mpdiag.training.step_guard import StepGuard
from mpdiag.training.weights.transaction import Transaction

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from mpdiag.emulation.mode import Emulation
    from mpdiag.numerics.loss_scalers import Scaler
    from mpdiag.plan import PrecisionPlan
    from mpdiag.training.levels import Precision
    from mpdiag.training.run_log import Journal
    from mpdiag.training.tensor_core_check import TensorCoreCheck, TensorCoreUse
    from mpdiag.training.weights.wrapping import Wrapped

Regularizer = Callable[[Mapping[str, Tensor]], Tensor]


class _NotFinite(Exception):
    """Leaves an optimizer's step from inside a closure."""


class Stepping:
    """Forward, backward and step over wrapped models; ``MixedPrecision`` without its life."""

    _to_learn = "pass replay= to step() to learn whether the scale or the model is at fault"

    def __init__(
        self,
        plan: PrecisionPlan,
        precision: Precision,
        scaler: Scaler,
        wrapped: Wrapped,
        emulation: Emulation | None,
        *,
        device: torch.device,
        max_skips: int,
        group: Any,
        journal: Journal | None,
    ) -> None:
        self.plan = plan
        self.precision = precision
        self.steps = 0
        self.skipped = 0
        self.journal = journal
        self._scaler = scaler
        self._wrapped = wrapped
        self._emulation = emulation
        self._device = device
        self._max_skips = max_skips
        self._group = group
        self._regularizers: list[Regularizer] = []
        self._pending: dict[int, float] = {}  # scale of the gradients that wait, by optimizer
        self._unscaled: set[int] = set()
        self._last_loss: Tensor | None = None  # of a backward pass that no step has followed yet
        self._root: Any = None  # the grad_fn of the last loss, to tell backward's order
        self._in_a_row = 0
        self._watch = DriftWatch(plan)
        self._guard = StepGuard(wrapped.optimizers)
        self._check: TensorCoreCheck | None = None

    @property
    def tensor_cores(self) -> TensorCoreUse | None:
        """Whether Tensor Cores are in use; None before a few steps have passed, and off a GPU."""
        return None if self._check is None else self._check.use

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Where training has left what the recording predicted."""
        return tuple(self._watch.alarms)

    def _alarm(self, alarm: Alarm | None) -> None:
        if alarm is not None and self.journal is not None:
            self.journal.note(alarm.to_json())

    @property
    def loss_scale(self) -> float:
        """The scale in force."""
        return self._scaler.scale

    @property
    def scaler(self) -> Scaler:
        """The loss scaler's present state."""
        return self._scaler

    # -- forward and backward ----------------------------------------------------------------------

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The forward pass and the loss belong inside."""
        precision = self.precision
        with ExitStack() as stack:
            if self._wrapped.switch.on and precision.level != "O0":
                if self._emulation is not None:
                    stack.enter_context(self._emulation)
                if precision.operation_casts:
                    stack.enter_context(policy.in_force(self._wrapped.policy))
                    stack.enter_context(torch.autocast(self._device.type, precision.dtype))
            yield

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Backward passes and updates: the same arithmetic, with autocast off."""
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self._device.type, enabled=False))
            if self._wrapped.switch.on:
                if self._emulation is not None:
                    stack.enter_context(self._emulation)
                if self.precision.operation_casts:  # for what is computed again in backward
                    stack.enter_context(policy.in_force(self._wrapped.policy))
            yield

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in FP32: an FP16 loss could not hold the product."""
        factor = self._scaler.scale
        return loss if factor == 1.0 else loss.float() * factor

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Scale a loss and run its backward pass; gradients add up until ``step``.

        Args:
            loss: The unscaled loss.
            options: As for ``Tensor.backward``: ``retain_graph``, ``create_graph``, ``inputs``.
        """
        scale = self._scaler.scale
        for optimizer in self._wrapped.optimizers:
            self._bring_to_scale(optimizer, scale)
        if loss.grad_fn is not None:
            self._root = loss.grad_fn
        self._last_loss = loss.detach() if loss.numel() == 1 else None
        with self._computing():
            self.scale(loss).backward(**options)

    def _bring_to_scale(self, optimizer: Optimizer, scale: float) -> None:
        """Bring gradients that wait for their step to today's scale, so that sums stay right."""
        key = id(optimizer)
        before = self._pending.get(key, scale)
        if key in self._unscaled:
            before = 1.0
            self._unscaled.discard(key)
        if before != scale:
            waiting = [g for g in map(self._gradient_of, parameters_of(optimizer)) if g is not None]
            arithmetic.multiply(waiting, scale / before)
        self._pending[key] = scale

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        if parameter.grad is not None:
            return parameter.grad
        return self._wrapped.masters.model_parameter(parameter).grad

    def add_regularizer(self, function: Regularizer) -> None:
        """Add a penalty on the weights, evaluated on the FP32 masters.

        Args:
            function: From parameters by name (FP32, as the optimizer holds them) to a scalar, which
                stands beside the loss: its gradient is added to the unscaled gradients before
                clipping.
        """
        self._regularizers.append(function)

    def apply_reduction(self, model: nn.Module) -> None:
        """Reduce the gradients of a model that was wrapped in DDP only now as the plan says.

        Where weights are cast (O2, O3) a model must be given before DDP wraps it; models that come
        inside DDP are reduced by the plan from the start.

        Raises:
            UsageError: If it is no DDP model.
        """
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            message = (
                f"apply_reduction() wants a DistributedDataParallel, not {type(model).__name__}"
            )
            raise UsageError(message)
        ranks.apply_reduction([model], self.plan.reduction)

    # -- the step ----------------------------------------------------------------------------------

    def unscale(self, optimizer: Optimizer | None = None) -> None:
        """Divide the gradients by their scale now, to look at or to change them before ``step``.

        After this they are found as ``parameter.grad`` of what the optimizer holds.
        """
        for one in self._chosen(optimizer):
            if id(one) in self._unscaled:
                continue
            held = self._collect(one)
            arithmetic.unscale([p.grad for p in held if p.grad is not None], self._scale_of(one))
            self._unscaled.add(id(one))

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
                scale 1, and in mixed precision at scale 1, to tell what was at fault; from the second
                skip in a row on, also as it was, to find the first operation at fault.
            batch: The step's inputs, a nest of tensors and plain values; a skipped step is written
                with them into the run as a capsule (the first few), see ``training/capsule.py``.

        Raises:
            TrainingDiverged: If too many steps in a row were skipped, or a weight left the format.
            UsageError: If there is no gradient, or an argument makes no sense.
        """
        arguments.check_clip(clip_norm, clip_value)
        chosen = self._chosen(optimizer)
        if batch is not None:
            self._check_batch(batch)
        if closure is not None:
            result = self._evaluate(chosen, closure, clip_norm, clip_value)
        else:
            if loss is not None:
                self.backward(loss)
            result = self._apply(chosen, clip_norm, clip_value, replay)
        if result.skipped and batch is not None:
            self._keep(batch, result)
        self._finish(chosen, result)
        return result

    def _apply(
        self,
        chosen: Sequence[Optimizer],
        clip_norm: float | None,
        clip_value: float | None,
        replay: Callable[[], Tensor] | None,
    ) -> StepResult:
        scale = self._scale_of(chosen[0])
        factors = self._prepare(chosen)
        held = [p for o in chosen for p in parameters_of(o) if p.grad is not None]
        found = [p.grad for p in held if p.grad is not None]
        if not found:
            message = "step() found no gradient: call step(loss), or backward(loss) first"
            raise UsageError(message)
        wants_maximum = self._scaler.needs_absmax
        sweep = arithmetic.sweep(found, self._wrapped.buffers.changed(), absmax=wants_maximum)
        finite = sweep.finite and not self._spoiled(chosen)
        finite, bad_ranks = ranks.agree(finite, scale, self._device, self._group)
        norm, absmax = sweep.norm / factors, sweep.absmax / factors
        last, self._last_loss = self._last_loss, None
        value = None if last is None else float(last)
        if not finite:
            return self._skip(held, scale, value, norm, bad_ranks, replay)
        if self._watch.due(self.steps):
            arithmetic.unscale(found, factors)
            factors = 1.0
            self._alarm(self._watch.look(self.steps, found))
        clip = 1.0 if clip_norm is None else arithmetic.clip_factor(norm, clip_norm)
        if clip < 1.0 and math.frexp(factors)[0] == 0.5:
            arithmetic.multiply(found, clip / factors)
        else:
            arithmetic.unscale(found, factors)
            arithmetic.multiply(found, clip)
        if clip_value is not None:
            arithmetic.clamp(found, clip_value)
        culprit = self._update(chosen, held)
        if culprit is not None:
            return self._skip(held, scale, value, norm, [ranks.rank()], None, culprit)
        seen = min(absmax, 65504.0 / scale) if wants_maximum else 0.0
        self._scaler = self._scaler.adjust(seen)
        return self._taken(scale, value, norm)

    def _spoiled(self, _chosen: Sequence[Optimizer]) -> bool:
        """Whether gradients were not finite at some time since the last step."""
        return False

    def _taken(self, scale: float, loss: float | None, norm: float) -> StepResult:
        return StepResult(
            skipped=False,
            reason="",
            step=self.steps,
            scale=scale,
            next_scale=self._scaler.scale,
            loss=loss,
            gradient_norm=norm,
            rank=ranks.rank(),
        )

    def _prepare(self, chosen: Sequence[Optimizer]) -> float:
        """Collect gradients and add regularisers; returns the scale still on the gradients."""
        held = [p for o in chosen for p in self._collect(o)]
        scales = {1.0 if id(o) in self._unscaled else self._scale_of(o) for o in chosen}
        factor = scales.pop() if len(scales) == 1 else 1.0
        if scales or self._regularizers:
            for one in chosen:
                self.unscale(one)
            factor = 1.0
        if self._regularizers:
            self._regularize(held)
        return factor

    def _collect(self, optimizer: Optimizer) -> list[Tensor]:
        """The optimizer's parameters, gradients moved to the masters."""
        masters = self._wrapped.masters
        if self.precision.master_weights:
            masters.adopt()
            masters.take_gradients(parameters_of(optimizer))
        held = parameters_of(optimizer)
        for p in held:  # entries that stand for one value twice have no norm yet
            if p.grad is not None and p.grad.layout == torch.sparse_coo:
                p.grad = p.grad.coalesce()
        return held

    def _regularize(self, held: Sequence[Tensor]) -> None:
        trained = [p for p in held if p.requires_grad]
        named = dict(zip(self._names(trained), trained, strict=True))
        with torch.enable_grad(), torch.autocast(self._device.type, enabled=False):
            for function in self._regularizers:
                penalty = function(named)
                parts = torch.autograd.grad(penalty, trained, allow_unused=True)
                for parameter, part in zip(trained, parts, strict=True):
                    if part is not None:
                        before = parameter.grad
                        parameter.grad = part if before is None else before.add_(part)

    def _update(self, chosen: Sequence[Optimizer], held: Sequence[Tensor]) -> NonFinite | None:
        """Step the optimizers; what does not fit its format is undone and named."""
        low = self.precision.low_precision_model and not self.precision.master_weights
        undo = Transaction(chosen) if low else None
        # FP32 weights need no emulation, which would look at every small operation.
        off = torch.autocast(self._device.type, enabled=False)
        with self._computing() if low else off:
            for one in chosen:
                with self._guard.within():
                    one.step()
        torch.clear_autocast_cache()
        if undo is not None:
            bad = arithmetic.non_finite(self._names(held), [p.detach() for p in held])
            bad = bad or undo.non_finite_state(self._names)
            if bad:
                undo.restore()
                return NonFinite(bad[0][0], bad[0][1], "weights")
        misfits = self._wrapped.masters.give_weights(held)
        if misfits:
            name = self._names(misfits)[0]
            message = (
                f"weight {name!r} grew beyond {self.precision.format.upper()}'s range at step "
                f"{self.steps}: train it in FP32 (fp32_modules), lower the learning rate, or use BF16"
            )
            raise TrainingDiverged(message)
        return None

    def _finish(self, chosen: Sequence[Optimizer], result: StepResult) -> None:
        """Clear gradients and count the step."""
        for one in chosen:
            one.zero_grad()
            self._pending.pop(id(one), None)
            self._unscaled.discard(id(one))
        self._count(chosen, result)

    def _count(self, chosen: Sequence[Optimizer], result: StepResult) -> None:
        """Count a step, write it down, and end training after too many skips."""
        self._wrapped.fresh = True
        self._root = None
        self.steps += 1
        if self.journal is not None:
            self.journal.note_step(result)
        use = None if self._check is None else self._check.after_step(self.steps)
        if use is not None and self.journal is not None:
            self.journal.note(use.to_json())
        self._alarm(self._watch.note_skip(result.step, result.skipped))
        if not result.skipped:
            self._in_a_row = 0
            return
        self.skipped += 1
        self._in_a_row += 1
        for one in chosen:  # a scheduler stepped after a skip must not complain about the order
            one._opt_called = True  # type: ignore[attr-defined]
        floor = getattr(self._scaler, "min_scale", None)
        at_floor = self._in_a_row > 1 and floor == result.scale and result.cause != "model"
        if self._in_a_row >= self._max_skips or at_floor:
            rows = self._in_a_row
            raise TrainingDiverged(
                diagnosis.farewell(result, rows, self._to_learn, at_floor=at_floor)
            )

    # -- skipping ----------------------------------------------------------------------------------

    def _skip(
        self,
        held: Sequence[Tensor],
        scale: float,
        loss: float | None,
        norm: float,
        bad_ranks: Sequence[int],
        replay: Callable[[], Tensor] | None,
        culprit: NonFinite | None = None,
    ) -> StepResult:
        wrapped = self._wrapped
        found = (
            [culprit]
            if culprit
            else diagnosis.find_culprits(
                wrapped, held, self._names(held), self._root, loss, bad_ranks
            )
        )
        wrapped.buffers.restore()
        cause = diagnosis.blame(self.precision.level, loss, scale)
        if culprit is not None:
            cause = "format"
        elif replay is not None:
            cause, first = diagnosis.replay(wrapped, replay, self._unscaled_backward)
            found = [*first, *(f for f in found if f not in first)]
        operation = None
        if replay is not None and self._in_a_row:  # one skip is the scaler's daily bread
            operation = diagnosis.locate(wrapped, replay, self._scaled_backward(scale))
        reason = diagnosis.tell_reason(found, scale, cause, self.precision.format)
        if operation is not None:
            reason += f"; {operation}"
        self._scaler = self._scaler.adjust(math.inf)
        return StepResult(
            skipped=True,
            reason=reason,
            operation=operation,
            step=self.steps,
            scale=scale,
            next_scale=self._scaler.scale,
            loss=loss,
            gradient_norm=norm,
            non_finite=tuple(found),
            cause=cause,
            rank=ranks.rank(),
        )

    def _check_batch(self, batch: Any) -> None:
        """Refuse a batch that no capsule could be written of, before a step is skipped."""

    def _keep(self, batch: Any, result: StepResult) -> None:
        """Write a capsule of a skipped step; ``MixedPrecision`` knows where."""

    def _unscaled_backward(self, loss: Tensor) -> None:
        with self._computing():
            loss.float().backward()

    def _scaled_backward(self, scale: float) -> Callable[[Tensor], None]:
        def backward(loss: Tensor) -> None:
            with self._computing():
                (loss.float() * scale).backward()

        return backward

    # -- closures ----------------------------------------------------------------------------------

    def _evaluate(
        self,
        chosen: Sequence[Optimizer],
        closure: Callable[[], Tensor],
        clip_norm: float | None,
        clip_value: float | None,
    ) -> StepResult:
        """A step of an optimizer that evaluates the loss itself; what is not finite undoes all."""
        if len(chosen) != 1:
            message = "step(closure=…) needs optimizer=…: name the one that evaluates it"
            raise UsageError(message)
        optimizer = chosen[0]
        wrapped, scale = self._wrapped, self.loss_scale
        undo = Transaction(chosen)
        seen: list[StepResult] = []

        def evaluate() -> float:
            # The optimizer has moved its masters; the model must see them.
            wrapped.masters.give_weights(parameters_of(optimizer))
            torch.clear_autocast_cache()
            optimizer.zero_grad()
            loss = closure()
            self.backward(loss)
            factor = self._prepare(chosen)
            held = [p for p in parameters_of(optimizer) if p.grad is not None]
            found = [p.grad for p in held if p.grad is not None]
            sweep = arithmetic.sweep(found, wrapped.buffers.changed())
            norm, value = sweep.norm / factor, float(loss.detach())
            finite, bad = ranks.agree(sweep.finite, scale, self._device, self._group)
            if not finite:
                undo.restore()
                seen.append(self._skip(held, scale, value, norm, bad, None))
                raise _NotFinite
            arithmetic.unscale(found, factor)
            if clip_norm is not None:
                arithmetic.multiply(found, arithmetic.clip_factor(norm, clip_norm))
            if clip_value is not None:
                arithmetic.clamp(found, clip_value)
            self._unscaled.add(id(optimizer))
            seen.append(self._taken(scale, value, norm))
            return value

        try:
            with torch.autocast(self._device.type, enabled=False), self._guard.within():
                optimizer.step(evaluate)
            if not all(bool(torch.isfinite(p).all()) for p in parameters_of(optimizer)):
                undo.restore()
                seen.append(self._skip([], scale, seen[0].loss, math.nan, [], None))
        except _NotFinite:
            pass
        wrapped.masters.give_weights(parameters_of(optimizer))
        if seen[-1].skipped:
            return seen[-1]
        self._scaler = self._scaler.adjust(0.0)
        return seen[0]

    # -- small things ------------------------------------------------------------------------------

    def _chosen(self, optimizer: Optimizer | None) -> list[Optimizer]:
        if optimizer is None:
            return self._wrapped.optimizers
        if not any(optimizer is o for o in self._wrapped.optimizers):
            message = "optimizer= is none of those MixedPrecision was given: pass it at the start"
            raise UsageError(message)
        return [optimizer]

    def _scale_of(self, optimizer: Optimizer) -> float:
        return self._pending.get(id(optimizer), self._scaler.scale)

    def _names(self, parameters: Sequence[Tensor]) -> list[str]:
        names: dict[int, str] = {}
        for i, model in enumerate(self._wrapped.models):
            prefix = "" if len(self._wrapped.models) == 1 else f"model{i}."
            for name, parameter in model.named_parameters():
                names.setdefault(id(self._wrapped.masters.master(parameter)), prefix + name)
        return [names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]
