"""(c) FP16 as the card computes it, against FP16 emulated there, and against the recording."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import mpdiag
from gpu_sections.measuring import tf32
from gpu_sections.promises import of_part
from mpdiag import workloads
from mpdiag.analysis.layers import merge_layers
from mpdiag.errors import TrainingDiverged
from mpdiag.numerics.formats import FP16
from mpdiag.workloads.protocol import mixed_step, start

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_sections.child import Context

APART, LOSS, ENDING = 0.02, 0.05, 0.1
EARLY = 30
"""Steps over which two trainings stay together: later, rounding alone drives them apart."""
KEPT_BYTES = 3_000_000


@dataclass(frozen=True)
class Trained:
    """A training in FP16.

    Attributes:
        losses: Of every step; NaN where it was skipped without one.
        scales: The loss scale of every step.
        skipped: How many steps were.
        run: The recording.
        stopped: Why it ended early; empty if it did not.
    """

    losses: list[float]
    scales: list[float]
    skipped: int
    run: Any
    stopped: str


def ssd(ctx: Context) -> None:
    """The promises of the SSD."""
    if not ctx.cuda:
        names = [p.id for p in of_part("c-ssd")]
        ctx.skip("a rehearsal trains one workload, in c-language_model", *names)
        return
    compare(ctx, "ssd", 60 if ctx.quick else 120)


def language_model(ctx: Context) -> None:
    """The promises of the language model."""
    compare(ctx, "language_model", ctx.sized(60, 30, 2))


def compare(ctx: Context, name: str, steps: int) -> None:
    """FP32, then FP16 native and emulated, by the plan and without a scale."""
    tf32(on=False)
    promises = [f"c-{what}-{name}" for what in ("histograms", "predicted", "curves", "plan")]
    with ctx.settling(*promises), ctx.folder() as folder:
        # A rehearsal trains something small in its place.
        workload = workloads.load(name if ctx.cuda else "gpt")
        every = max(1, steps // 10)
        fp32, losses = record_fp32(ctx, workload, folder / name, steps, every)
        plan = mpdiag.analyze(folder / name).plan
        plan.save(folder / name / "plan.json")

        def train(title: str, backend: str, scale: float | None) -> Trained:
            overrides = mpdiag.PrecisionOverrides(loss_scale=scale)
            place = folder / f"{name}-{title}"
            return train_fp16(ctx, workload, place, steps, every, plan, backend, overrides)

        device = "native" if ctx.cuda else "emulated"
        native = train("fp16-plan", device, None)
        emulated = train("fp16-plan-emulated", "emulated", None)
        keep(ctx, folder, name, f"{name}-fp16-plan")
        compare_shares(ctx, name, fp32, native, emulated)
        compare_curves(ctx, name, losses, native, emulated)
        bare = train("fp16-no-scale", device, 1.0)
        compare_endings(ctx, name, losses, native, bare, plan)


def record_fp32(
    ctx: Context, workload: Any, run: Path, steps: int, every: int
) -> tuple[Any, list[float]]:
    """The FP32 recording, and its losses."""
    session = start(workload, steps=steps, device=ctx.device)
    with mpdiag.record(session.model, list(session.optimizers), run, every=every, operations=1):
        losses = session.run()
    return mpdiag.open_run(run), losses


def train_fp16(
    ctx: Context, workload: Any, run: Path, steps: int, every: int, plan: Any, backend: Any,
    overrides: mpdiag.PrecisionOverrides,
) -> Trained:  # fmt: skip
    """A training from the same seed, recorded at the same steps."""
    session = start(workload, steps=steps, device=ctx.device)
    scales: list[float] = []
    losses: list[float] = []
    stopped = ""
    quiet = mpdiag.TrainerOptions(check_tensor_cores=False)
    models, optimizers = session.model, list(session.optimizers)
    with (
        mpdiag.record(models, optimizers, run, every=every, operations=0),
        mpdiag.MixedPrecision(
            models, optimizers, plan, backend=backend, overrides=overrides, options=quiet
        ) as trainer,
    ):
        one = mixed_step(trainer)

        def take_step(at: Any, batch: Any) -> Any:
            scales.append(trainer.loss_scale)
            losses.append(math.nan)
            losses[-1] = float(one(at, batch))
            return losses[-1]

        try:
            session.run(take_step=take_step)
        except TrainingDiverged as error:
            stopped = str(error)
        skipped = trainer.skipped
    return Trained(losses, scales, skipped, mpdiag.open_run(run), stopped)


def keep(ctx: Context, folder: Path, *names: str) -> None:
    """Keep small runs for the sample runs."""
    if not ctx.cuda:
        return
    for name in names:
        size = sum(p.stat().st_size for p in (folder / name).rglob("*") if p.is_file())
        if size <= KEPT_BYTES:
            shutil.copytree(folder / name, ctx.keep / "runs" / name, dirs_exist_ok=True)


def lost_share(run: Any, fp32: Any, scales: list[float]) -> tuple[float, float, float]:
    """Shares of FP32's non-zero activation gradients: predicted lost, observed lost; worst layer apart.

    Layers that the FP16 run held in FP32 are left out.
    """
    sums: dict[str, np.ndarray] = {}
    rows = run.records.of_kind("activation_grad")
    dtypes = zip(run.records.texts("name")[rows], run.records.texts("dtype")[rows], strict=True)
    wide = {name for name, dtype in dtypes if dtype != "float16"}
    for step in np.intersect1d(fp32.records.step, run.records.step):
        found = []
        for one in (fp32, run):
            merged = merge_layers(one.records, one.records.step == step).of_kind("activation_grad")
            found.append({str(n): merged.histograms[i] for i, n in enumerate(merged.names)})
        exponent = round(math.log2(scales[int(step)]))
        for name in sorted((set(found[0]) & set(found[1])) - wide):
            w, n = found[0][name], found[1][name]
            row = [w.nonzero, w.lost_to_zero(FP16, exponent).value, n.zeros - w.zeros]
            sums[name] = sums.get(name, np.zeros(3)) + np.array(row, float)
    if not sums:
        return math.nan, math.nan, math.nan
    table = np.stack(list(sums.values()))
    total = table.sum(0)
    shares = table[:, 1:] / np.maximum(table[:, :1], 1)
    return total[1] / total[0], total[2] / total[0], float(abs(shares[:, 0] - shares[:, 1]).max())


def compare_shares(ctx: Context, name: str, fp32: Any, native: Trained, emulated: Trained) -> None:
    """What native FP16 lost, against emulated FP16 and against the prediction."""
    predicted, here, layer = lost_share(native.run, fp32, native.scales)
    _, there, _ = lost_share(emulated.run, fp32, emulated.scales)
    if math.isnan(here) or math.isnan(there):
        names = f"c-histograms-{name}", f"c-predicted-{name}"
        ctx.skip("no layer has activation gradients in FP16 in both runs", *names)
        return
    apart = abs(here - there)
    figure = f"native {here:.2%}, emulated {there:.2%}"
    ctx.check(f"c-histograms-{name}", apart <= APART, figure, native=here, emulated=there)
    held = abs(predicted - here) <= APART
    figure = f"predicted {predicted:.2%}, observed {here:.2%}; worst layer {layer:.2%} apart"
    ctx.check(f"c-predicted-{name}", held, figure, predicted=predicted, observed=here, layer=layer)


def last_fifth(losses: list[float], steps: int) -> float:
    """The mean loss of the last fifth of the steps; NaN if training ended before."""
    part = losses[steps - max(1, steps // 5) :] if len(losses) >= steps else []
    return float(np.mean(part)) if part else math.nan


def compare_curves(
    ctx: Context, name: str, losses: list[float], native: Trained, emulated: Trained
) -> None:
    """Native against emulated, by the plan."""
    pairs = list(zip(native.losses[:EARLY], emulated.losses[:EARLY], strict=False))
    apart = float(np.mean([abs(a - b) / abs(b) for a, b in pairs])) if pairs else math.nan
    steps = len(losses)
    here, there = last_fifth(native.losses, steps), last_fifth(emulated.losses, steps)
    held = apart <= LOSS and abs(native.skipped - emulated.skipped) <= 1
    figure = f"{apart:.2%} apart over {len(pairs)} steps, at the end {here:.4g} and {there:.4g}, "
    figure += f"skipped {native.skipped} and {emulated.skipped}"
    ctx.check(f"c-curves-{name}", held, figure, apart=apart)


def compare_endings(
    ctx: Context, name: str, losses: list[float], native: Trained, bare: Trained, plan: Any
) -> None:
    """By the plan, and without a scale, against FP32."""
    steps = len(losses)
    fp32 = last_fifth(losses, steps)
    by_plan = abs(last_fifth(native.losses, steps) - fp32) / abs(fp32)
    without = abs(last_fifth(bare.losses, steps) - fp32) / abs(fp32)
    held: bool | None = by_plan <= ENDING and not without <= by_plan
    scale = plan.loss_scale.init_scale if plan.loss_scale.method != "none" else 1
    figure = f"{by_plan:.1%} off FP32 by the plan (scale {scale:g}), {without:.1%} without a scale"
    reason = "; ".join(t for t in (native.stopped, bare.stopped) if t)[:200]
    if scale == 1:  # then both are the same training
        held = None if by_plan <= ENDING else False
        reason = "; ".join(t for t in ("its plan wants no scale here", reason) if t)
    ctx.check(f"c-plan-{name}", held, figure, reason=reason, plan=by_plan, bare=without)


__all__ = ["language_model", "ssd", "torch"]
