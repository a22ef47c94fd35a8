"""A trainer's whole state as plain values and tensors, and back."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.errors import StateMismatch, UsageError
from mpdiag.numerics.loss_scalers import SCALERS, Scaler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from mpdiag.plan import PrecisionPlan
    from mpdiag.training.levels import Precision
    from mpdiag.training.weights.wrapping import Wrapped

VERSION = 1


@dataclass(frozen=True)
class Progress:
    """How far a training has got.

    Attributes:
        scaler: The loss scaler's state.
        steps: Calls of ``step``.
        skipped: How many were skipped.
        in_a_row: How many of the last ones, without a gap.
    """

    scaler: Scaler
    steps: int
    skipped: int
    in_a_row: int


def save(
    plan: PrecisionPlan, precision: Precision, progress: Progress, wrapped: Wrapped
) -> dict[str, Any]:
    """The state of a trainer between two steps."""
    return {
        "version": VERSION,
        "plan": plan.to_json(),
        "precision": _plain(precision),
        "scaler": _scaler_state(progress.scaler),
        "steps": progress.steps,
        "skipped": progress.skipped,
        "in_a_row": progress.in_a_row,
        "models": [m.state_dict() for m in wrapped.models],
        "masters": [
            {
                n: wrapped.masters.value(p)
                for n, p in m.named_parameters()
                if wrapped.masters.master(p) is not p
            }
            for m in wrapped.models
        ],
        "optimizers": [o.state_dict() for o in wrapped.optimizers],
        "random": {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        },
    }


def load(
    state: Mapping[str, Any], plan: PrecisionPlan, precision: Precision, wrapped: Wrapped
) -> Progress:
    """Restore models, masters, optimizers and torch's random state.

    Raises:
        StateMismatch: If the state belongs to another plan, level or model.
    """
    version = state.get("version") if hasattr(state, "get") else None
    if version != VERSION:
        message = (
            "this is not a state of this version of MixedPrecision: pass what state_dict() returned"
        )
        raise StateMismatch(message)
    _refuse_other(state["precision"], _plain(precision), "level")
    _refuse_other(state["plan"], plan.to_json(), "plan")
    counts = (len(state["models"]), len(state["optimizers"]))
    if counts != (len(wrapped.models), len(wrapped.optimizers)):
        message = (
            f"the state is of {counts[0]} models and {counts[1]} optimizers, the trainer has "
            f"{len(wrapped.models)} and {len(wrapped.optimizers)}"
        )
        raise StateMismatch(message)
    scaler = _scaler_from(state["scaler"])
    try:
        with _all_or_nothing(wrapped):
            _restore(state, wrapped)
    except (RuntimeError, ValueError, KeyError) as error:
        message = f"the state is of another model or optimizer ({str(error).splitlines()[0]})"
        raise StateMismatch(message) from error
    wrapped.masters.restart()
    return Progress(scaler, state["steps"], state["skipped"], state["in_a_row"])


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
    """Load models, optimizers, masters and torch's random state; masters last, all of them or none."""
    for model, saved in zip(wrapped.models, state["models"], strict=True):
        model.load_state_dict(saved)
    for optimizer, saved in zip(wrapped.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    masters: list[tuple[Tensor, Tensor]] = []
    for model, saved in zip(wrapped.models, state["masters"], strict=True):
        for name, parameter in model.named_parameters():
            if name in saved:
                masters.append((wrapped.masters.master(parameter), saved[name]))
                if masters[-1][0].shape != saved[name].shape:
                    message = f"the master of {name!r} has another shape"
                    raise ValueError(message)
    torch.set_rng_state(state["random"]["cpu"].cpu())
    if state["random"]["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["random"]["cuda"]])
    with torch.no_grad():
        for master, value in masters:
            master.copy_(value)


def _plain(precision: Precision) -> dict[str, Any]:
    return {**dataclasses.asdict(precision), "dtype": precision.format}


def _refuse_other(saved: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    for key in {**saved, **own}:
        if saved.get(key) != own.get(key):
            message = (
                f"the state was saved under another {what}: its {key} is {_short(saved.get(key))}, "
                f"here it is {_short(own.get(key))}; build the trainer with the same {what}"
            )
            raise StateMismatch(message)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _scaler_state(scaler: Scaler) -> dict[str, Any]:
    for name, kind in SCALERS.items():
        if type(scaler) is kind:
            return {"method": name, **dataclasses.asdict(scaler)}
    message = f"a custom {type(scaler).__name__} cannot be saved: keep its state yourself"
    raise UsageError(message)


def _scaler_from(saved: Mapping[str, Any]) -> Scaler:
    settings = dict(saved)
    kind = SCALERS.get(settings.pop("method", ""))
    try:
        if kind is not None:
            return kind(**settings)
    except (TypeError, UsageError) as error:
        message = f"the state's loss scaler cannot be read: {error}"
        raise StateMismatch(message) from error
    message = f"the state's loss scaler {saved.get('method')!r} is unknown here: upgrade mpdiag"
    raise StateMismatch(message)
