"""(d) What a step of the trainer takes, beside torch.autocast and GradScaler written by hand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

import mpdiag
from gpu_sections import models
from gpu_sections.measuring import apart, free, in_turns, ratio, tf32
from mpdiag.errors import TrainingDiverged
from mpdiag.plan import LossScalePlan, PrecisionPlan

if TYPE_CHECKING:
    from gpu_sections.child import Context

SCALE = 1024.0
NO_SLOWER = 1.005
"""A ratio that rounds to 1.00, where two loops written by hand take the same."""
QUIET = mpdiag.TrainerOptions(check_tensor_cores=False)


def plan(*, scaled: bool) -> PrecisionPlan:
    """A plan with a dynamic loss scale, or none."""
    if scaled:
        return PrecisionPlan(loss_scale=LossScalePlan(method="backoff", init_scale=SCALE))
    return PrecisionPlan(loss_scale=LossScalePlan(method="none"))


class Plain:
    """FP32, as everybody writes it."""

    def __init__(self, size: models.Size, device: str, **options: Any) -> None:
        self.device = device
        self.model = size.model(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, **options)
        self.x, self.y = size.batch(device)
        self.forward: Any = self.model

    def loss(self) -> torch.Tensor:
        """The loss of the batch."""
        return models.loss_of(self.forward, self.x, self.y)

    def step(self) -> Any:
        """One step; returns its loss."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class ByHand(Plain):
    """torch.autocast and, for FP16, GradScaler, as PyTorch's documentation writes the loop."""

    def __init__(self, size: models.Size, device: str, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(size, device, **options)
        self.dtype = dtype
        scaled = dtype == torch.float16
        self.scaler = torch.amp.GradScaler(device, init_scale=SCALE, enabled=scaled)

    def step(self) -> Any:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, self.dtype):
            loss = self.loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


class Ours(Plain):
    """MixedPrecision."""

    def __init__(
        self,
        size: models.Size,
        device: str,
        dtype: torch.dtype,
        level: str = "O1",
        *,
        compiled: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(size, device, **options)
        if compiled is not None:
            self.forward = torch.compile(self.model, **compiled)
        self.mp = mpdiag.MixedPrecision(
            self.forward,
            self.optimizer,
            plan(scaled=dtype == torch.float16),
            level=level,
            overrides=mpdiag.PrecisionOverrides(dtype=dtype),
            options=QUIET,
        )

    def step(self) -> Any:
        with self.mp.autocast():
            loss = self.loss()
        self.mp.step(loss)
        return loss.detach()


def time_steps(ctx: Context) -> None:
    """Step times of all variants in turns, model by model; none takes the time of the next."""
    sizes = ctx.sized(models.FULL, models.SMALL, models.TINY)
    tf32(on=True)
    torch.backends.cudnn.benchmark = True
    names = ("gpt", "cnn", "lstm")
    for i, name in enumerate(names):
        promises = [f"d-{what}-{name}" for what in ("ratio-fp16", "ratio-bf16", "levels")]
        if not ctx.cuda and name == "lstm":
            ctx.skip("a CPU's autocast has no LSTM", *promises)
            continue
        with ctx.settling(*promises):
            time_model(ctx, name, sizes[name], ctx.left / (len(names) - i))
        free(ctx.device)


def time_model(ctx: Context, name: str, size: models.Size, seconds: float) -> None:
    """A model at O1 beside the loops written by hand, and then at the other levels.

    Args:
        ctx: The part's.
        name: The model's.
        size: It, and its batch.
        seconds: What it may take, about.
    """
    ends = time.monotonic() + seconds
    fp16, bf16 = torch.float16, torch.bfloat16
    variants: dict[str, Plain] = {
        "FP32": Plain(size, ctx.device),
        "by hand FP16": ByHand(size, ctx.device, fp16),
        "O1 FP16": Ours(size, ctx.device, fp16),
        "again FP16": ByHand(size, ctx.device, fp16),
        "by hand BF16": ByHand(size, ctx.device, bf16),
        "O1 BF16": Ours(size, ctx.device, bf16),
        "again BF16": ByHand(size, ctx.device, bf16),
    }
    t, gone = timed(ctx, name, variants, seconds / 2)
    milliseconds = {k: round(1e3 * v, 3) for k, v in t.items()}
    for title in ("FP16", "BF16"):
        promise = f"d-ratio-{title.lower()}-{name}"
        if f"O1 {title}" not in t:
            ctx.check(promise, False, "", reason="; ".join(gone))
            continue
        ours, hand, again = (t[f"{k} {title}"] for k in ("O1", "by hand", "again"))
        found, same = 2 * ours / (hand + again), apart(hand, again)
        milli = f"{1e3 * ours:.2f} ms; FP32 {1e3 * t['FP32']:.2f} ms"
        figure = f"{found:.3f} ({milli}; twice by hand {same:.3f})"
        held = found <= NO_SLOWER * same
        ctx.check(promise, held, figure, ratio=found, same=same, ms=milliseconds)
    over = {k: v / t["FP32"] for k, v in t.items() if k[0] == "O"}
    kept: dict[str, Plain] = {"FP32": variants["FP32"]}
    for key in [k for k in variants if k != "FP32"]:
        gone += said_of_skips(key, variants.pop(key))
    free(ctx.device)
    absent = ctx.quick or time.monotonic() > ends - seconds / 4
    if not absent:
        for level in ("O2", "O3"):
            # Adam's eps is zero in FP16, so O3 trains with one that is not.
            eps = {"eps": 1e-4} if level == "O3" else {}
            for title, dtype in (("FP16", fp16), ("BF16", bf16)):
                kept[f"{level} {title}"] = Ours(size, ctx.device, dtype, level, **eps)
        t, others = timed(ctx, name, kept, ends - time.monotonic())
        over |= {k: v / t["FP32"] for k, v in t.items() if k[0] == "O"}
        gone += [*others, *(said for k, v in kept.items() for said in said_of_skips(k, v))]
    report_levels(ctx, name, over, gone, absent=absent)


def report_levels(
    ctx: Context, name: str, over: dict[str, float], said: list[str], *, absent: bool
) -> None:
    """Levels against FP32; ``absent``: whether O2 and O3 were left out, so that nothing is held."""
    figure = ", ".join(f"{k} {ratio(v)}" for k, v in over.items())
    held: bool | None = all(v < 1 for v in over.values()) and not any("diverged" in x for x in said)
    if absent:
        held = None if held else False
        said = [*said, "no time for O2 and O3"]
    ctx.check(f"d-levels-{name}", held, figure, reason="; ".join(said), over_fp32=over)


def timed(
    ctx: Context, name: str, variants: dict[str, Plain], seconds: float
) -> tuple[dict[str, float], list[str]]:
    """Seconds of a step of each variant, and what was said of those that were taken out."""
    # The trainer counts what runs in half precision in its first 8 steps.
    gone = warm_up(variants, ctx.sized(10, 9, 1))
    for text in gone:
        ctx.note(f"{name}: {text}")
    steps = {k: v.step for k, v in variants.items()}
    count = ctx.sized(5, 3, 1)
    return in_turns(ctx, steps, rounds=count, count=count, warm=0, seconds=seconds), gone


def said_of_skips(name: str, trainee: Plain) -> list[str]:
    """Whether a trainer skipped steps, which take less time."""
    skipped = isinstance(trainee, Ours) and trainee.mp.skipped
    return [f"{name} skipped {skipped} steps"] if skipped else []


def warm_up(variants: dict[str, Plain], steps: int) -> list[str]:
    """Some steps of each; one that diverges is taken out, and said why."""
    gone = []
    for name in list(variants):
        try:
            for _ in range(steps):
                variants[name].step()
        except TrainingDiverged as error:
            gone.append(f"{name} diverged: {str(error)[:100]}")
            del variants[name]
    return gone
