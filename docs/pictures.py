"""The pictures of the concepts, drawn as SVG from the sample run ``ssd``.

python docs/pictures.py [docs/pictures]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

import mpdiag

RUN = Path(__file__).parent.parent / "sample_runs" / "ssd"
BLUE, ORANGE, VERMILION, GREY, INK = "#2b83c6", "#e69f00", "#d55e00", "#8b93a1", "#24303f"
WINDOW = "#e4f0f9"
WIDTH = 760


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "pictures")
    folder = parser.parse_args().folder
    for name, picture in pictures().items():
        (folder / name).write_text(picture, encoding="utf-8")
        print(folder / name)


def pictures() -> dict[str, str]:
    """Each picture by the name of its file."""
    counts = gradients()
    return {
        "window.svg": window(counts),
        "interval.svg": interval(),
        "swallowed.svg": swallowed(),
        "masters.svg": masters(),
    }


def gradients() -> dict[int, int]:
    """How many activation gradients of the run lie in each bin, by exponent; no zeros."""
    rows = mpdiag.open_run(RUN).frame()
    counts: dict[int, int] = {}
    rows = rows[rows["kind"] == "activation_grad"]
    for first, row in zip(rows["first_exponent"], rows["counts"], strict=True):
        for i, n in enumerate(row):
            counts[int(first) + i] = counts.get(int(first) + i, 0) + int(n)
    return {e: n for e, n in sorted(counts.items()) if n}


def window(counts: dict[int, int]) -> str:
    """The histogram twice: as recorded, and moved by the recommended loss scale."""
    scale = int(math.log2(mpdiag.analyze(RUN).plan.loss_scale.recommended))
    panels = [
        panel(counts, 0, 60, "as recorded (loss scale 1)"),
        panel(counts, scale, 280, f"at a loss scale of {2**scale}: {scale} bins to the right"),
    ]
    return svg(460, "".join(panels), "Activation gradients of the SSD in FP16's window")


def panel(counts: dict[int, int], shift: int, top: int, title: str) -> str:
    low, high, height = -46, 18, 130
    unit = (WIDTH - 60) / (high - low)

    def x(exponent: float) -> float:
        return 30 + (exponent - low) * unit

    total = sum(counts.values())
    lost = sum(n for e, n in counts.items() if e + shift < -25) / total
    most = max(counts.values())
    parts = [
        text(30, top - 18, title, weight=600),
        rect(x(-25), top, x(16) - x(-25), height, WINDOW),
        text(x(-4.5), top + 18, "FP16's window", color=GREY, anchor="middle"),
    ]
    for exponent, n in counts.items():
        moved = exponent + shift
        if low <= moved < high:
            tall = height * 0.8 * n / most
            color = VERMILION if moved < -25 else ORANGE if moved < -14 else BLUE
            parts.append(rect(x(moved) + 0.5, top + height - tall, unit - 1, tall, color))
    parts.append(line(30, top + height, WIDTH - 30, top + height, GREY))
    parts.extend(tick(x(e), top + height + 18, e) for e in range(-40, high, 8))
    parts.append(
        text(30, top + 22, f"{lost:.1%} become 0", color=VERMILION, weight=600),
    )
    parts.append(text(30, top + 44, "subnormal: fewer bits", color="#b07900", weight=600))
    parts.append(text(30, top + 66, "kept whole", color=BLUE, weight=600))
    parts.append(text(x(16) + 5, top + 18, "∞", color=VERMILION))
    return "".join(parts)


def interval() -> str:
    """What each loss scale would lose or overflow, and the interval between."""
    plan = mpdiag.analyze(RUN).plan.loss_scale
    lower, upper, best = (math.log2(s) for s in (plan.lower, plan.upper, plan.recommended))
    low, high = 0, 24
    unit = (WIDTH - 100) / (high - low)

    def x(exponent: float) -> float:
        return 50 + (exponent - low) * unit

    top, height = 70, 46
    parts = [
        rect(x(low), top, x(lower) - x(low), height, VERMILION),
        rect(x(lower), top, x(upper) - x(lower), height, BLUE),
        rect(x(upper), top, x(high) - x(upper), height, VERMILION),
        text(x((low + lower) / 2), top + 28, "too much lost", color="#fff", anchor="middle"),
        text(x((lower + upper) / 2), top + 28, "works", color="#fff", anchor="middle", weight=600),
        text(x((upper + high) / 2), top + 28, "overflow", color="#fff", anchor="middle"),
        line(x(best), top - 12, x(best), top + height + 8, INK),
        text(x(best), top - 20, f"recommended: {plan.recommended:g}", anchor="middle", weight=600),
        text(WIDTH / 2, top + height + 56, "loss scale", color=GREY, anchor="middle"),
    ]
    parts.extend(tick(x(e), top + height + 28, e) for e in range(low, high + 1, 4))
    return svg(190, "".join(parts), "The interval of loss scales for the SSD")


def swallowed() -> str:
    """FP16's numbers near 1, and two updates: one that arrives and one that does not."""
    step = 2.0**-10
    assert np.float16(1) + np.float16(2.0**-13) == np.float16(1)
    assert np.float16(1) + np.float16(0.75 * step) == np.float16(1 + step)
    y, left, unit = 110, 150, 210

    def x(steps: float) -> float:
        return left + steps * unit

    parts = [line(60, y, WIDTH - 40, y, GREY)]
    for i, label in enumerate(("1", "1 + 2^-10", "1 + 2·2^-10")):
        parts += [line(x(i), y - 8, x(i), y + 8, INK), power(x(i), y + 30, label)]
    half = x(0.5)
    parts += [
        line(half, y - 46, half, y + 8, GREY, dashed=True),
        text(half + 6, y - 36, "halfway: below it, the sum rounds back", color=GREY),
        arrow(x(0), x(0.125), y - 14, VERMILION),
        power(x(0) - 8, y - 20, "+ 2^-13: swallowed", color=VERMILION, anchor="end"),
        arrow(x(0), x(0.75), y + 52, BLUE),
        power(
            *(x(0.75) + 12, y + 57, "+ 0.75·2^-10: rounds up to the next number"),
            color=BLUE,
            anchor="start",
        ),
        line(x(0), y + 44, x(0), y + 60, BLUE),
    ]
    title = power(
        60, 36, "The numbers that FP16 has near a weight of 1", anchor="start", weight=600
    )
    return svg(200, title + "".join(parts), "An update that FP16 swallows")


def masters() -> str:
    """The loop of a step at level O2."""

    def box(x: float, title: str, below: str, color: str) -> str:
        return (
            rect(x, 60, 170, 64, color, radius=8)
            + text(x + 85, 88, title, color="#fff", anchor="middle", weight=600)
            + text(x + 85, 110, below, color="#fff", anchor="middle")
        )

    parts = [
        box(40, "FP16 weights", "forward, backward", BLUE),
        box(295, "FP16 gradients", "of the scaled loss", ORANGE),
        box(550, "FP32 masters", "small updates add up", INK),
        arrow(212, 291, 92, GREY),
        arrow(467, 546, 92, GREY),
        text(506, 78, "unscale", color=GREY, anchor="middle"),
        line(635, 126, 635, 160, GREY),
        line(635, 160, 125, 160, GREY),
        f'<path d="M125 160V132m-5 8l5-9 5 9" fill="none" stroke="{GREY}" stroke-width="2"/>',
        text(380, 178, "cast to FP16 after the optimizer's step", color=GREY, anchor="middle"),
        text(40, 36, "One step with FP32 masters", weight=600),
    ]
    return svg(200, "".join(parts), "One step with FP32 masters")


# -- SVG -------------------------------------------------------------------------------------------


def svg(height: int, body: str, title: str) -> str:
    """A whole picture on a white card, which reads on light and on dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif" '
        f'font-size="14"><title>{title}</title>'
        f"{rect(0, 0, WIDTH, height, '#fff', radius=8)}{body}</svg>\n"
    )


def rect(x: float, y: float, width: float, height: float, color: str, radius: int = 0) -> str:
    corner = f' rx="{radius}"' if radius else ""
    return (
        f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" '
        f'fill="{color}"{corner}/>\n'
    )


def line(x1: float, y1: float, x2: float, y2: float, color: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    return (
        f'<line x1="{x1:.4g}" y1="{y1:.4g}" x2="{x2:.4g}" y2="{y2:.4g}" '
        f'stroke="{color}" stroke-width="2"{dash}/>\n'
    )


def arrow(x1: float, x2: float, y: float, color: str) -> str:
    tip = f"M{x2 - 8:.4g} {y - 5:.4g}l8 5-8 5"
    return line(x1, y, x2, y, color) + (
        f'<path d="{tip}" fill="none" stroke="{color}" stroke-width="2"/>\n'
    )


def text(
    x: float, y: float, words: str, *, color: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.4g}" y="{y:.4g}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{words}</text>\n'
    )


def tick(x: float, y: float, exponent: int) -> str:
    return power(x, y, f"2^{exponent}", color=GREY)


def power(
    x: float, y: float, words: str, *, color: str = INK, anchor: str = "middle", weight: int = 400
) -> str:
    """Text in which ``^-10`` is raised."""
    import re

    raised = re.sub(
        r"\^(-?\d+)",
        r'<tspan dy="-5" font-size="10">\1</tspan><tspan dy="5">&#8203;</tspan>',
        words,
    )
    return text(x, y, raised, color=color, anchor=anchor, weight=weight)


if __name__ == "__main__":
    main()
