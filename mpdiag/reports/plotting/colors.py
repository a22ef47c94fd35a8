"""The colours of all figures, as ``mpdiag.display.colors`` has them."""

from __future__ import annotations

from mpdiag.display.colors import (
    BLUE,
    FATE_COLORS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SERIES,
    SKY,
    VERDICT_COLORS,
    VERMILION,
    YELLOW,
)

__all__ = [
    "BLUE",
    "FATE_COLORS",
    "GREEN",
    "GREY",
    "ORANGE",
    "PURPLE",
    "SERIES",
    "SKY",
    "VERDICT_COLORS",
    "VERMILION",
    "YELLOW",
]
