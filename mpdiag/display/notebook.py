"""HTML for notebooks, from ``templates/notebook.html.j2``.

Each function returns ``Markup``, a string that is HTML already; any other text is escaped.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpdiag.display.colors import BLUE, GREEN, GREY
from mpdiag.display.wording import scale_text, shortened, superscript

if TYPE_CHECKING:
    from markupsafe import Markup

_TEMPLATE = "display/templates/notebook.html.j2"
CHOICES = 12
"""Modules and operations in FP32 that are shown of a plan."""
_FOREIGN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FONT = "font-family='system-ui, sans-serif' font-size='12'"
_COLOURS = {"error": "#d33", "warning": "#c80", "info": "#28a", "good": "#2a2"}


def card(title: str, *parts: str, mood: str = "good") -> Markup:
    """A box with a title and what stands below it.

    Args:
        title: Plain text.
        parts: From the functions below; other text is escaped.
        mood: ``good``, ``info``, ``warning`` or ``error``: the colour at its edge.
    """
    return _macro("card", title, [p for p in parts if p], _COLOURS.get(mood, _COLOURS["info"]))


def note(text: str) -> Markup:
    """A line in small print."""
    return _macro("note", text)


def facts(rows: Iterable[tuple[str, object]]) -> Markup:
    """Names and their values, a row each; rows without a value are left out."""
    return _macro("facts", [row for row in rows if row[1] not in (None, "")])


def figure(picture: str, words: str = "") -> Markup | str:
    """A picture from below, and how to read it; "" for no picture."""
    if not picture:
        return ""
    from markupsafe import Markup

    drawn = Markup(picture)  # noqa: S704 - made of numbers and escaped names
    return _macro("figure", drawn, words)


def next_step(code: str, words: str = "") -> Markup | str:
    """What to do next: code to copy, or a sentence; "" for neither."""
    return _macro("next_step", code, words) if code or words else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table; numbers as they are given."""
    return _macro("table", head, list(rows))


def items(entries: Iterable[tuple[str, str]]) -> str:
    """A list of sentences, each with its severity; nothing where there are none."""
    rows = [(severity, text, _COLOURS.get(severity, "inherit")) for severity, text in entries]
    return _macro("items", rows) if rows else ""


def plan_parts(plan: Any, *, scaled: bool, said: Collection[str] = ()) -> tuple[str, ...]:
    """A plan's card, from top to bottom: the scales that work, the decisions, what stays in FP32.

    Args:
        plan: A ``PrecisionPlan``.
        scaled: Whether it scales the loss.
        said: Reasons that stand beside it already.
    """
    reduction = plan.reduction
    divided = ", divided before" if reduction is not None and reduction.pre_divide else ""
    rows = [
        ("Format", f"{plan.target}, level {plan.level}"),
        ("Loss scale", _scale_words(plan.loss_scale, scaled=scaled)),
        ("", "" if plan.loss_scale.reason in said else plan.loss_scale.reason),
        ("Master weights", "FP32" if plan.master_weights.needed else "not needed"),
        ("", "" if plan.master_weights.reason in said else plan.master_weights.reason),
        ("Gradient reduction", reduction and f"{reduction.dtype}{divided}"),
        ("To pad", ", ".join(f"{s.module} {s.size}→{s.padded}" for s in plan.shapes)),
    ]
    modules = plan.fp32_modules  # most are among the operations, too
    choices = (*modules, *(c for c in plan.fp32_operations if c not in modules))
    return (
        _scale_figure(plan.loss_scale) if scaled else "",
        facts(rows),
        _choices_table(choices),
        note(f"run {plan.run}" if plan.run else ""),
    )


def _scale_words(scale: Any, *, scaled: bool) -> str:
    if not scaled:
        return f"none ({scale.need})"
    bounds = f"{scale_text(scale.lower)} to {scale_text(scale.upper)} work"
    return f"{scale_text(scale.init_scale)}, {scale.method} ({scale.need}; {bounds})"


def _scale_figure(scale: Any) -> str:
    """The loss scales that work, on a line; "" where none is known."""
    if scale.need == "unknown" or (scale.upper is not None and scale.lower > scale.upper):
        return ""
    words = (
        f"Loss scales that work (bar): {scale_text(scale.lower)} to {scale_text(scale.upper)}; "
        f"recommended (dot): {scale_text(scale.recommended)}"
    )
    upper = math.inf if scale.upper is None else math.log2(scale.upper)
    chosen = math.log2(scale.recommended)
    return figure(interval(math.log2(scale.lower), upper, chosen, words=words), words)


def _choices_table(choices: Sequence[Any]) -> str:
    if not choices:
        return ""
    rows = [(c.module or "the model", c.op or "all", c.reason) for c in choices[:CHOICES]]
    rest = f"and {len(choices) - CHOICES} more" if len(choices) > CHOICES else ""
    return table(("in FP32", "operation", "reason"), rows) + note(rest)


# -- small pictures, as SVG from plain numbers -----------------------------------------------------


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
    return _picture(448, 44, words, parts)


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
    return _picture(436, 64, words, [line])


def differences(rows: Sequence[tuple[str, float, float, float, float]], words: str) -> str:
    """For each row an interval around a difference, and the band within which none matters.

    Args:
        rows: Name, low end, difference, high end, margin; all finite, the margin above 0.
        words: What it shows, for those who cannot see it.
    """
    parts = [part for i, row in enumerate(rows) for part in _difference(22 + 34 * i, *row)]
    return _picture(448, 34 * len(rows) + 8, words, parts) if rows else ""


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


def _text(x: float, y: float, words: str, anchor: str) -> str:
    plain = html.escape(_FOREIGN.sub("\ufffd", words), quote=True)
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{plain}</text>"


def _picture(wide: int, high: float, words: str, parts: Iterable[str]) -> str:
    title = html.escape(_FOREIGN.sub("\ufffd", words), quote=True)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high:.0f}' role='img' "
        f"aria-label='{title}' style='max-width:{wide}px;width:100%;height:auto' {_FONT} "
        f"fill='currentColor'>{''.join(parts)}</svg>"
    )


def _macro(name: str, *arguments: Any) -> Markup:
    from mpdiag.display.rendering import render_macro

    return render_macro(_TEMPLATE, name, *arguments)
