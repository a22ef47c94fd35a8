"""(d) torch.compile and CUDA graphs under the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gpu_sections import models
from gpu_sections.measuring import free, in_turns, ratio, tf32
from gpu_sections.training import ByHand, Ours

if TYPE_CHECKING:
    from gpu_sections.child import Context

APART = 0.02
STEPS = 10


def train(ctx: Context) -> None:
    """Both promises; in a rehearsal the graph is captured, but not compiled."""
    tf32(on=True)
    size = (models.SMALL if ctx.cuda else models.TINY)["gpt"]
    with ctx.settling("d-compile"):
        compare(ctx, "d-compile", size, timed=True)
    free(ctx.device)
    torch.compiler.reset()
    with ctx.settling("d-graphs"):
        if not ctx.cuda:
            ctx.skip("CUDA graphs need a GPU", "d-graphs")
        else:
            compare(ctx, "d-graphs", size, mode="reduce-overhead")


def compare(
    ctx: Context, promise: str, size: models.Size, *, timed: bool = False, **how: Any
) -> None:
    """The losses of a compiled model against the eager one's, and its time against the peers'."""
    options: dict[str, Any] = how if ctx.cuda else {"backend": "aot_eager"}
    eager = losses(Ours(size, ctx.device, torch.bfloat16))
    trainees = {}
    worst = 0.0
    for title, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
        if title == "FP16" and (not timed or ctx.left < 35 or not ctx.cuda):
            continue  # a CPU's FP16 is emulated, and emulation cannot see inside a compiled model
        ours = Ours(size, ctx.device, dtype, compiled=options)
        found = losses(ours)
        worst = max([worst, *(abs(a - b) / abs(b) for a, b in zip(found, eager, strict=True))])
        if timed:
            trainees[f"ours {title}"] = ours
            by_hand = ByHand(size, ctx.device, dtype)
            by_hand.forward = torch.compile(by_hand.model, **options)
            trainees[f"by hand {title}"] = by_hand
    figure = f"losses at most {100 * worst:.2f} % apart"
    ratios = {}
    if trainees and ctx.left > 10:
        t = in_turns(
            ctx,
            {k: v.step for k, v in trainees.items()},
            rounds=ctx.sized(5, 3, 1),
            count=ctx.sized(5, 3, 1),
            warm=ctx.sized(5, 3, 1),
        )
        for title in ("BF16", "FP16"):
            if f"ours {title}" in t:
                ratios[title] = t[f"ours {title}"] / t[f"by hand {title}"]
        figure += "; over by hand " + ", ".join(f"{k} {ratio(v)}" for k, v in ratios.items())
    ctx.check(promise, worst <= APART, figure, worst=worst, over_by_hand=ratios)


def losses(trainee: Any) -> list[float]:
    """The losses of some steps."""
    return [float(trainee.step()) for _ in range(STEPS)]
