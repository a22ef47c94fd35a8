"""Loss scalers as pure algebra: a frozen state, and ``adjust`` gives the next one.

``SCALERS`` is the one list of them that the trainer, the analysis and all pages read.
"""

from typing import Any

from mpdiag.display.wording import did_you_mean
from mpdiag.errors import UsageError
from mpdiag.numerics.loss_scalers.backoff import Backoff
from mpdiag.numerics.loss_scalers.constant import ConstantScale
from mpdiag.numerics.loss_scalers.lognormal import LogNormal
from mpdiag.numerics.loss_scalers.protocol import (
    LARGEST_SCALE,
    Scaler,
    ScaleRange,
    overflows,
    resumed,
    state,
)

__all__ = [
    "LARGEST_SCALE",
    "SCALERS",
    "Backoff",
    "ConstantScale",
    "LogNormal",
    "ScaleRange",
    "Scaler",
    "overflows",
    "resumed",
    "scaler_class",
    "scaler_named",
    "state",
]

# The simplest first: the analysis proposes them in this order and takes the first that does.
SCALERS: dict[str, type[Scaler]] = {kind.name: kind for kind in (ConstantScale, Backoff, LogNormal)}


def scaler_class(name: str) -> type[Scaler]:
    """The class of a scaler.

    Raises:
        UsageError: If there is no such scaler; the message names those there are.
    """
    if name in SCALERS:
        return SCALERS[name]
    hint = did_you_mean(name, SCALERS)
    raise UsageError(f"there is no loss scaler {name!r}{hint}: choose one of {', '.join(SCALERS)}")


def scaler_named(name: str, **settings: Any) -> Scaler:
    """A scaler by name, with settings by keyword.

    Raises:
        UsageError: If there is no such scaler or setting; the message names those there are.
    """
    kind = scaler_class(name)
    known = kind.setting_names()
    for key in settings:
        if key not in known:
            hint = did_you_mean(key, known)
            message = f"the {name} scaler has no setting {key!r}{hint}: it knows {', '.join(known)}"
            raise UsageError(message)
    return kind(**settings)
