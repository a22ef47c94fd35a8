"""A trainer for loops that call ``backward`` and ``optimizer.step`` themselves.

``MixedPrecision`` is called by the loop; here the loop knows of nothing, and whoever sees its calls
passes them on: ``drive_backward`` for a backward pass, ``take_step`` for a step. Between the two the
gradients must be true ones, for the loop may clip or print them, so they are unscaled at once after
each backward pass. What was not finite then is remembered: clipping by value would hide it.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpdiag.tracing.nonfinite import find_nonfinite
from mpdiag.training.arguments import parameters_of
from mpdiag.training.drift import DriftWatch
from mpdiag.training.gradients import arithmetic, ranks
from mpdiag.training.stepping import _NotFinite
from mpdiag.training.trainer import Backend, MixedPrecision
from mpdiag.training.weights.transaction import Transaction
from mpdiag.training.weights.wrapping import names_in

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    from mpdiag.plan import PrecisionPlan
    from mpdiag.tracing.nonfinite import NonfiniteTrace, Producer
    from mpdiag.training.results import NonFinite, StepResult


class Driven(MixedPrecision):
    """``MixedPrecision`` at level O1 for a loop that calls none of its methods.

    Args:
        models: By the prefix of their names in the plan.
        optimizers: What steps them.
        plan: The plan; what it says of modules that are not there is left out.
        backend: As for ``MixedPrecision``, and so the rest.
        run: The run folder.
        say: Takes sentences that a person should read; default: warnings.

    Attributes:
        left_out: Modules the plan names and the models have not.
        driving: Whether a backward pass is under way, so that gradients carry the scale.
    """

    _to_learn = (
        "record this very script in FP32 (mpdiag record), analyze, and train by that plan; if FP32 is "
        "not finite either, look at the learning rate, the data and the loss"
    )

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        plan: PrecisionPlan,
        *,
        backend: Backend = "auto",
        run: str | os.PathLike[str] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        held = list(models.values())
        level = "O0" if plan.level == "O0" else "O1"
        fitting, self.left_out = _fitting(plan, models)
        if any(getattr(m, "_comm_hooks", None) for m in held):
            fitting = replace(fitting, reduction=None)  # the script has a hook of its own
        super().__init__(
            held, optimizers, fitting, level=level, backend=backend, run=run, names=list(models)
        )
        self.driving = False
        self._parameters = {id(p): p for m in held for p in m.parameters()}
        self._retained: list[weakref.ref[Tensor]] = []
        self._spoilt: dict[int, Tensor] = {}  # parameters whose gradient was not finite, by id
        self._fed: set[int] = set()  # parameters whose gradients came through here
        self._plain: Callable[[], Any] = _nothing
        self._returned: Any = None
        self._trace: NonfiniteTrace | None = None  # while a step is looked at closely
        self._watch = DriftWatch(plan, say)
        self._guard.release()  # here the loop's own steps come to us

    def adopt(self, optimizer: Optimizer) -> None:
        """Take in another optimizer of the same models."""
        self._wrapped.optimizers.append(optimizer)

    def owns(self, leaves: Iterable[int]) -> bool:
        """Whether any of some tensors, given by ``id``, is a parameter of the models."""
        return any(key in self._parameters for key in leaves)

    # -- forward -----------------------------------------------------------------------------------

    def forward_began(self, module: nn.Module) -> None:
        """A forward pass of it begins: buffers are saved before the first one of a step."""
        training = module.training
        if training and self._wrapped.fresh:
            self._wrapped.fresh = False
            self._wrapped.buffers.save()
        if training and self._in_a_row and self._trace is None:
            # The step before was skipped: if this one is, too, it is to be known by what. One skip
            # alone is the scaler's daily bread.
            self._trace = find_nonfinite(self._wrapped.models)
            self._trace.__enter__()
            self._trace.call_began(module)

    def close(self) -> None:
        """As ever."""
        self._end_trace()
        super().close()

    def _end_trace(self) -> Producer | None:
        """Look no more; returns what went non-finite first, if anything did."""
        trace, self._trace = self._trace, None
        if trace is None:
            return None
        trace.__exit__(None, None, None)
        return trace.first

    def _skip(self, *args: Any, **kwargs: Any) -> StepResult:
        """As ever, with the operation at fault where the step was looked at."""
        result = super()._skip(*args, **kwargs)
        operation = self._end_trace()
        if operation is None:
            return result
        return replace(result, operation=operation, reason=f"{result.reason}; {operation}")

    @property
    def device_type(self) -> str:
        """Where the models lie."""
        return self._device.type

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A forward pass that checkpointing runs again inside backward: the same casts."""
        with ExitStack() as stack:
            if self.precision.operation_casts:
                stack.enter_context(torch.autocast(self._device.type, self.precision.dtype))
            yield

    # -- backward ----------------------------------------------------------------------------------

    def retain(self, tensor: Tensor) -> None:
        """A tensor inside the graph keeps its gradient, which must be a true one, too."""
        self._retained = [r for r in self._retained if r() is not None]
        self._retained.append(weakref.ref(tensor))

    def drive_backward(
        self,
        plain: Callable[..., None],
        tensors: Sequence[Tensor],
        reached: tuple[dict[int, Tensor], bool],
        inputs: Sequence[Tensor] | None,
        options: dict[str, Any],
    ) -> None:
        """Run a backward pass at the loss scale and leave true gradients.

        Args:
            plain: torch's own backward: called with the scaled tensors and the options.
            tensors: Unscaled losses.
            reached: What ``leaves_of`` says of them.
            inputs: If given, only these receive gradients.
            options: The other options.
        """
        self._forget_cleared()
        scale = self._scaler.scale
        leaves = self._receiving(reached, inputs)
        with torch.no_grad():
            waiting = [leaf.grad for leaf in leaves if leaf.grad is not None]
            arithmetic.multiply(waiting, scale)
        self._root = next((t.grad_fn for t in tensors if t.grad_fn is not None), None)
        if len(tensors) == 1 and tensors[0].numel() == 1:
            self._last_loss = tensors[0].detach()
        if inputs is not None:
            options = {**options, "inputs": inputs}
        try:
            with self.scaled():
                plain([self.scale(t) for t in tensors], **options)
        finally:  # a pass that fails on its way has left scaled gradients, too
            self._make_true(leaves, scale, keep=bool(options.get("create_graph")))

    def drive_grad(
        self,
        plain: Callable[..., Any],
        tensors: Sequence[Tensor],
        reached: tuple[dict[int, Tensor], bool],
        options: dict[str, Any],
    ) -> tuple[Tensor | None, ...]:
        """``torch.autograd.grad`` at the loss scale; returns true gradients.

        Args:
            plain: torch's own.
            tensors: What is differentiated.
            reached: What ``leaves_of`` says of them.
            options: Everything else, ``inputs`` among it.
        """
        scale = self._scaler.scale
        with self.scaled():
            found = plain([self.scale(t) for t in tensors], **options)
        self._fed.update(reached[0])
        return tuple(None if g is None else g / scale for g in found)

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """While gradients are being computed."""
        before, self.driving = self.driving, True
        try:
            with self._computing():
                yield
        finally:
            self.driving = before

    def _receiving(
        self, reached: tuple[dict[int, Tensor], bool], inputs: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """What may receive a gradient."""
        leaves, opaque = reached
        receiving = dict(leaves)
        if inputs is not None:
            receiving = {id(t): t for t in inputs}
        elif opaque:
            receiving |= {k: p for k, p in self._parameters.items() if p.requires_grad}
        kept = [t for r in self._retained if (t := r()) is not None]
        return list((receiving | {id(t): t for t in kept}).values())

    def _make_true(self, leaves: Sequence[Tensor], scale: float, *, keep: bool) -> None:
        """Unscale, and remember what is not finite."""
        reached = [leaf for leaf in leaves if leaf.grad is not None]
        if keep:  # the graph of these gradients lives on: nothing in it may be changed
            for leaf in reached:
                leaf.grad = None if leaf.grad is None else leaf.grad / scale
        found = [leaf.grad for leaf in reached if leaf.grad is not None]
        if not found:
            return
        with torch.no_grad():
            if not keep:
                arithmetic.unscale(found, scale)
            parts = arithmetic.norms([arithmetic.values_of(g) for g in found], 2.0)
            sums = torch.stack([n.float().to(parts[0].device) for n in parts])
        self._fed.update(id(leaf) for leaf in reached)
        for leaf, finite in zip(reached, torch.isfinite(sums).tolist(), strict=True):
            if not finite:
                self._spoilt[id(leaf)] = leaf

    def _forget_cleared(self) -> None:
        """The loop has thrown gradients away instead of stepping: that was a skip, of its own."""
        if not self._spoilt:
            return
        for key, leaf in list(self._spoilt.items()):
            if leaf.grad is None or not bool(arithmetic.values_of(leaf.grad).any()):
                del self._spoilt[key]
        if not self._spoilt:
            self._wrapped.buffers.restore()
            self._scaler = self._scaler.adjust(float("inf"))

    def _spoiled(self, chosen: Sequence[Optimizer]) -> bool:
        return any(id(p) in self._spoilt for o in chosen for p in parameters_of(o))

    # -- steps -------------------------------------------------------------------------------------

    def fed(self, optimizer: Optimizer) -> bool:
        """Whether its gradients came through here, so that they were scaled and are true."""
        held = [p for p in parameters_of(optimizer) if p.grad is not None]
        return not held or any(id(p) in self._fed for p in held)

    def take_step(
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
        if all(p.grad is None for p in parameters_of(optimizer)):
            return plain()
        self._plain, self._returned = plain, None
        self._unscaled.add(id(optimizer))
        result = self._apply([optimizer], None, None, None)
        self._settle(optimizer, result)
        returned, self._plain, self._returned = self._returned, _nothing, None
        return returned

    def _update(self, _chosen: Sequence[Optimizer], _held: Sequence[Tensor]) -> NonFinite | None:
        with torch.autocast(self._device.type, enabled=False):
            self._returned = self._plain()
        torch.clear_autocast_cache()
        return None

    def _settle(self, optimizer: Optimizer, result: StepResult) -> None:
        self._end_trace()
        for parameter in parameters_of(optimizer):
            self._spoilt.pop(id(parameter), None)
        self._last_loss = None
        self._count([optimizer], result)

    def _step_often(
        self, optimizer: Optimizer, plain: Callable[..., Any], closure: Callable[[], Any]
    ) -> Any:
        """An optimizer that evaluates its closure again and again: any overflow undoes the step."""
        undo = Transaction([optimizer])
        seen: list[StepResult] = []
        losses: list[Any] = []

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            torch.clear_autocast_cache()  # the optimizer has moved the weights
            losses.append(closure(*args, **kwargs))
            held = [p for p in parameters_of(optimizer) if p.grad is not None]
            if held:
                seen.append(self._judge(optimizer, held, undo))
                if seen[-1].skipped:
                    raise _NotFinite
            return losses[-1]

        returned: Any = None
        try:
            with torch.autocast(self._device.type, enabled=False):
                returned = plain(evaluate)
            if seen and not all(bool(torch.isfinite(p).all()) for p in parameters_of(optimizer)):
                undo.restore()
                loss = seen[0].loss
                seen.append(self._skip([], self.loss_scale, loss, float("nan"), [], None))
        except _NotFinite:
            pass
        if not seen:
            return returned
        if not seen[-1].skipped:
            self._scaler = self._scaler.adjust(0.0)
        self._settle(optimizer, seen[-1] if seen[-1].skipped else seen[0])
        return losses[0] if seen[-1].skipped else returned

    def _judge(self, optimizer: Optimizer, held: Sequence[Tensor], undo: Transaction) -> StepResult:
        """Whether the gradients of one evaluation may be seen by the optimizer."""
        found = [p.grad for p in held if p.grad is not None]
        scale = self.loss_scale
        sweep = arithmetic.sweep(found, self._wrapped.buffers.changed())
        finite = sweep.finite and not self._spoiled([optimizer])
        finite, bad = ranks.agree(finite, scale, self._device, self._group)
        loss = None if self._last_loss is None else float(self._last_loss)
        if finite:
            return self._taken(scale, loss, sweep.norm)
        undo.restore()
        return self._skip(held, scale, loss, sweep.norm, bad, None)


def _nothing() -> None:
    """No step of an optimizer is waiting."""


def _evaluates_once(optimizer: Optimizer) -> bool:
    """Whether ``step`` evaluates its closure once, before any change: all of torch's but one."""
    inside = type(optimizer).__module__.startswith("torch.optim")
    return inside and not isinstance(optimizer, torch.optim.LBFGS)


def _fitting(
    plan: PrecisionPlan, models: Mapping[str, nn.Module]
) -> tuple[PrecisionPlan, tuple[str, ...]]:
    """The plan without what it says of modules that these models have not; and those."""
    known = names_in(list(models), list(models.values()))
    wanted = {c.module for c in (*plan.fp32_operations, *plan.fp32_modules)}
    missing = tuple(sorted(wanted - set(known)))
    if not missing:
        return plan, ()
    fitting = replace(
        plan,
        fp32_operations=tuple(c for c in plan.fp32_operations if c.module in known),
        fp32_modules=tuple(c for c in plan.fp32_modules if c.module in known),
    )
    return fitting, missing
