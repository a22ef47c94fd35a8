"""A loss scaler's state as plain values, for the checkpoints of other libraries."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mpdiag.errors import StateMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.numerics.loss_scalers import Scaler


def dump_scaler(scaler: Scaler) -> dict[str, Any]:
    """A scaler's class by its name, and its fields, settings and state alike.

    Raises:
        UsageError: If it is no dataclass.
    """
    kind = type(scaler).__name__
    try:
        return {"kind": kind, **asdict(scaler)}
    except TypeError:
        message = f"a {kind} is no dataclass, so its state cannot be saved: derive it from Scaler"
        raise UsageError(message) from None


def load_scaler(scaler: Scaler, state: Mapping[str, Any]) -> Scaler:
    """The scaler in a saved state.

    Raises:
        StateMismatch: If it is the state of another scaler, or cannot be read.
    """
    fields = dict(state)
    kind = fields.pop("kind", None)
    if kind != type(scaler).__name__:
        message = (
            f"the checkpoint holds the state of {kind or 'no scaler'}, but the plan scales by "
            f"{type(scaler).__name__}: load it with the plan it was trained by"
        )
        raise StateMismatch(message)
    try:
        return replace(scaler, **fields)
    except (TypeError, UsageError) as error:
        message = f"the checkpoint's loss scaler cannot be read: {error}"
        raise StateMismatch(message) from error
