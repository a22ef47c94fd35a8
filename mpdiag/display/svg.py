"""Small pictures as SVG, from plain numbers: for Markdown files and notebooks.

They need no script and no package. Every name in them is text; what XML cannot hold is replaced.
"""

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpdiag.display.colors import BLUE, FATE_COLORS, GREEN, GREY, PALE
from mpdiag.display.wording import percent, shortened, superscript

FATES = {
    "lost": "becomes 0",
    "rounded": "rounded, harmful",
    "kept": "rounded, harmless",
    "overflow": "becomes ∞",
}
"""What a format makes of a value, in the order of the values."""
HARMFUL = 0.01
"""Rounding is harmless that moves a row by at most this share of its norm ‖x‖: it is drawn pale."""
WIDTH = 900
NAMES, GAP, TOP, ROW, AXIS = 172, 22, 66, 15, 34
"""Columns for names, between maps, and rows above, of a layer and below, all in pixels."""
LEVELS = 6
DECADES = 6
"""Powers of ten from a full colour to the palest."""
_SQUARE = 7 / 3
"""Mean of x² over [1, 2]."""
_FOREIGN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FONT = "font-family='system-ui, sans-serif' font-size='12'"


@dataclass(frozen=True)
class Range:
    """What a format holds among values before scaling, as exponents of two.

    Attributes:
        label: What stands above its map.
        zero: Up to 2^zero values become 0.
        normal: From 2^normal on they keep all bits of the format.
        top: From 2^top on they become ∞.
    """

    label: str
    zero: float
    normal: float
    top: float

    def fate(self, exponent: int) -> str:
        """What becomes of values in (2^exponent, 2^(exponent+1)]; of most, where a limit is inside.

        Returns:
            A key of ``FATES``; ``kept`` for all that are rounded, for harm depends on the others.
        """
        if exponent + 1 <= self.zero:
            return "lost"
        return "overflow" if exponent + 0.5 > self.top else "kept"

    def fates(self, counts: Sequence[int], first: int) -> list[str]:
        """What becomes of the values of one row, bin by bin.

        The bins whose rounding moves the row most are ``rounded``, so many that all others together
        move it by at most ``HARMFUL``. So one limit judges the formats, whatever bits each keeps.

        Args:
            counts: Values in each power of two.
            first: The exponent of the first bin.

        Returns:
            A key of ``FATES`` for each bin.
        """
        found = [self.fate(first + i) for i in range(len(counts))]
        bits = self.normal - self.zero - 1
        energy, moved = 0.0, []
        for i, count in enumerate(counts):
            exponent = first + i
            if count and found[i] != "overflow":
                energy += count * _SQUARE * 4.0**exponent
            if count and found[i] == "kept":
                # A rounding error is uniform over the format's spacing: its mean square is 1/12.
                moved.append((count * 4.0 ** (max(exponent, self.normal) - bits) / 12, i))
        allowed = HARMFUL**2 * energy
        for error, i in sorted(moved):
            allowed -= error
            if allowed < 0:
                found[i] = "rounded"
        return found


def heat_maps(
    names: Sequence[str],
    counts: Sequence[Sequence[int]],
    first: int,
    ranges: Sequence[Range],
    *,
    ground: str = "",
) -> str:
    """Rows × powers of two, shaded by share of a row's values, once for each range, side by side.

    Args:
        names: Of the rows, top first.
        counts: Values in each power of two, by row; all rows of one length.
        first: The exponent of the first column.
        ranges: One or two.
        ground: Colour behind the picture; "" for none, with words in the colour of the page.
    """
    columns = max(1, len(counts[0]) if counts else 1)
    wide = (WIDTH - NAMES - GAP * len(ranges)) / len(ranges)
    high = TOP + ROW * len(names) + AXIS
    parts = [_legend(ranges, counts, first)]
    for i, name in enumerate(names):
        y = TOP + ROW * (i + 0.78)
        parts.append(_text(NAMES - 8, y, shortened(name, 25), "end"))
    for i, held in enumerate(ranges):
        left = NAMES + i * (wide + GAP)
        parts.append(_text(left, 40, held.label, "start", bold=True))
        cell = f"translate({left:.1f} {TOP}) scale({wide / columns:.3f} {ROW})"
        parts.append(f"<g transform='{cell}'>{_cells(counts, first, held)}</g>")
        parts += _marks(held, first, columns, left, wide, len(names))
        parts += _exponents(first, columns, left, wide, TOP + ROW * len(names))
    words = "; ".join(held.label for held in ranges)
    return _picture(WIDTH, high, f"Gradients by layer and power of two: {words}", parts, ground)


def shares(title: str, parts: Sequence[tuple[str, float, str]], *, ground: str = "") -> str:
    """One bar in parts, each with its words and its share below.

    Args:
        title: Above it.
        parts: Words, share from 0 to 1, and colour of each.
        ground: As for ``heat_maps``.
    """
    drawn = [_text(8, 18, title, "start", bold=True)]
    left = 8.0
    for _, share, colour in parts:
        wide = share * (WIDTH - 16)
        drawn.append(
            f"<rect x='{left:.1f}' y='28' width='{wide:.1f}' height='26' fill='{colour}'/>"
        )
        left += wide
    for i, (words, share, colour) in enumerate(parts):
        x, y = 8 + (i % 3) * 295, 70 + 20 * (i // 3)
        drawn.append(f"<rect x='{x}' y='{y}' width='10' height='10' fill='{colour}'/>")
        drawn.append(_text(x + 16, y + 10, f"{words}: {percent(share, 1)}", "start"))
    high = 70 + 20 * -(-len(parts) // 3) + 4
    return _picture(WIDTH, high, title, drawn, ground)


def interval(lower: float, upper: float, chosen: float | None, *, words: str) -> str:
    """Loss scales that work, from 2^lower to 2^upper, and the chosen one, on a line of exponents.

    Args:
        lower: The smallest scale's exponent.
        upper: The largest scale's exponent; may be infinite.
        chosen: The recommended scale's exponent.
        words: What it shows, for those who cannot see it.
    """
    end = max(24.0, chosen or 0.0) if math.isinf(upper) else max(24.0, upper + 1)
    start = min(0.0, lower, chosen or 0.0)
    unit = 420 / (end - start)

    def place(exponent: float) -> float:
        return 14 + unit * (min(exponent, end) - start)

    left, wide = place(lower), place(upper) - place(lower)
    parts = [
        f"<rect x='14' y='12' width='420' height='8' rx='4' fill='{GREY}' fill-opacity='.35'/>",
        f"<rect x='{left:.1f}' y='12' width='{wide:.1f}' height='8' rx='4' fill='{GREEN}'/>",
    ]
    if chosen is not None:
        parts.append(f"<circle cx='{place(chosen):.1f}' cy='16' r='7' fill='{BLUE}'/>")
    step = 4 if end - start <= 32 else 8
    parts += [
        _text(place(exponent), 38, f"2{superscript(exponent)}", "middle")
        for exponent in range(math.ceil(start / step) * step, math.floor(end) + 1, step)
    ]
    return _picture(448, 44, words, parts, "")


def curve(values: Sequence[float], words: str) -> str:
    """A line through values in their order; what is not finite interrupts it."""
    known = [v for v in values if math.isfinite(v)]
    if len(known) < 2:
        return ""
    # Between two ends of the range of floats lies more than a float holds: halves are set apart instead.
    unit = 1.0 if math.isfinite(max(known) - min(known)) else 0.5
    low, span = unit * min(known), (unit * max(known) - unit * min(known)) or 1.0
    step = 420 / max(1, len(values) - 1)
    path, fresh = [], True
    for i, value in enumerate(values):
        if math.isfinite(value):
            height = (unit * value - low) / span
            path.append(f"{'M' if fresh else 'L'}{8 + i * step:.1f} {8 + 48 * (1 - height):.1f}")
        fresh = not math.isfinite(value)
    line = f"<path d='{''.join(path)}' fill='none' stroke='{BLUE}' stroke-width='1.5'/>"
    return _picture(436, 64, words, [line], "")


def differences(rows: Sequence[tuple[str, float, float, float, float]], words: str) -> str:
    """For each row an interval around a difference, and the band within which none matters.

    Args:
        rows: Name, low end, difference, high end, margin; all finite, the margin above 0.
        words: What it shows, for those who cannot see it.
    """
    parts = [part for i, row in enumerate(rows) for part in _difference(22 + 34 * i, *row)]
    return _picture(448, 34 * len(rows) + 8, words, parts, "") if rows else ""


def _difference(
    y: int, name: str, low: float, middle: float, high: float, margin: float
) -> Iterable[str]:
    """One row of ``differences``: the band, 0, the interval and its middle."""
    unit = 135 / (1.15 * max(abs(low), abs(high), margin))
    band, left, right = unit * margin, 300 + unit * low, 300 + unit * high
    yield _text(152, y + 4, shortened(name, 22), "end")
    box = f"x='{300 - band:.1f}' y='{y - 9}' width='{2 * band:.1f}' height='18'"
    yield f"<rect {box} fill='{GREEN}' fill-opacity='.22'/>"
    yield f"<path d='M300 {y - 11}v22' stroke='{GREY}'/>"
    yield f"<path d='M{left:.1f} {y}H{right:.1f}' stroke='{BLUE}' stroke-width='3'/>"
    yield f"<circle cx='{300 + unit * middle:.1f}' cy='{y}' r='4.5' fill='{BLUE}'/>"


def _cells(counts: Sequence[Sequence[int]], first: int, held: Range) -> str:
    """The cells of one map in units of a cell, one path for each colour and depth."""
    paths: dict[tuple[str, int], list[str]] = {}
    for row, values in enumerate(counts):
        whole = sum(values) or 1
        fates = held.fates(values, first)
        for column, count in enumerate(values):
            if count > 0:
                depth = min(1.0, max(0.0, 1 + math.log10(count / whole) / DECADES))
                key = fates[column], max(1, round(LEVELS * depth))
                paths.setdefault(key, []).append(f"M{column} {row}h.9v.88h-.9z")
    return "".join(
        f"<path fill='{FATE_COLORS[fate]}' "
        f"fill-opacity='{PALE.get(fate, 1.0) * level / LEVELS:.2f}' d='{''.join(cells)}'/>"
        for (fate, level), cells in paths.items()
    )


def _legend(ranges: Sequence[Range], counts: Sequence[Sequence[int]], first: int) -> str:
    """What the colours mean that occur in any of the maps."""
    used = {
        fate
        for held in ranges
        for row in counts
        for count, fate in zip(row, held.fates(row, first), strict=True)
        if count > 0
    }
    parts, x = [], float(NAMES)
    for fate, words in FATES.items():
        if fate in used:
            fill = f"fill='{FATE_COLORS[fate]}' fill-opacity='{PALE.get(fate, 1.0)}'"
            parts.append(f"<rect x='{x}' y='8' width='10' height='10' {fill}/>")
            parts.append(_text(x + 15, 17, words, "start"))
            x += 132
    return "".join(parts)


def _marks(
    held: Range, first: int, columns: int, left: float, wide: float, rows: int
) -> Iterable[str]:
    """The ends of a range: a line each, its words above."""
    ends = (
        (held.zero, "0 ←", "end", FATE_COLORS["lost"], ""),
        (held.normal, "", "end", GREY, " stroke-dasharray='2 3'"),
        (held.top, "→ ∞", "start", FATE_COLORS["overflow"], ""),
    )
    for exponent, words, anchor, colour, dash in ends:
        if first < exponent < first + columns:
            x = left + wide * (exponent - first) / columns
            line = f"M{x:.1f} {TOP - 4}v{ROW * rows + 6}"
            yield f"<path d='{line}' stroke='{colour}' stroke-width='1.5'{dash}/>"
            if words:
                yield _text(x, TOP - 8, words, anchor)


def _exponents(first: int, columns: int, left: float, wide: float, top: float) -> Iterable[str]:
    step = next(s for s in (4, 8, 16, 32, 64, 128) if columns / s <= 8)
    for exponent in range(-(-first // step) * step, first + columns + 1, step):
        x = left + wide * (exponent - first) / columns
        yield _text(x, top + 17, f"2{superscript(exponent)}", "middle")


def _text(x: float, y: float, words: str, anchor: str, *, bold: bool = False) -> str:
    weight = " font-weight='600'" if bold else ""
    plain = html.escape(_FOREIGN.sub("\ufffd", words), quote=True)
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{weight}>{plain}</text>"


def _picture(wide: int, high: float, words: str, parts: Iterable[str], ground: str) -> str:
    ink = "#1c2430" if ground else "currentColor"
    title = html.escape(_FOREIGN.sub("\ufffd", words), quote=True)
    back = f"<rect width='100%' height='100%' fill='{ground}'/>" if ground else ""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high:.0f}' role='img' "
        f"aria-label='{title}' style='max-width:{wide}px;width:100%;height:auto' {_FONT} "
        f"fill='{ink}'>{back}{''.join(parts)}</svg>"
    )
