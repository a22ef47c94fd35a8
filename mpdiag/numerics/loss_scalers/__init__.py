"""Loss scalers as pure algebra: a frozen state, and ``adjust`` gives the next one."""

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
from mpdiag.numerics.loss_scalers.registry import SCALERS, scaler_class, scaler_named

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
