"""LogNormal, a scale that follows the distribution of the largest gradients.

Source: OpenSeq2Seq, *Mixed Precision Training* (LogMax, there).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from mpdiag.errors import UsageError
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.loss_scalers.protocol import (
    LARGEST_SCALE,
    Scaler,
    ScaleRange,
    check_positive,
    overflows,
    state,
)

LARGEST_LOG = math.log2(FP16.max)


@dataclass(frozen=True)
class LogNormal(Scaler):
    """Keep the chance of an overflow at that of a normal quantile of log2 max|g|.

    ::

        x = log2 max|g|          of a finite, non-zero maximum; on overflow it is censored: the
                                 maximum was at least 65520 / scale, and log2 of that stands in
        m = β1·m + (1-β1)·x,  v = β2·v + (1-β2)·x²,  w = β2·w + (1-β2)·x   each over its own
                                 1 - β^n (bias correction)
        σ² = v - w²,  scale = 2^floor(log2(65504) - (m + quantile·σ)), clipped

    OpenSeq2Seq's LogMax without its defects: it fed 65536 as the logarithm on an overflow, took the
    logarithm of maxima that were zero, and used 16 for log2(65504).
    """

    name: ClassVar[str] = "lognormal"
    label: ClassVar[str] = "LogNormal"
    needs_absmax: ClassVar[bool] = True

    init_scale: float = 1024.0
    beta1: float = 0.99
    beta2: float = 0.999
    quantile: float = 3.09
    min_scale: float = 1.0
    max_scale: float = LARGEST_SCALE
    samples: int = state(0)
    mean: float = state(0.0)
    slow_mean: float = state(0.0)
    square: float = state(0.0)

    def __post_init__(self) -> None:
        """Refuse settings out of range or against each other."""
        check_positive(self, "init_scale", "quantile", "min_scale", "max_scale")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not (isinstance(value, float) and 0 < value < 1):
                raise UsageError(f"{name} must lie between 0 and 1, not {value!r}")
        if self.min_scale > self.max_scale:
            raise UsageError(f"min_scale {self.min_scale:g} is above max_scale {self.max_scale:g}")

    @property
    def scale(self) -> float:
        """The largest power of two at which the quantile of maxima stays in range."""
        if self.samples == 0:
            return self.init_scale
        mean = self.mean / (1 - self.beta1**self.samples)
        correction = 1 - self.beta2**self.samples
        slow = self.slow_mean / correction
        spread = math.sqrt(max(0.0, self.square / correction - slow * slow))
        exponent = math.floor(LARGEST_LOG - (mean + self.quantile * spread))
        return min(self.max_scale, max(self.min_scale, math.ldexp(1.0, min(exponent, 1000))))

    @property
    def floor(self) -> float:
        """``min_scale``."""
        return self.min_scale

    def adjust(self, absmax: float) -> "LogNormal":
        """Add the step's maximum to the moving averages."""
        if overflows(absmax, self.scale):
            x = math.log2(FP16.overflow_threshold / self.scale)
            if math.isfinite(absmax):
                x = max(x, math.log2(absmax))
        elif absmax <= 0:
            return self
        else:
            x = math.log2(absmax)
        return replace(
            self,
            samples=self.samples + 1,
            mean=self.beta1 * self.mean + (1 - self.beta1) * x,
            slow_mean=self.beta2 * self.slow_mean + (1 - self.beta2) * x,
            square=self.beta2 * self.square + (1 - self.beta2) * x * x,
        )

    @classmethod
    def proposals(cls, found: ScaleRange) -> "Iterator[LogNormal]":
        """One: it finds its scale by itself."""
        yield cls(found.first, min_scale=min(1.0, found.first), max_scale=LARGEST_SCALE)
