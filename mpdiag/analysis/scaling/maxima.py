"""What each recorded step's gradients reached, and how that moves from step to step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpdiag.numerics.formats import FP16

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.numerics.histograms import ExponentHistogram
    from mpdiag.runs.records import Records

MIN_HEADROOM = 2
"""Powers of two kept free above the largest recorded gradient, at least."""


def step_maxima(
    records: Records,
) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    """The largest unscaled gradient of each recorded step.

    Returns:
        Steps; maxima, infinite where a gradient was not finite; how many of those there are. A step
        that a scaler skipped overflowed by its scale, not by itself, and is left out.
    """
    gradients = records.of_kind("activation_grad") | records.of_kind("weight_grad")
    rows = np.flatnonzero(gradients & ~records.skipped)
    steps, group = np.unique(records.step[rows].astype(np.int64), return_inverse=True)
    maxima = np.zeros(steps.size)
    values = records.absmax[rows] / records.scale[rows]
    values = np.where(records.infs[rows] + records.nans[rows] > 0, np.inf, values)
    np.maximum.at(maxima, group.reshape(-1), values)
    return steps, maxima, int(np.isinf(maxima).sum())


def by_step(
    records: Records, rows: NDArray[np.bool_], steps: NDArray[np.int64]
) -> ExponentHistogram:
    """Merge some rows by step: a stack of batch shape (steps,); rows of other steps are left out."""
    group = np.searchsorted(steps, records.step)
    known = rows & (group < steps.size)
    known[known] = steps[group[known]] == records.step[known]
    return records.merged(np.where(known, group, -1), steps.size)


def overflows_at(
    maxima: NDArray[np.float64], exponent: int, target: FloatFormat = FP16
) -> NDArray[np.bool_]:
    """In which steps the largest gradient, if it is finite, leaves the range at scale 2^exponent."""
    with np.errstate(over="ignore"):
        scaled = np.ldexp(maxima, exponent)
    over: NDArray[np.bool_] = np.isfinite(maxima) & (scaled >= target.overflow_threshold)
    return over


@dataclass(frozen=True)
class Headroom:
    """How much room the next steps may need, in powers of two.

    Attributes:
        exponents: To keep free above the largest recorded gradient.
        drift: The growth of the maxima: the late half's median over the early half's.
        spread: Their standard deviation about it.
    """

    exponents: int
    drift: float
    spread: float


def headroom(maxima: NDArray[np.float64]) -> Headroom:
    """Growth and three standard deviations cover what a longer training would show."""
    logs = np.log2(maxima)
    half = len(logs) // 2
    drift = float(np.median(logs[half:]) - np.median(logs[:half])) if half else 0.0
    spread = float(np.std(np.diff(logs)) / math.sqrt(2)) if len(logs) > 2 else 0.0
    wanted = max(0.0, drift) + 3 * spread - (float(logs.max()) - float(np.median(logs[half:])))
    return Headroom(max(MIN_HEADROOM, math.ceil(wanted)), drift, spread)
