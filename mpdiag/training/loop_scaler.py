"""``mp.scaler()``: loops that are written for ``torch.amp.GradScaler``, under the plan.

::

    scaler = mp.scaler()
    for x, y in loader:
        optimizer.zero_grad()
        with mp.autocast():
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)                                      # only to look or to clip
        torch.nn.utils.clip_grad_norm_(mp.master_parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

The calls are torch's; what they do is what ``mp.backward`` and ``mp.step`` do: the same scale, judge,
skips, log and diagnosis. Gradients are cleared by the loop, as it does with torch's; at level O2 the
step takes them.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpdiag.errors import StateMismatch, UsageError
from mpdiag.numerics.loss_scalers import Scaler
from mpdiag.tracing.uncompiled import UncompiledContext, uncompiled
from mpdiag.training import stepping, updates
from mpdiag.training.casting import Casting
from mpdiag.training.results import StepResult
from mpdiag.training.scaling import parameters_of
from mpdiag.training.stepping import Regularizer, StepContext
from mpdiag.training.updates import StepGuard


def refuse_shared_parameters(optimizers: Sequence[Optimizer]) -> None:
    """Refuse a parameter of two optimizers, whose gradient a loop would unscale once for each.

    Raises:
        UsageError: If there is one.
    """
    held = [set(map(id, parameters_of(optimizer))) for optimizer in optimizers]
    shared = sum(map(len, held)) - len(set().union(*held))
    if shared:
        raise UsageError(
            f"mp.scaler() unscales for one optimizer after the other, and {shared} of the parameters "
            "are in two: mp.backward(loss) and mp.step() step them all on gradients unscaled once"
        )


@uncompiled("scale", "unscale_", "step", "update")
class LoopScaler:
    """``GradScaler``'s calls under a plan. Call ``MixedPrecision.scaler`` to make one.

    Attributes:
        last: The result of the last step.
    """

    def __init__(
        self, context: StepContext, guard: StepGuard, regularizers: Sequence[Regularizer]
    ) -> None:
        self._context = context
        self._guard = guard
        self._regularizers = regularizers
        self._stepped: set[int] = set()  # optimizers since the last update, by id
        self._unscaled: set[int] = set()
        self._models: dict[tuple[int, int], list[nn.Module]] = {}  # by optimizer and its groups
        casting = weakref.ref(context.casting)
        self._kind = type("ScaledLoss", (ScaledLoss,), {"casting": casting})
        self.last: StepResult | None = None

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or nested lists and tuples of losses, by the loss scale, in FP32.

        The backward pass of the result runs in the plan's arithmetic.
        """
        if isinstance(outputs, Tensor):
            stepping.note_loss(self._context, outputs)
            self._context.scaling.scaled_by_loop = True
            scaled = self._context.scaling.scaled(outputs)
            return scaled.as_subclass(self._kind)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)([self.scale(one) for one in outputs])
        message = f"scale() takes a tensor or a list of tensors, not {type(outputs).__name__}"
        raise UsageError(message)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale before its step.

        Raises:
            UsageError: If ``unscale_`` or ``step`` was called for it since the last ``update``.
        """
        (found,) = self._context.chosen(optimizer)
        if id(found) in self._unscaled | self._stepped:
            message = "unscale_() or step() was called for this optimizer since the last update()"
            raise UsageError(message)
        self._unscaled.add(id(found))
        stepping.unscale_gradients(self._context, found)

    def step(self, optimizer: Optimizer, **options: Any) -> StepResult:
        """Step an optimizer, or skip it with a reason.

        If there are several optimizers, only its own gradients and the buffers of its models decide,
        as in ``GradScaler``: an infinite loss may belong to another one.

        Args:
            optimizer: An optimizer that was passed to ``MixedPrecision``.
            options: Arguments for its ``step``, without a closure.

        Raises:
            TrainingDiverged: As for ``MixedPrecision.step``.
            UsageError: If there is no gradient, or ``step`` was called since the last ``update``.
        """
        context = self._context
        if "closure" in options:
            raise UsageError("scaler.step() takes no closure: mp.step(optimizer=…, closure=…) does")
        chosen = context.chosen(optimizer)
        if id(chosen[0]) in self._stepped:
            raise UsageError("step() was called for this optimizer since the last update()")
        update = functools.partial(
            updates.update_weights, context, chosen, self._guard, options=options
        )
        one_of_many = len(context.wrapped.optimizers) > 1
        own = self._judging_buffers(chosen[0]) if one_of_many else nullcontext()
        with self._until_update(), context.masters.updating(chosen), own:
            stepping.prepare_gradients(context, chosen, self._regularizers)
            result = stepping.take_step(context, chosen, update, losses_decide=not one_of_many)
        self._stepped.add(id(chosen[0]))
        if context.wrapped.precision.master_weights:  # of which the loop may know nothing
            chosen[0].zero_grad()
        context.scaling.forget(chosen)
        self.last = result
        stepping.note_step(context, chosen, result)
        return result

    def _judging_buffers(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Judges an optimizer's step by the buffers of the models that it steps."""
        wrapped = self._context.wrapped
        key = id(optimizer), len(optimizer.param_groups)
        if key not in self._models:
            held = set(map(wrapped.masters.model_parameter, parameters_of(optimizer)))
            stepped = [m for m in wrapped.models if any(p in held for p in m.parameters())]
            self._models[key] = stepped
        models = self._models[key]
        return nullcontext() if models == wrapped.models else wrapped.buffers.only(models)

    @contextmanager
    def _until_update(self) -> Iterator[None]:
        """Steps inside adjust the scale only when ``update`` is called."""
        scaling = self._context.scaling
        scaling.waits_for_update = True
        try:
            yield
        finally:
            scaling.waits_for_update = False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale once for all steps since the last call.

        Args:
            new_scale: The scale to go on with, instead.

        Raises:
            UsageError: If there was no step, or the plan's scale cannot be set.
        """
        scaling = self._context.scaling
        if new_scale is not None:
            scaling.scaler = _at(scaling.scaler, float(new_scale))
        elif not self._stepped:
            message = "update() found no step since the last one: call step(optimizer) first"
            raise UsageError(message)
        else:
            scaling.end_round()
        self._stepped.clear()
        self._unscaled.clear()

    def get_scale(self) -> float:
        """The scale in force."""
        return self._context.scaling.scale

    def is_enabled(self) -> bool:
        """True: steps are judged whatever the scale."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """The scale and what moves it, as plain values; ``mp.state_dict()`` holds everything."""
        scaler = self._context.scaling.scaler
        return {
            "scale": scaler.scale,
            "_growth_tracker": getattr(scaler, "quiet", 0),
            "method": scaler.name,
            "scaler": {f.name: getattr(scaler, f.name) for f in fields(scaler)},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state, one of ``GradScaler``'s among them.

        Raises:
            StateMismatch: If the plan scales by another method.
        """
        scaling = self._context.scaling
        state = dict(state_dict)
        if "scale" not in state:
            raise StateMismatch("this is no scaler's state: pass what state_dict() returned")
        if state.get("method", scaling.scaler.name) != scaling.scaler.name:
            raise StateMismatch(
                f"the state is of a {state['method']} scale, the plan's is {scaling.scaler.name}: "
                "load it with the plan it was trained by"
            )
        if "scaler" in state:
            scaling.scaler = replace(scaling.scaler, **state["scaler"])
        elif float(state["scale"]) != scaling.scale or hasattr(scaling.scaler, "quiet"):
            scaling.scaler = _at(
                scaling.scaler, float(state["scale"]), int(state.get("_growth_tracker", 0))
            )
        self._stepped.clear()
        self._unscaled.clear()


def _at(scaler: Scaler, scale: float, quiet: int = 0) -> Scaler:
    """A scaler at another scale."""
    known = {f.name for f in fields(scaler)}
    if "current" in known:
        changed: dict[str, Any] = {"current": scale, "quiet": quiet}
        return replace(scaler, **changed)
    raise UsageError(
        f"a {scaler.name} scale cannot be set to {scale:g}: set init_scale in the plan, or choose "
        "loss_scale='dynamic'"
    )


class ScaledLoss(Tensor):
    """A scaled loss: its backward pass runs in its trainer's arithmetic. Each trainer has a class."""

    casting: weakref.ref[Casting]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of such a loss; what is computed from it is one, too."""
        kwargs = kwargs or {}
        casting = cls.casting()
        if casting is None or func not in _BACKWARD:
            plain: Any = super().__torch_function__
            return plain(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass(), UncompiledContext(casting.backward):
            return func(*args, **kwargs)


_BACKWARD = (Tensor.backward, torch.autograd.grad, torch.autograd.backward)
