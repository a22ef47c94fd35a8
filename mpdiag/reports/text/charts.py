"""Charts made of characters, as wide as the terminal allows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from mpdiag.display.wording import percent
from mpdiag.numerics.formats import FloatFormat
from mpdiag.numerics.histograms import ExponentHistogram

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_HATCHED = "▒"
HEIGHT = 8
LOST, KEPT = "red", "green"
MARGIN, TAIL = 9, 6
"""Columns left of a histogram's bars, for counts, and right of them, for the format's name."""


@dataclass(frozen=True, eq=False)
class Histogram:
    """A histogram over exponents, with the format's window at scale 1 and at the given scale.

    Bars are on a log scale; those lost to zero at scale 1 are hatched, and red. Below the axis, one line
    for each scale shows which exponents the format can hold.

    Attributes:
        h: A single histogram.
        fmt: The format whose window is marked.
        scale: The recommended loss scale, a power of two.
    """

    h: ExponentHistogram
    fmt: FloatFormat
    scale: float = 1.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """How rich draws it: in the width that it is given."""
        del console
        yield self.drawn(options.max_width)

    def drawn(self, width: int = 120) -> Text:
        """In at most so many columns; where they are too few, several powers of two share one."""
        h, fmt, scale = self.h, self.fmt, self.scale
        occupied = np.flatnonzero(h.counts)
        if occupied.size == 0:
            return Text("no non-zero values", style="dim")
        shift = round(np.log2(scale))
        low = min(int(h.exponents[occupied[0]]), fmt.zero_exponent - shift) - 1
        high = max(int(h.exponents[occupied[-1]]) + 1, fmt.zero_exponent + 3)
        low = max(low, high - 96)
        together = max(1, -(-(high - low + 1) // max(8, width - MARGIN - TAIL)))
        # No column lies on both sides of the window's end.
        low -= (low - fmt.zero_exponent) % together
        columns = np.arange(low, high + 1, together)
        counts = np.array(
            [
                sum(_count(h, e) for e in range(first, first + together))
                for first in columns.tolist()
            ],
            np.float64,
        )
        text = _bars(counts, columns < fmt.zero_exponent)
        text.append(" " * MARGIN + "─" * len(columns) + "\n", style="dim")
        text.append("     2^e " + _axis(columns, 8 * together) + "\n", style="dim")
        scaled = f"×{scale:g}" if scale >= 1 else f"×2^{shift}"
        for name, k in [("scale 1", 0)] + ([(scaled, shift)] if shift else []):
            window = ["·" if e + together <= fmt.zero_exponent - k else "━" for e in columns]
            text.append(f"{name:>8} ")
            text.append("".join(window), style="bold" if k else "")
            text.append(f"  {fmt.label}\n")
        zeros = int(h.zeros) / max(1, int(h.numel))
        zero_share = f"{percent(zeros)} of the values are exactly 0; "
        text.append(f"{zero_share}{_HATCHED}: become 0 in {fmt.label} without a scale", style="dim")
        return text


@dataclass(frozen=True, eq=False)
class Sparkline:
    """Shares over time in one line, and how they began and ended; arguments as ``sparkline``."""

    values: ArrayLike
    words: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """How rich draws it: in the width that it is given."""
        del console
        room = max(8, options.max_width - len(self.words) - 4)
        yield Text(f"  {sparkline(self.values, room)}  {self.words}")


def sparkline(values: ArrayLike, width: int = 120) -> str:
    """Shares between 0 and 1, one character each; of neighbours that share one, the largest.

    The largest of all is as high as a line; what is not 0 is never blank.
    """
    x = np.clip(np.asarray(values, np.float64), 0.0, 1.0)
    edges = np.linspace(0, x.size, min(width, x.size) + 1).astype(int)[:-1]
    if x.size > width:
        x = np.maximum.reduceat(x, edges)
    top = float(x.max(initial=0.0)) or 1.0
    return "".join(_EIGHTHS[max(1, round(8 * v / top)) if v > 0 else 0] for v in x)


def _bars(counts: np.ndarray, lost: np.ndarray) -> Text:
    """The bars, on a log scale, with two counts at their left."""
    heights = np.zeros(len(counts))
    some = counts > 0
    top = np.log10(max(counts.max(), 10.0))
    heights[some] = np.maximum(0.5, np.log10(np.maximum(counts[some], 1.0)) / top * HEIGHT)
    text = Text()
    for level in range(HEIGHT - 1, -1, -1):
        here = level in (HEIGHT - 1, 3)
        label = _count_words(10 ** (top * (level + 1) / HEIGHT)) if here else ""
        label = f"{label:>{MARGIN - 1}} "
        text.append(label, style="dim")
        for gone, height in zip(lost, heights, strict=True):
            fill = int(np.clip(round((height - level) * 8), 0, 8))
            # Without colour, too, the two kinds must differ: a lost bar is hatched to its top.
            hatched = _HATCHED if fill >= 4 else " "
            text.append(hatched if gone else _EIGHTHS[fill], style=LOST if gone else KEPT)
        text.append("\n")
    return text


def _count_words(count: float) -> str:
    """A count to one digit: ``5,000``, and ``2×10^7`` where its zeros would have to be counted."""
    digit, exponent = f"{count:.0e}".split("e")
    power = int(exponent)
    return f"{int(digit) * 10**power:,}" if power < 5 else f"{digit}×10^{power}"


def _axis(columns: np.ndarray, every: int) -> str:
    """Exponents below their columns: the multiples of ``every``."""
    labels = [" "] * len(columns)
    step = int(columns[1] - columns[0]) if len(columns) > 1 else 1
    for i, first in enumerate(columns.tolist()):
        place = -(-first // every) * every
        word = str(place)
        if place < first + step and i + len(word) <= len(labels):
            labels[i : i + len(word)] = list(word)
    return "".join(labels).rstrip()


def _count(h: ExponentHistogram, exponent: int) -> int:
    i = exponent - h.first
    return int(h.counts[i]) if 0 <= i < h.counts.shape[-1] else 0
