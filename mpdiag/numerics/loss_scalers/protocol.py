"""What a loss scaler is: one class that every part of mpdiag asks, and none knows by name.

A scaler is a frozen dataclass: its fields are settings, or ``state`` that ``adjust`` carries on.
No tensors here, so the same scaler runs in a trainer and over a recording (``analysis.scaling``).
A step overflows when its largest unscaled gradient, times the scale, leaves FP16's range; it is
skipped, whatever the scaler. Every scaler checks, the constant one too.

To add one, write such a class in a file of this folder and list it in ``registry.SCALERS``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mpdiag.errors import UsageError
from mpdiag.numerics.formats import FP16

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

LARGEST_SCALE = 2.0**24
"""No scale beyond this is recommended, nor grown to: nothing gains from it."""

_STATE = "state"


def state(default: T) -> T:
    """A field that ``adjust`` changes; all others are settings, which people and plans choose."""
    return field(default=default, metadata={_STATE: True})


@dataclass(frozen=True)
class ScaleRange:
    """What a recording says about the scale, each as the logarithm to base 2.

    Attributes:
        wanted: The smallest scale at which what is lost no longer matters, as far as there is room.
        safe: The largest scale that keeps some headroom above the recorded gradients.
        upper: The largest scale at which no recorded gradient overflows.
    """

    wanted: int
    safe: int
    upper: int

    @property
    def first(self) -> float:
        """The scale that a scaler which adapts begins with."""
        return 2.0 ** min(self.wanted, self.upper)


@dataclass(frozen=True)
class Scaler(ABC):
    """A loss scaler's settings and its present state.

    Attributes:
        name: What plans, the command line and the dashboard call it.
        label: What sentences call it.
        needs_absmax: Whether ``adjust`` needs the largest gradient of steps that do not overflow.
            Finding it takes time on each step; a scaler that needs none is given 0.
        adaptive: Whether the scale ever changes.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    needs_absmax: ClassVar[bool] = True
    adaptive: ClassVar[bool] = True

    @property
    @abstractmethod
    def scale(self) -> float:
        """The factor on the loss for the coming step."""

    @abstractmethod
    def adjust(self, absmax: float) -> Scaler:
        """The state after a step whose largest unscaled |gradient| was ``absmax``.

        Infinity or NaN say that a gradient was not finite.
        """

    @property
    def floor(self) -> float | None:
        """The smallest scale it can fall to; None: it does not fall."""
        return None

    def moved(self, **state: Any) -> Self:
        """Itself in another state; settings were checked when it was made, and are not again."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **state)
        return other

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Its fields without its state."""
        return tuple(f.name for f in fields(cls) if _STATE not in f.metadata)

    def to_plan(self) -> dict[str, Any]:
        """How a plan holds it: its name as ``method``, and every setting."""
        return {"method": self.name, **{name: getattr(self, name) for name in self.setting_names()}}

    @classmethod
    def from_plan(cls, planned: Mapping[str, Any]) -> Self:
        """The scaler at its start, from what a plan holds; values of no setting are left alone.

        Raises:
            UsageError: If a setting makes no sense.
        """
        return cls(**{name: planned[name] for name in cls.setting_names() if name in planned})

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The values of settings that are not chosen."""
        known = cls.setting_names()
        return {
            f.name: f.default for f in fields(cls) if f.name in known and f.default is not MISSING
        }

    @classmethod
    def proposals(cls, found: ScaleRange) -> Iterator[Self]:  # noqa: ARG003
        """Settings worth replaying over a recording, the simplest first; none by default."""
        return iter(())

    def describe(self) -> str:
        """Its label, with the settings in which its proposals differ."""
        return self.label


def overflows(absmax: float, scale: float) -> bool:
    """Whether gradients up to ``absmax`` leave FP16's range at this scale, or are not finite."""
    return not math.isfinite(absmax) or FP16.overflows(absmax * scale)


def check_positive(owner: Scaler, *names: str) -> None:
    """Refuse settings that are not finite numbers above 0.

    Raises:
        UsageError: Naming the setting.
    """
    for name in names:
        value = getattr(owner, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (0 < value < math.inf)
        ):
            raise UsageError(f"{name} must be a finite number above 0, not {value!r}")


def check_whole(owner: Scaler, *names: str) -> None:
    """Refuse settings that are not whole numbers of at least 1.

    Raises:
        UsageError: Naming the setting.
    """
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")


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
