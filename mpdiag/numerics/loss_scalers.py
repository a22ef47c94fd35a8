"""Loss scalers as pure algebra: a frozen state, and ``adjust`` gives the next one.

No tensors here, so the same scalers run in a trainer and over a recording (``analysis.replay``).
A step overflows when its largest unscaled gradient, times the scale, leaves FP16's range; it is
skipped, whatever the scaler. Every scaler checks, the constant one too.

Sources: NVIDIA, *Training with Mixed Precision User Guide* (dynamic scaling); OpenSeq2Seq,
*Mixed Precision Training* (Backoff and LogNormal); ``torch.amp.GradScaler`` for the names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

from mpdiag.errors import UsageError
from mpdiag.numerics.formats import FP16

LARGEST_LOG = math.log2(FP16.max)


class Scaler(Protocol):
    """What every scaler can do.

    Attributes:
        needs_absmax: Whether ``adjust`` must be told the true largest gradient; of the others, 0 says
            that all were finite, and nobody has to look for the maximum.
    """

    needs_absmax: ClassVar[bool]

    @property
    def scale(self) -> float:
        """The factor on the loss for the coming step."""

    def adjust(self, absmax: float) -> Scaler:
        """The state after a step whose largest unscaled |gradient| was ``absmax``.

        Infinity or NaN say that a gradient was not finite.
        """


def overflows(absmax: float, scale: float) -> bool:
    """Whether gradients up to ``absmax`` leave FP16's range at this scale, or are not finite."""
    return not math.isfinite(absmax) or FP16.overflows(absmax * scale)


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (0 < value < math.inf)
        ):
            message = f"{name} must be a finite number above 0, not {value!r}"
            raise UsageError(message)


def _check_whole(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < 1:
            message = f"{name} must be a whole number of at least 1, not {value!r}"
            raise UsageError(message)


@dataclass(frozen=True)
class ConstantScale:
    """The same scale for ever; 1 is no scale."""

    needs_absmax: ClassVar[bool] = False

    init_scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no scale."""
        _check_positive(self, "init_scale")

    @property
    def scale(self) -> float:
        """See ``Scaler``."""
        return self.init_scale

    def adjust(self, absmax: float) -> ConstantScale:  # noqa: ARG002
        """See ``Scaler``: nothing changes."""
        return self


@dataclass(frozen=True)
class Backoff:
    """Back off on overflow, grow after a quiet interval.

    ::

        overflow: quiet = 0; if the share of overflows since the last change of scale is above
                  tolerance: hysteresis -= 1; at 0: scale = max(min_scale, scale * backoff_factor),
                  refilled
        else:     quiet += 1; at growth_interval: scale = min(max_scale, scale * growth_factor)
                  quiet = 0, hysteresis refilled

    With the defaults this is ``torch.amp.GradScaler``, bounded.
    """

    needs_absmax: ClassVar[bool] = False

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    tolerance: float = 0.0
    current: float | None = None
    quiet: int = 0
    tolerated: int = 0
    steps_since: int = 0
    overflows_since: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        _check_positive(
            self, "init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"
        )
        _check_whole(self, "growth_interval", "hysteresis")
        if isinstance(self.tolerance, bool) or not 0 <= self.tolerance < 1:
            message = f"tolerance must be a share from 0 to below 1, not {self.tolerance!r}"
            raise UsageError(message)
        if self.growth_factor <= 1:
            message = f"growth_factor must be above 1, not {self.growth_factor!r}"
            raise UsageError(message)
        if self.backoff_factor >= 1:
            message = f"backoff_factor must be below 1, not {self.backoff_factor!r}"
            raise UsageError(message)
        if not self.min_scale <= self.init_scale <= self.max_scale:
            message = (
                f"init_scale {self.init_scale:g} must lie between min_scale {self.min_scale:g} and "
                f"max_scale {self.max_scale:g}"
            )
            raise UsageError(message)

    @property
    def scale(self) -> float:
        """See ``Scaler``."""
        return self.init_scale if self.current is None else self.current

    def adjust(self, absmax: float) -> Backoff:
        """See ``Scaler``."""
        steps = self.steps_since + 1
        if overflows(absmax, self.scale):
            count = self.overflows_since + 1
            if count / steps <= self.tolerance:
                return replace(self, quiet=0, steps_since=steps, overflows_since=count)
            if self.tolerated + 1 < self.hysteresis:
                return replace(
                    self,
                    quiet=0,
                    tolerated=self.tolerated + 1,
                    steps_since=steps,
                    overflows_since=count,
                )
            return self._rescaled(max(self.min_scale, self.scale * self.backoff_factor))
        if self.quiet + 1 < self.growth_interval:
            return replace(self, quiet=self.quiet + 1, steps_since=steps)
        return self._rescaled(min(self.max_scale, self.scale * self.growth_factor))

    def _rescaled(self, scale: float) -> Backoff:
        return replace(self, current=scale, quiet=0, tolerated=0, steps_since=0, overflows_since=0)


@dataclass(frozen=True)
class LogNormal:
    """Keep the chance of an overflow at that of a normal quantile of log2 max|g|.

    ::

        x = log2 max|g|          of a finite, non-zero maximum; on overflow it is censored: the
                                 maximum was at least 65520 / scale, and log2 of that stands in
        m = β1·m + (1-β1)·x,  v = β2·v + (1-β2)·x²,  w = β2·w + (1-β2)·x   each over its own
                                 1 - β^n (bias correction)
        σ² = v - w²,  scale = 2^floor(log2(65504) - (m + quantile·σ)), clipped

    OpenSeq2Seq's LogMax without its defects: it fed 65536 as the logarithm on an overflow, took the
    logarithm of zero maxima, and used 16 for log2(65504).
    """

    needs_absmax: ClassVar[bool] = True

    init_scale: float = 1024.0
    beta1: float = 0.99
    beta2: float = 0.999
    quantile: float = 3.09
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    samples: int = 0
    mean: float = 0.0
    slow_mean: float = 0.0
    square: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        _check_positive(self, "init_scale", "quantile", "min_scale", "max_scale")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not (isinstance(value, float) and 0 < value < 1):
                message = f"{name} must lie between 0 and 1, not {value!r}"
                raise UsageError(message)
        if self.min_scale > self.max_scale:
            message = f"min_scale {self.min_scale:g} is above max_scale {self.max_scale:g}"
            raise UsageError(message)

    @property
    def scale(self) -> float:
        """See ``Scaler``."""
        if self.samples == 0:
            return self.init_scale
        mean = self.mean / (1 - self.beta1**self.samples)
        correction = 1 - self.beta2**self.samples
        slow = self.slow_mean / correction
        spread = math.sqrt(max(0.0, self.square / correction - slow * slow))
        exponent = math.floor(LARGEST_LOG - (mean + self.quantile * spread))
        return min(self.max_scale, max(self.min_scale, math.ldexp(1.0, min(exponent, 1000))))

    def adjust(self, absmax: float) -> LogNormal:
        """See ``Scaler``."""
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


SCALERS: dict[str, type[ConstantScale | Backoff | LogNormal]] = {
    "constant": ConstantScale,
    "backoff": Backoff,
    "lognormal": LogNormal,
}
_STATE = {
    "current",
    "quiet",
    "tolerated",
    "steps_since",
    "overflows_since",
    "samples",
    "mean",
    "slow_mean",
    "square",
}


def scaler_named(name: str, **settings: Any) -> Scaler:
    """A scaler by name, with settings by keyword.

    Raises:
        UsageError: If there is no such scaler or setting; the message names those there are.
    """
    if name not in SCALERS:
        message = f"there is no loss scaler {name!r}: choose one of {', '.join(SCALERS)}"
        raise UsageError(message)
    kind = SCALERS[name]
    known = [f.name for f in fields(kind) if f.name not in _STATE]
    for key in settings:
        if key not in known:
            message = f"the {name} scaler has no setting {key!r}: it knows {', '.join(known)}"
            raise UsageError(message)
    return kind(**settings)
