"""(d) Where two ways of training must agree: to the bit, or within rounding."""

from __future__ import annotations

import math
import os
import socket
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import mpdiag
from gpu_sections import models
from gpu_sections.measuring import deterministic, free, tf32, wait
from gpu_sections.training import QUIET, SCALE, ByHand, Ours, plan

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_sections.child import Context
    from gpu_sections.training import Plain

ALIKE = 1e-3
NO_CPU_LSTM = "a CPU's autocast has no LSTM"


def compare_bits(ctx: Context) -> None:
    """Every promise of equality in training."""
    tf32(on=True)
    sizes = models.SMALL if ctx.cuda else models.TINY
    for name in ("gpt", "cnn", "lstm"):
        for title, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            if not ctx.cuda and name == "lstm":
                ctx.skip(NO_CPU_LSTM, f"d-equal-{title}-{name}")
                continue
            with ctx.settling(f"d-equal-{title}-{name}"), deterministic():
                compare(ctx, f"d-equal-{title}-{name}", sizes[name], dtype)
            free(ctx.device)
    with ctx.settling("d-skip"):
        skip_a_step(ctx)
    with ctx.settling("d-optimizers"):
        compare_optimizers(ctx)
    with ctx.settling("d-fused-scale"), ctx.folder() as folder:
        compare_recorded_gradients(ctx, folder)
    with ctx.settling("d-nccl"), ctx.folder() as folder:
        train_distributed(ctx, folder)


def compare(ctx: Context, promise: str, size: models.Size, dtype: torch.dtype) -> None:
    """The trainer against the loop written by hand, and that loop against itself."""
    steps = ctx.sized(8, 4, 2)
    theirs, again = (run(ByHand(size, ctx.device, dtype), steps) for _ in range(2))
    if difference(theirs, again) is not None:
        ctx.skip("the loop written by hand does not repeat its own bits", promise)
        return
    what = difference(theirs, run(Ours(size, ctx.device, dtype), steps))
    figure = f"{steps} steps and {len(theirs[1])} weights equal" if what is None else what
    # Whatever dtype autocast is given, it computes cuDNN's LSTMs in FP16.
    lstm = ctx.cuda and dtype == torch.bfloat16 and promise.endswith("-lstm")
    reason = "torch.autocast itself computes a GPU's LSTMs in FP16" if lstm else ""
    ctx.check(promise, what is None, figure, reason=reason)


def run(trainee: Plain, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights after so many steps."""
    losses = [trainee.step() for _ in range(steps)]
    state = {n: p.detach().clone() for n, p in trainee.model.named_parameters()}
    if isinstance(trainee, Ours):
        trainee.mp.close()
    return [float(x) for x in losses], state


def difference(one: Any, other: Any) -> str | None:
    """What differs first, and by how much; None if nothing does."""
    for step, (a, b) in enumerate(zip(one[0], other[0], strict=True)):
        if a != b:
            return f"the loss of step {step} differs: {a:.9g} and {b:.9g}"
    for name, value in one[1].items():
        if not torch.equal(value, other[1][name]):
            worst = float((value - other[1][name]).abs().max())
            return f"{name} differs by at most {worst:.2g}"
    return None


def _network(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8)
    return nn.Sequential(*layers).to(device)


def skip_a_step(ctx: Context) -> None:
    """An infinite input between finite ones."""
    model = _network(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x = torch.randn(16, 32, device=ctx.device)
    with mpdiag.MixedPrecision(model, optimizer, plan(scaled=True), options=QUIET) as mp:

        def step(batch: torch.Tensor) -> mpdiag.StepResult:
            with mp.autocast():
                loss = model(batch).square().mean()
            return mp.step(loss, clip_norm=1.0)

        def state() -> list[torch.Tensor]:
            kept = [*model.state_dict().values()]
            kept += [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
            return [v.detach().clone() for v in kept]

        first = step(x)
        before = state()
        broken = step(torch.full_like(x, torch.inf))
        kept = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        after = step(x)
    right = (first.skipped, broken.skipped, after.skipped) == (False, True, False)
    named = f"; {broken.first}" if broken.first else ""
    ctx.check("d-skip", right and kept, f"skipped: {broken.skipped}, unchanged: {kept}{named}")


def compare_optimizers(ctx: Context) -> None:
    """AdamW in its three implementations, ten steps at O1 and O2."""
    apart, skipped = [], []
    size = models.TINY["gpt"]
    dtype = torch.float16
    for level in ("O1", "O2"):
        weights = []
        for title in ("fused", "foreach", "plain"):
            options = {"fused": title == "fused", "foreach": title == "foreach"}
            trainee = Ours(size, ctx.device, dtype, level, **options)
            for _ in range(ctx.sized(10, 10, 3)):
                trainee.step()
            if trainee.mp.skipped:
                skipped.append(f"{title} at {level}")
            state = trainee.mp.fp32_state_dict()
            weights.append(
                torch.cat([v.flatten() for v in state.values() if v.is_floating_point()])
            )
            trainee.mp.close()
        norm = float(weights[-1].norm())
        apart += [float((w - weights[-1]).norm()) / norm for w in weights[:-1]]
    worst = max(x if math.isfinite(x) else math.inf for x in apart)
    held = worst <= ALIKE and not skipped
    reason = f"skipped steps: {', '.join(skipped)}" if skipped else ""
    ctx.check("d-optimizers", held, f"apart by {worst:.1e} of the weights", reason=reason)


def compare_recorded_gradients(ctx: Context, folder: Path) -> None:
    """A script's own GradScaler with a fused optimizer, recorded: its gradients are unscaled in step."""
    found = []
    for title in ("fused", "foreach"):
        options = {"fused": title == "fused", "foreach": title == "foreach"}
        trainee = ByHand(models.TINY["gpt"], ctx.device, torch.float16, **options)
        run_folder = folder / title
        with mpdiag.record(trainee.model, trainee.optimizer, run_folder, every=1, operations=0):
            for _ in range(2):
                trainee.step()
        records = mpdiag.open_run(run_folder).records
        rows = records.of_kind("weight_grad") & (records.step == 0)
        records = records.select(rows)
        names = [str(n) for n in records.texts("name")]
        found.append(dict(zip(names, records.histograms().absmax.tolist(), strict=True)))
    fused, foreach = found
    pairs = [(fused[n], foreach[n]) for n in foreach if n in fused and foreach[n] > 0]
    worst = max((abs(math.log2(a / b)) if a > 0 else math.inf for a, b in pairs), default=math.inf)
    figure = f"{len(pairs)} weights, at most a factor of {2 ** min(worst, 99):.3g} apart"
    reason = f"the scale was {SCALE:g}" if worst > 0.1 else ""
    held = worst <= 0.1 and len(pairs) == len(foreach) > 0
    ctx.check("d-fused-scale", held, figure, reason=reason)


def train_distributed(ctx: Context, folder: Path) -> None:
    """One rank: what DDP and the collectives of the backend change is nothing."""
    import torch.distributed as dist

    backend = "nccl" if ctx.cuda else "gloo"
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(place)
    try:
        dist.init_process_group(backend, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device=ctx.device))
        wait(ctx.device)
    except Exception as error:  # noqa: BLE001 - a container without shared memory, or interfaces
        ctx.skip(f"{backend} does not start here: {' '.join(str(error).split())[:200]}", "d-nccl")
        return
    try:
        losses, skips, recorded = [], [], []
        for wrapped in (False, True):
            model: nn.Module = _network(ctx.device)
            if wrapped:
                ids = [torch.cuda.current_device()] if ctx.cuda else None
                model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(ctx.device)
            with (
                mpdiag.record(model, optimizer, folder / str(wrapped), every=1) as recorder,
                mpdiag.MixedPrecision(model, optimizer, plan(scaled=True), options=QUIET) as mp,
            ):
                seen, missed = [], []
                for i in range(6):
                    with mp.autocast():
                        loss = model(x * torch.inf if i == 3 else x).square().mean()
                    result = mp.step(loss)
                    seen.append(result.loss)
                    missed.append(result.skipped)
            losses.append([v for v, m in zip(seen, missed, strict=True) if not m])
            skips.append(missed)
            recorded.append(recorder.steps_recorded)
    finally:
        dist.destroy_process_group()
    same = losses[0] == losses[1]
    held = (
        same
        and skips == [[False] * 3 + [True] + [False] * 2] * 2
        and recorded[0] == recorded[1] > 0
    )
    figure = f"{backend}: losses equal {same}, skipped {skips[1]}, {recorded[1]} steps recorded"
    more = torch.cuda.device_count() if ctx.cuda else 1
    reason = "" if more == 1 else f"of the {more} devices one was used"
    ctx.check("d-nccl", held, figure, reason=reason)
