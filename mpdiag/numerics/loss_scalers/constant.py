"""The constant scale: chosen once, checked at every step, never changed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mpdiag.numerics.loss_scalers.protocol import LARGEST_SCALE, Scaler, ScaleRange, check_positive


@dataclass(frozen=True)
class ConstantScale(Scaler):
    """A scale that never changes; 1 is no scale."""

    name: ClassVar[str] = "constant"
    label: ClassVar[str] = "Constant"
    needs_absmax: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False

    init_scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a scale that is not finite and above 0."""
        check_positive(self, "init_scale")

    @property
    def scale(self) -> float:
        """``init_scale``, at every step."""
        return self.init_scale

    def adjust(self, absmax: float) -> "ConstantScale":  # noqa: ARG002
        """Itself: an overflow changes nothing."""
        return self

    @classmethod
    def proposals(cls, found: ScaleRange) -> "Iterator[ConstantScale]":
        """Every power of two from the one that is wanted up to the largest that is safe."""
        start = min(found.wanted, found.safe)
        end = max(start, min(found.safe, int(math.log2(LARGEST_SCALE))))
        for power in range(start, end + 1):
            yield cls(2.0**power)
