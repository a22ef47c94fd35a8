"""A trainer's whole state as plain values and tensors, and back."""

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpdiag.errors import DamagedPlan, StateMismatch, UsageError
from mpdiag.numerics.loss_scalers import SCALERS, Scaler, resumed
from mpdiag.plan import PrecisionPlan
from mpdiag.training.callers import loop_stacklevel
from mpdiag.training.levels import Precision
from mpdiag.training.skips.step_start import dump_random, load_random
from mpdiag.training.weights.given import same
from mpdiag.training.weights.wrapping import Wrapped

VERSION = 1


@dataclass(frozen=True)
class Progress:
    """How far a training has got.

    Attributes:
        scaler: The loss scaler's state.
        steps: Calls of ``step``.
        skipped: How many were skipped.
        skips: How many of the last ones, without a gap, as ``SkipLedger.to_plain`` gives them.
    """

    scaler: Scaler
    steps: int
    skipped: int
    skips: list[dict[str, Any]]


def save(
    plan: PrecisionPlan, precision: Precision, progress: Progress, wrapped: Wrapped
) -> dict[str, Any]:
    """The state of a trainer between two steps."""
    wrapped.look()
    return {
        "version": VERSION,
        "plan": plan.to_json(),
        "precision": _plain(precision),
        "scaler": _scaler_state(progress.scaler),
        "steps": progress.steps,
        "skipped": progress.skipped,
        "in_a_row": max((row["in_a_row"] for row in progress.skips), default=0),
        "skips_in_a_row": progress.skips,
        "models": [m.state_dict() for m in wrapped.models],
        "masters": masters_of(wrapped),
        "optimizers": [o.state_dict() for o in wrapped.optimizers],
        "random": dump_random(),
    }


def load(
    state: Mapping[str, Any],
    plan: PrecisionPlan,
    precision: Precision,
    wrapped: Wrapped,
    scaler: Scaler,
) -> Progress:
    """Restore models, masters, optimizers and the random state of torch, NumPy and Python.

    A plan that was edited since is obeyed from here on, and a warning says what differs.

    Args:
        state: What ``save`` returned.
        plan: Today's plan.
        precision: Today's level.
        wrapped: What receives the state.
        scaler: Today's loss scaler, whose settings hold.

    Raises:
        StateMismatch: If the state belongs to another level or model.
    """
    version = state.get("version") if hasattr(state, "get") else None
    if version != VERSION:
        raise StateMismatch(
            "this is not a state of this version of MixedPrecision: pass what state_dict() returned"
        )
    _refuse_other_level(state["precision"], _plain(precision))
    counts = (len(state["models"]), len(state["optimizers"]))
    if counts != (len(wrapped.models), len(wrapped.optimizers)):
        raise StateMismatch(
            f"the state is of {counts[0]} models and {counts[1]} optimizers, the trainer has "
            f"{len(wrapped.models)} and {len(wrapped.optimizers)}"
        )
    going_on, changed = resumed(_scaler_from(state["scaler"]), scaler)
    changed = [f"loss_scale.{name}" for name in changed] + _other_choices(state["plan"], plan)
    try:
        with _all_or_nothing(wrapped):
            _restore(state, wrapped)
    except (RuntimeError, ValueError, KeyError) as error:
        message = f"the state is of another model or optimizer ({str(error).splitlines()[0]})"
        raise StateMismatch(message) from error
    wrapped.masters.restart()
    if changed:
        warnings.warn(
            f"the state was saved under another plan: {', '.join(changed)}; training goes on by today's",
            RuntimeWarning,
            stacklevel=loop_stacklevel(),
        )
    return Progress(going_on, state["steps"], state["skipped"], state.get("skips_in_a_row", []))


def masters_of(wrapped: Wrapped) -> list[dict[str, Tensor]]:
    """The FP32 masters of each model, by the names of their parameters."""
    return [
        {n: wrapped.masters.value(p) for n, p in m.named_parameters() if p in wrapped.masters}
        for m in wrapped.models
    ]


def load_masters(saved: Sequence[Mapping[str, Tensor]], wrapped: Wrapped) -> None:
    """Give masters the bits that rounding hides; models and optimizers were loaded before.

    Element by element: what a model holds that is no saved master, rounded, was given to it by
    someone else, and stays.

    Args:
        saved: What ``masters_of`` returned, on any device.
        wrapped: What receives them.

    Raises:
        StateMismatch: If they are of other models.
    """
    held = wrapped.masters
    if not len(held):
        return
    if len(saved) != len(wrapped.models):
        message = f"the state is of {len(saved)} models, the trainer has {len(wrapped.models)}"
        raise StateMismatch(message)
    try:
        pairs = _masters_and_values(saved, wrapped)
    except ValueError as error:
        raise StateMismatch(f"the state is of another model ({error})") from error
    with torch.no_grad():
        held.settle()
        for master, value in pairs:
            weight = held.model_parameter(master)
            full = value.to(master.device, torch.float32)
            rounds = same(full.to(weight.dtype), weight.detach())
            master.copy_(torch.where(rounds, full, master))
    held.restart()


@contextmanager
def _all_or_nothing(wrapped: Wrapped) -> Iterator[None]:
    """Undo what was loaded into models and optimizers if loading fails on its way."""
    models = [copy.deepcopy(m.state_dict()) for m in wrapped.models]
    optimizers = [(o.state, o.param_groups) for o in wrapped.optimizers]
    try:
        yield
    except BaseException:
        for model, before in zip(wrapped.models, models, strict=True):
            model.load_state_dict(before)
        for optimizer, (held, groups) in zip(wrapped.optimizers, optimizers, strict=True):
            optimizer.state, optimizer.param_groups = held, groups
        raise


def _restore(state: Mapping[str, Any], wrapped: Wrapped) -> None:
    """Load models, optimizers, random state and masters; masters last, all of them or none."""
    for model, saved in zip(wrapped.models, state["models"], strict=True):
        model.load_state_dict(saved)
    for optimizer, saved in zip(wrapped.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    masters = _masters_and_values(state["masters"], wrapped)
    load_random(state["random"])
    with torch.no_grad():
        for master, value in masters:
            master.copy_(value)


def _masters_and_values(
    saved: Sequence[Mapping[str, Tensor]], wrapped: Wrapped
) -> list[tuple[Tensor, Tensor]]:
    """What the optimizers hold, each with its saved value.

    Raises:
        ValueError: If one is of another shape.
    """
    pairs = []
    for model, masters in zip(wrapped.models, saved, strict=True):
        for name, parameter in model.named_parameters():
            if name in masters:
                pairs.append((wrapped.masters.master(parameter), masters[name]))
                if masters[name].shape != parameter.shape:
                    raise ValueError(f"the master of {name!r} has another shape")
    return pairs


def _plain(precision: Precision) -> dict[str, Any]:
    own = {"dtype": precision.format, "blocks": None}  # block formats may change with the plan
    return {**dataclasses.asdict(precision), **own}


def _other_choices(saved: Any, plan: PrecisionPlan) -> list[str]:
    """Which choices of two plans differ, beside the loss scale and the level.

    Raises:
        StateMismatch: If the saved plan cannot be read.
    """
    try:
        before = PrecisionPlan.from_json(saved).decisions()
    except DamagedPlan as error:
        raise StateMismatch(f"the state's plan cannot be read: {error}") from error
    now = plan.decisions()
    names = ("fp32_operations", "fp32_modules", "reduction", "blocks")
    return [
        f"{name} ({_short(before.get(name))} → {_short(now.get(name))})"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _refuse_other_level(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for key in {**saved, **own}:
        if saved.get(key) != own.get(key):
            raise StateMismatch(
                f"the state was saved under another level: its {key} is {_short(saved.get(key))}, "
                f"here it is {_short(own.get(key))}; build the trainer with the same level"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _scaler_state(scaler: Scaler) -> dict[str, Any]:
    for name, kind in SCALERS.items():
        if type(scaler) is kind:
            return {"method": name, **dataclasses.asdict(scaler)}
    raise UsageError(f"a custom {type(scaler).__name__} cannot be saved: keep its state yourself")


def _scaler_from(saved: Mapping[str, Any]) -> Scaler:
    settings = dict(saved)
    kind = SCALERS.get(settings.pop("method", ""))
    try:
        if kind is not None:
            return kind(**settings)
    except (TypeError, UsageError) as error:
        raise StateMismatch(f"the state's loss scaler cannot be read: {error}") from error
    message = f"the state's loss scaler {saved.get('method')!r} is unknown here: upgrade mpdiag"
    raise StateMismatch(message)
