"""A trainer for loops that call ``backward`` and ``optimizer.step`` themselves.

``MixedPrecision`` is called by the loop. Here the loop is an unmodified script: patches of torch see
its calls and pass them on, ``backward`` for a backward pass, ``step`` for a step. The parts and the
steps are those of ``MixedPrecision``; gradients are unscaled right after each backward pass
(``script_gradients``).
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpdiag.plan import PrecisionPlan
from mpdiag.tracing.autograd_graph import loss_of
from mpdiag.tracing.nonfinite import NonfiniteTrace, Producer, find_nonfinite
from mpdiag.training import setup, stepping, updates
from mpdiag.training.casting import widened
from mpdiag.training.judgement import divided, judge_without_gradients, world_size
from mpdiag.training.options import Backend, TrainerOptions
from mpdiag.training.results import StepResult
from mpdiag.training.scaling import parameters_of
from mpdiag.training.script_gradients import ScriptGradients
from mpdiag.training.skips.diagnosis import FailedStep
from mpdiag.training.weights.wrapping import names_in, uncompiled_name

ADVICE = (
    "record this very script in FP32 (mpdiag record), analyze, and train by that plan; if FP32 is "
    "not finite either, look at the learning rate, the data and the loss"
)


class ScriptTrainer:
    """Trains the models of a script by a plan, at level O1.

    Args:
        models: By the prefix of their names in the plan.
        optimizers: What steps them.
        plan: The plan; what it says of modules that are not there is left out.
        backend: As for ``MixedPrecision``.
        run: The run folder.
        around: What the trainers of a script share.

    Attributes:
        left_out: Modules that the plan names and the models lack.
        precision: The level's properties.
        backend: ``native`` or ``emulated``.
        context: The parts at work: wrapped models, casting, loss scale, monitor.
        gradients: The models' gradients.
        computing_gradients: Whether a backward pass is under way, so that gradients carry the scale.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        plan: PrecisionPlan,
        *,
        backend: Backend = "auto",
        run: str | os.PathLike[str] | None = None,
        around: setup.Surroundings,
    ) -> None:
        held = list(models.values())
        fitting, self.left_out = _fitting(plan, models)
        if any(getattr(m, "_comm_hooks", None) for m in held):
            fitting = replace(fitting, reduction=None)  # the script has a hook of its own
        parts = setup.set_up(
            held,
            list(optimizers),
            fitting,
            setup.Request(
                "O0" if plan.level == "O0" else "O1",
                backend,
                run,
                options=TrainerOptions(names=list(models)),
            ),
            around,
        )
        self.precision = parts.precision
        self.backend = parts.backend
        self.context = parts.context
        self.gradients = ScriptGradients(held)
        self.computing_gradients = False
        self._stepped: set[int] = set()  # optimizers, since the last forward or backward pass
        self.adopt_strays(optimizers)
        self._trace: NonfiniteTrace | None = None  # while the operation at fault is searched for
        self._release = weakref.finalize(self, parts.release)
        setup.hold(held, self)

    @property
    def steps(self) -> int:
        """Steps so far, skipped ones included."""
        return self.context.monitor.steps

    @property
    def skipped(self) -> int:
        """How many of them were skipped."""
        return self.context.monitor.skipped

    @property
    def loss_scale(self) -> float:
        """The scale in force."""
        return self.context.scaling.scale

    def adopt(self, optimizer: Optimizer) -> None:
        """Take in another optimizer."""
        self.context.wrapped.optimizers.append(optimizer)
        self.adopt_strays([optimizer])

    def adopt_strays(self, optimizers: Sequence[Optimizer]) -> None:
        """Treat tensors that optimizers step, and that no module holds, as the models' own.

        Their gradients come from losses that are scaled, too, and must be finite.
        """
        self.gradients.adopt(p for o in optimizers for p in parameters_of(o))

    def close(self, state: str = "complete") -> None:
        """Give the models back and finish the run log; a second call does nothing.

        Args:
            state: How training ended: ``complete``, ``failed`` or ``interrupted``.
        """
        self._end_trace()
        if self.context.monitor.log is not None:
            self.context.monitor.log.close(state)
        setup.let_go(self.context.wrapped.models, self)
        if self.context.monitor.check is not None:
            self.context.monitor.check.close()
        self._release()

    def forward_began(self, module: nn.Module | None = None) -> None:
        """Note the beginning of a forward pass: buffers are saved before the first one of a step.

        Args:
            module: What the script calls; None where it computes with parameters itself.
        """
        wrapped = self.context.wrapped
        module = wrapped.models[0] if module is None else module
        if torch.is_grad_enabled():
            self._stepped.clear()
        if module.training or torch.is_grad_enabled():
            wrapped.start.forward_began(grad=torch.is_grad_enabled())
        if not module.training:
            return
        if self.context.monitor.skips.in_a_row and self._trace is None:
            # The step before was skipped. One skip alone is how a dynamic scale finds its value; if
            # this one fails, too, the operation at fault is worth knowing.
            self._trace = find_nonfinite(wrapped.models)
            self._trace.__enter__()
            self._trace.call_began(module)

    def _end_trace(self) -> Producer | None:
        """End the search; returns the operation that went non-finite first, if any did."""
        trace, self._trace = self._trace, None
        if trace is None:
            return None
        trace.__exit__(None, None, None)
        return trace.first

    # -- backward ----------------------------------------------------------------------------------

    def backward(
        self,
        plain: Callable[..., None],
        tensors: Sequence[Tensor],
        reached: tuple[dict[int, Tensor], bool],
        inputs: Sequence[Tensor] | None,
        options: dict[str, Any],
    ) -> None:
        """Run a backward pass at the loss scale and leave unscaled gradients.

        Args:
            plain: torch's own backward: called with the scaled tensors and the options.
            tensors: Unscaled losses.
            reached: What ``leaves_of`` says of them.
            inputs: If given, only these receive gradients.
            options: The other options.
        """
        scaling, gradients = self.context.scaling, self.gradients
        nested = gradients.within_pass  # begun by a hook of the script
        if not nested and gradients.were_cleared():  # a step that the script has skipped itself
            self.context.wrapped.buffers.restore()
            scaling.note_skipped([])
        scale = scaling.scale
        receiving = gradients.receiving(reached, inputs)
        if not nested:
            scaling.root = next((t.grad_fn for t in tensors if t.grad_fn is not None), None)
            self._note_loss(tensors, options)
        if inputs is not None:
            options = {**options, "inputs": inputs}
        keep = bool(options.get("create_graph"))
        arithmetic = self.context.casting.backward()
        with gradients.unscaling(receiving, scale, keep=keep), self._scaled(arithmetic):
            plain([scaling.scaled(t) for t in tensors], **options)

    def _note_loss(self, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> None:
        self._stepped.clear()
        held = (p for o in self.context.wrapped.optimizers for p in parameters_of(o))
        self.context.scaling.add_loss(
            loss_of(tensors, options.get("grad_tensors")),
            adds=any(p.grad is not None for p in held),
        )

    def grad(
        self,
        plain: Callable[..., Any],
        tensors: Sequence[Tensor],
        reached: tuple[dict[int, Tensor], bool],
        options: dict[str, Any],
    ) -> tuple[Tensor | None, ...]:
        """``torch.autograd.grad`` at the loss scale; returns unscaled gradients.

        Args:
            plain: torch's own.
            tensors: What is differentiated.
            reached: What ``leaves_of`` says of them.
            options: Everything else, ``inputs`` among it.
        """
        scaling = self.context.scaling
        scale = scaling.scale
        with self.gradients.passing(), self._scaled(self.context.casting.backward()):
            found = plain([scaling.scaled(t) for t in tensors], **options)
        self.gradients.note_reached(reached[0])
        return tuple(None if g is None else divided(widened(g), scale) for g in found)

    @contextmanager
    def _scaled(self, arithmetic: AbstractContextManager[object]) -> Iterator[None]:
        """While gradients are being computed at the loss scale, in the arithmetic of their pass."""
        before, self.computing_gradients = self.computing_gradients, True
        try:
            with arithmetic:
                yield
        finally:
            self.computing_gradients = before

    # -- steps -------------------------------------------------------------------------------------

    def step(
        self, optimizer: Optimizer, plain: Callable[..., Any], closure: Callable[[], Any] | None
    ) -> Any:
        """Step an optimizer, or skip.

        Args:
            optimizer: The optimizer.
            plain: Its own ``step``, taking a closure or nothing.
            closure: What the loop gave to ``step``.

        Returns:
            What its ``step`` returns; for a skipped one with a closure, the loss.

        Raises:
            TrainingDiverged: If too many steps in a row were skipped.
        """
        if closure is None:
            return self._step_once(optimizer, plain)
        if _evaluates_once(optimizer):
            with torch.enable_grad():
                loss = closure()
            self._step_once(optimizer, plain)
            return loss
        return self._step_often(optimizer, plain, closure)

    def _step_once(self, optimizer: Optimizer, plain: Callable[[], Any]) -> Any:
        context = self.context
        if all(p.grad is None for p in parameters_of(optimizer)):
            return self._step_without_gradients(optimizer, plain)
        returned: Any = None

        def update(_held: Sequence[Tensor]) -> None:
            nonlocal returned
            paused, watching = context.monitor.share.paused(), context.watch.watching(optimizer)
            with context.casting.off(), paused, watching:
                returned = plain()
            torch.clear_autocast_cache()

        known_bad = self.gradients.were_nonfinite(optimizer)
        result = stepping.take_step(context, [optimizer], update, known_bad=known_bad)
        self._note_step(optimizer, result)
        return returned

    def _step_without_gradients(self, optimizer: Optimizer, plain: Callable[[], Any]) -> Any:
        """As plain torch does; other ranks, which may have gradients, wait for an answer of this one."""
        context = self.context
        if world_size(context.ranks.group) == 1:
            return plain()
        scale, loss = context.scaling.begun_at(optimizer), context.scaling.loss
        absmax = context.scaling.scaler.needs_absmax
        judged = judge_without_gradients(scale, context.ranks, absmax=absmax)
        if judged is None:
            return plain()
        if judged.finite:
            returned = plain()
            context.scaling.note_taken([optimizer], judged.absmax, scale)
            result = stepping.taken_step(context, scale, loss, judged.norm)
        else:
            returned = None
            failed = FailedStep([], scale, loss, bad_ranks=judged.bad_ranks)
            result = stepping.skip_step(context, [optimizer], failed, judged)
        self._note_step(optimizer, result)
        return returned

    def _step_often(
        self, optimizer: Optimizer, plain: Callable[..., Any], closure: Callable[[], Any]
    ) -> Any:
        """An optimizer that evaluates its closure again and again: any overflow undoes the step."""
        losses: list[Any] = []

        def evaluate(*args: Any, **kwargs: Any) -> updates.Evaluation:
            torch.clear_autocast_cache()  # the optimizer has moved the weights
            losses.append(closure(*args, **kwargs))
            last = self.context.scaling.loss
            return updates.Evaluation(
                losses[-1],
                None if last is None else float(last),
                known_bad=self.gradients.were_nonfinite(optimizer),
            )

        result, returned = updates.step_with_closure(self.context, optimizer, plain, evaluate)
        if result is None:
            return returned
        self._note_step(optimizer, result)
        return losses[0] if result.skipped else returned

    def _note_step(self, optimizer: Optimizer, result: StepResult) -> None:
        operation = self._end_trace()
        if result.skipped and operation is not None:
            reason = f"{result.reason}; {operation}"
            result = replace(result, operation=operation, reason=reason)
        self.gradients.forget(optimizer)
        self.context.scaling.losses = []
        shares_step = bool(self._stepped) and id(optimizer) not in self._stepped
        self._stepped.add(id(optimizer))
        stepping.note_step(self.context, [optimizer], result, shares_step=shares_step)


def _evaluates_once(optimizer: Optimizer) -> bool:
    """Whether ``step`` evaluates its closure once, before any change: all of torch's but one."""
    inside = type(optimizer).__module__.startswith("torch.optim")
    return inside and not isinstance(optimizer, torch.optim.LBFGS)


def _fitting(
    plan: PrecisionPlan, models: Mapping[str, nn.Module]
) -> tuple[PrecisionPlan, tuple[str, ...]]:
    """The plan without what it says of modules that these models lack; and those modules."""
    known = names_in(list(models), list(models.values()))
    layers = () if plan.blocks is None else plan.blocks.layers
    wanted = {c.module for c in (*plan.fp32_operations, *plan.fp32_modules)}
    wanted.update(layer.module for layer in layers if layer.quantised)
    missing = tuple(sorted(name for name in wanted if uncompiled_name(name) not in known))
    if not missing:
        return plan, ()
    fitting = replace(
        plan,
        fp32_operations=tuple(c for c in plan.fp32_operations if c.module not in missing),
        fp32_modules=tuple(c for c in plan.fp32_modules if c.module not in missing),
        blocks=plan.blocks
        and replace(plan.blocks, layers=tuple(c for c in layers if c.module not in missing)),
    )
    return fitting, missing
