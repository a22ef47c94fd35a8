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
    options: dict[str, Any] = how if ctx.cuda else {"backend": "eager"}
    eager = losses(Ours(size, ctx.device, torch.bfloat16))
    trainees = {}
    worst = 0.0
    for title, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
        if not ctx.cuda and title == "FP16":
            continue  # a CPU's FP16 is emulated, and emulation cannot see inside a compiled model
        ours = compiled(Ours, size, ctx.device, dtype, options)
        found = losses(ours)
        worst = max([worst, *(abs(a - b) / abs(b) for a, b in zip(found, eager, strict=True))])
        if timed:
            trainees[f"ours {title}"] = ours
            trainees[f"by hand {title}"] = compiled(ByHand, size, ctx.device, dtype, options)
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


def compiled(
    kind: type, size: models.Size, device: str, dtype: torch.dtype, options: dict[str, Any]
) -> Any:
    """A trainee whose model is compiled in place, so that the trainer holds the compiled one."""
    trainee = kind(size, device, dtype)
    trainee.forward = torch.compile(trainee.model, **options)
    return trainee


def losses(trainee: Any) -> list[float]:
    """The losses of some steps."""
    return [float(trainee.step()) for _ in range(STEPS)]
