"""(d) torch.compile and CUDA graphs under the trainer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from gpu_sections import models
from gpu_sections.measuring import free, in_turns, ratio, tf32
from gpu_sections.training import ByHand, Ours

if TYPE_CHECKING:
    from gpu_sections.child import Context

APART = 0.02
STEPS = 10
COMPILES = 30.0
"""Seconds that four compilations may take, for which the timing is left out where they are not there."""


def train(ctx: Context) -> None:
    """Both promises, and the times last; in a rehearsal the graph is captured, but not compiled."""
    tf32(on=True)
    size = (models.SMALL if ctx.cuda else models.TINY)["gpt"]
    with ctx.settling("d-compile"):
        worst = compare(ctx, "d-compile", size)
    start_anew(ctx)
    with ctx.settling("d-graphs"):
        if not ctx.cuda:
            ctx.skip("CUDA graphs need a GPU", "d-graphs")
        else:
            compare(ctx, "d-graphs", size, mode="reduce-overhead")
    start_anew(ctx)
    if "d-compile" in ctx.settled and ctx.left > ctx.sized(COMPILES, COMPILES, 0):
        with ctx.settling("d-compile"):
            compare_times(ctx, size, worst)


def start_anew(ctx: Context) -> None:
    """Forget what was compiled."""
    free(ctx.device)
    torch.compiler.reset()


def how_compiled(ctx: Context, **how: Any) -> dict[str, Any]:
    """What ``torch.compile`` is given."""
    return how if ctx.cuda else {"backend": "aot_eager"}


def compare(ctx: Context, promise: str, size: models.Size, **how: Any) -> float:
    """The losses of a compiled model against the eager one's; returns how far they are apart."""
    eager = losses(Ours(size, ctx.device, torch.bfloat16))
    ours = Ours(size, ctx.device, torch.bfloat16, compiled=how_compiled(ctx, **how))
    worst = furthest(losses(ours), eager)
    ctx.check(promise, worst <= APART, figure_of(worst), worst=worst)
    return worst


def figure_of(worst: float) -> str:
    """In words."""
    return f"losses at most {100 * worst:.2f} % apart"


def compare_times(ctx: Context, size: models.Size, worst: float) -> None:
    """Step times of compiled models beside the peers'."""
    trainees: dict[str, Any] = {}
    for title, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
        if title == "FP16" and not ctx.cuda:
            continue  # emulated there, and emulation cannot see inside a compiled model
        options = how_compiled(ctx)
        trainees[f"ours {title}"] = Ours(size, ctx.device, dtype, compiled=options)
        by_hand = trainees[f"by hand {title}"] = ByHand(size, ctx.device, dtype)
        by_hand.forward = torch.compile(by_hand.model, **options)
    rounds = ctx.sized(5, 3, 1)
    steps = {name: one.step for name, one in trainees.items()}
    t = in_turns(ctx, steps, rounds=rounds, count=rounds, warm=rounds)
    titles = [title for title in ("BF16", "FP16") if f"ours {title}" in t]
    ratios = {title: t[f"ours {title}"] / t[f"by hand {title}"] for title in titles}
    figure = f"{figure_of(worst)}; over by hand "
    figure += ", ".join(f"{k} {ratio(v)}" for k, v in ratios.items())
    ctx.check("d-compile", worst <= APART, figure, worst=worst, over_by_hand=ratios)


def furthest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite where one is no number."""
    apart = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return max(x if math.isfinite(x) else math.inf for x in apart)


def losses(trainee: Any) -> list[float]:
    """The losses of some steps."""
    return [float(trainee.step()) for _ in range(STEPS)]
