"""Pictures made of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from mpdiag.formats import FloatFormat
    from mpdiag.histogram import ExponentHistogram

_EIGHTHS = " ▁▂▃▄▅▆▇█"
HEIGHT = 8
LOST, KEPT = "red", "green"


def sparkline(values: ArrayLike) -> str:
    """Shares between 0 and 1, one character each."""
    x = np.clip(np.asarray(values, np.float64), 0.0, 1.0)
    return "".join(_EIGHTHS[round(v * 8)] for v in x)


def draw_histogram(h: ExponentHistogram, fmt: FloatFormat, scale: float = 1.0) -> Text:
    """A histogram over exponents, with the format's window at scale 1 and at the given scale.

    Bars are on a log scale; red ones are lost to zero at scale 1. Below the axis, one line for each
    scale shows which exponents the format can hold.

    Args:
        h: A single histogram.
        fmt: The format whose window is marked.
        scale: The recommended loss scale, a power of two.
    """
    occupied = np.flatnonzero(h.counts)
    if occupied.size == 0:
        return Text("no non-zero values", style="dim")
    shift = round(np.log2(scale))
    low = min(int(h.exponents[occupied[0]]), fmt.zero_exponent - shift) - 1
    high = max(int(h.exponents[occupied[-1]]) + 1, fmt.zero_exponent + 3)
    low = max(low, high - 96)
    columns = np.arange(low, high + 1)
    counts = np.array([_count(h, int(e)) for e in columns], np.float64)
    heights = np.zeros(len(columns))
    some = counts > 0
    top = np.log10(max(counts.max(), 10.0))
    heights[some] = np.maximum(0.5, np.log10(np.maximum(counts[some], 1.0)) / top * HEIGHT)
    text = Text()
    for level in range(HEIGHT - 1, -1, -1):
        label = (
            f"{10 ** (top * (level + 1) / HEIGHT):8.0e} " if level in (HEIGHT - 1, 3) else " " * 9
        )
        text.append(label, style="dim")
        for e, height in zip(columns, heights, strict=True):
            fill = _EIGHTHS[int(np.clip(round((height - level) * 8), 0, 8))]
            text.append(fill, style=LOST if e < fmt.zero_exponent else KEPT)
        text.append("\n")
    text.append(" " * 9 + "─" * len(columns) + "\n", style="dim")
    labels = [" "] * (len(columns) + 8)
    for i, e in enumerate(columns):
        if e % 8 == 0:
            labels[i : i + len(str(e))] = list(str(e))
    text.append("     2^e " + "".join(labels).rstrip() + "\n", style="dim")
    for name, k in [("scale 1", 0)] + ([(f"×{scale:g}", shift)] if shift else []):
        window = ["·" if e < fmt.zero_exponent - k else "━" for e in columns]
        text.append(f"{name:>8} ")
        text.append("".join(window), style="bold" if k else "")
        text.append(f"  {fmt.label}\n")
    zeros = int(h.zeros) / max(1, int(h.numel))
    text.append(
        f"         {zeros:.1%} of the values are exactly 0; red: {fmt.label} makes them 0 "
        "without a scale",
        style="dim",
    )
    return text


def _count(h: ExponentHistogram, exponent: int) -> int:
    i = exponent - h.first
    return int(h.counts[i]) if 0 <= i < h.counts.shape[-1] else 0
