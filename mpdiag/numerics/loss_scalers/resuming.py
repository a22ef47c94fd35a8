"""A loss scaler that goes on from a saved one, also where its settings were changed since."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdiag.numerics.loss_scalers.protocol import Scaler


def resumed(saved: Scaler, own: Scaler) -> tuple[Scaler, list[str]]:
    """The scaler to go on with, and what differs from the saved one, as ``name (before → now)``.

    Today's settings hold. The saved state goes on with them, unless the method or the first scale was
    changed: then the scale begins anew, for that is what such a change asks for.
    """
    if type(saved) is not type(own):
        return _at_start(own), [f"method ({saved.name} → {own.name})"]
    settings = own.setting_names()
    changed = [n for n in settings if getattr(saved, n) != getattr(own, n)]
    said = [f"{n} ({_plain(getattr(saved, n))} → {_plain(getattr(own, n))})" for n in changed]
    if "init_scale" in changed:
        return _at_start(own), said
    return replace(saved, **{n: getattr(own, n) for n in changed}), said


def _at_start(scaler: Scaler) -> Scaler:
    return type(scaler)(**{name: getattr(scaler, name) for name in scaler.setting_names()})


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
