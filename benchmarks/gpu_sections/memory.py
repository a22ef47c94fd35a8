"""(g) Memory: what the plan predicts for each level against what is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import mpdiag
from gpu_sections import models
from gpu_sections.measuring import free, mib, peak, ratio, tf32
from gpu_sections.recording import Trainee
from gpu_sections.training import Ours

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_sections.child import Context

OFF, FITS = 0.3, 1.1


def compare(ctx: Context) -> None:
    """Both promises of both models."""
    sizes = ctx.sized(models.FULL, models.SMALL, models.TINY)
    tf32(on=True)
    for name in ("gpt", "cnn"):
        if not ctx.cuda and name == "cnn":
            ctx.skip("a rehearsal measures one model", f"g-memory-{name}", f"g-batch-{name}")
            continue
        with ctx.settling(f"g-memory-{name}", f"g-batch-{name}"), ctx.folder() as folder:
            compare_model(ctx, name, sizes[name], folder)
        free(ctx.device)


def compare_model(ctx: Context, name: str, size: models.Size, folder: Path) -> None:
    """Predicted from two recorded steps; measured at every level, and with the larger batch."""
    advice = predict(size, ctx.device, folder / name)
    measured: dict[str, int] = {}
    for level in advice:
        if ctx.left < 5:
            break
        measured[level] = measure(ctx, size, level)
        # After each level, as a later line overrules an earlier one and the limit may fall between.
        report_levels(ctx, f"g-memory-{name}", advice, measured)
    if "O0" not in measured:
        ctx.skip("no time was left", f"g-memory-{name}", f"g-batch-{name}")
        return
    said, used = [], []
    for level in ("O1", "O2"):
        samples = max(1, int(size.shape[0] * advice[level].batch_factor))
        if ctx.left < 5:
            said.append(f"{level}: no time left")
            continue
        used.append(measure(ctx, size, level, samples) / max(measured["O0"], 1))
        said.append(f"{level}: {samples} for {size.shape[0]}, {ratio(used[-1])} of O0's peak")
    report_batches(ctx, f"g-batch-{name}", used, said)


def report_levels(
    ctx: Context, promise: str, advice: dict[str, Any], measured: dict[str, int]
) -> None:
    """One level that is far off breaks the promise; all of them have to be near for it to hold.

    Args:
        ctx: Takes the check.
        promise: Its id.
        advice: What was predicted, by level.
        measured: Bytes at the peak, of the levels so far.
    """
    ratios = {k: v / max(advice[k].memory_bytes, 1) for k, v in measured.items()}
    figure = ", ".join(
        f"{k} {mib(advice[k].memory_bytes)} predicted, {mib(v)} measured"
        for k, v in measured.items()
    )
    near = all(abs(v - 1) <= OFF for v in ratios.values())
    left = [k for k in advice if k not in measured]
    if near and left:
        reason = f"{', '.join(left)} not measured"
        ctx.check(promise, None, figure, reason=reason, over_predicted=ratios)
        return
    ctx.check(promise, near, figure, over_predicted=ratios)


def report_batches(ctx: Context, promise: str, used: list[float], said: list[str]) -> None:
    """One batch that does not fit breaks the promise; both have to fit for it to hold.

    Args:
        ctx: Takes the check.
        promise: Its id.
        used: The peaks that were measured, as shares of O0's.
        said: A few words on each level.
    """
    broken = any(share > FITS for share in used)
    if not broken and len(used) < len(said):
        ctx.check(promise, None, "; ".join(said), reason="not every level was measured")
        return
    ctx.check(promise, not broken, "; ".join(said), shares=used)


def predict(size: models.Size, device: str, run: Path) -> dict[str, Any]:
    """The plan's advice by level."""
    trainee = Trainee(size, device)
    with mpdiag.record(trainee.model, trainee.optimizer, run, every=1, operations=0):
        trainee.step()
        trainee.step()
    del trainee
    free(device)
    return {advice.level: advice for advice in mpdiag.analyze(run).plan.levels}


def measure(ctx: Context, size: models.Size, level: str, samples: int | None = None) -> int:
    """Most bytes allocated in three steps; of FP16, and of FP32 at O0."""
    with peak(ctx.device) as most:
        before = torch.cuda.memory_allocated() if ctx.cuda else 0
        if level == "O0":
            trainee: Any = Trainee(size, ctx.device)
        else:
            trainee = Ours(size, ctx.device, torch.float16, level, eps=1e-4)
        if samples is not None:
            trainee.x, trainee.y = size.batch(ctx.device, samples)
        for _ in range(3):
            trainee.step()
        return most() - before
