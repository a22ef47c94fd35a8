"""(b) Recording: it changes no bit, and what it costs beside what people write by hand."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import mpdiag
from gpu_sections import models
from gpu_sections.measuring import (
    apart,
    deterministic,
    free,
    in_turns,
    mib,
    peak,
    ratio,
    seconds_of,
    tf32,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpu_sections.child import Context

NAMES = ("gpt", "cnn", "lstm")
EVERY, DEFAULT = 1.25, 1.02
MEMORY = 256 * 2**20
PERIOD = 20
"""Steps of a period of the default cadence."""
HISTOGRAM_SECONDS, PATIENCE = 1e-7, 12.0
"""What numpy takes for a value of a histogram, about, and the longest step worth waiting for."""
LARGE_GIB = 70
"""What the large model needs: weights, gradients and Adam 25 GB, a copy of the weights, activations."""


class Trainee:
    """A model in plain FP32 training."""

    def __init__(self, size: models.Size, device: str, **options: Any) -> None:
        self.model = size.model(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, **options)
        self.x, self.y = size.batch(device)
        self.step_index = 0
        self.after_backward: Callable[[], None] = lambda: None

    def step(self) -> torch.Tensor:
        """One step; waits for nothing."""
        self.optimizer.zero_grad()
        loss = models.loss_of(self.model, self.x, self.y)
        loss.backward()
        self.after_backward()
        self.optimizer.step()
        self.step_index += 1
        return loss.detach()


def compare_bits(ctx: Context) -> None:
    """Training with and without a recorder, to the bit; and the operations it records."""
    sizes = models.SMALL if ctx.cuda else models.TINY
    tf32(on=True)
    for name in NAMES:
        with ctx.settling(f"b-identical-{name}"), deterministic(), ctx.folder() as folder:
            compare_model(ctx, name, sizes[name], folder)
        free(ctx.device)
    with ctx.settling("b-operations"), ctx.folder() as folder:
        compare_operations(ctx, folder)


def compare_model(ctx: Context, name: str, size: models.Size, folder: Path) -> None:
    """A model trained twice without a recorder, and once with it."""
    steps = ctx.sized(8, 4, 3)
    plain, again = (train(size, ctx.device, steps) for _ in range(2))
    reason = ""
    if difference(plain, again) is not None:
        what = difference(plain, again)
        ctx.skip(f"without a recorder the training itself repeats no {what}", f"b-identical-{name}")
        return
    recorded = train(size, ctx.device, steps, folder / name)
    what = difference(plain, recorded)
    if what is not None:
        reason = f"the {what} differs"
    elif recorded[2] != steps:
        reason = f"{recorded[2]} of {steps} steps were recorded: {recorded[3]}"
    figure = f"{steps} steps, {len(plain[1])} tensors equal" if not reason else "differs"
    ctx.check(f"b-identical-{name}", not reason, figure, reason=reason)


Trained = tuple[torch.Tensor, dict[str, torch.Tensor], int, list[Any]]


def train(size: models.Size, device: str, steps: int, run: Path | None = None) -> Trained:
    """Losses, the state of model and optimizer, recorded steps and failures."""
    trainee = Trainee(size, device)
    with ExitStack() as stack:
        recorder = None
        if run is not None:
            recorder = stack.enter_context(
                mpdiag.record(trainee.model, trainee.optimizer, run, every=1, operations=1)
            )
        losses = torch.stack([trainee.step() for _ in range(steps)])
    state = {k: v.detach().clone() for k, v in trainee.model.state_dict().items()}
    for i, parameter in enumerate(trainee.model.parameters()):
        state |= {f"{k} of {i}": v for k, v in trainee.optimizer.state[parameter].items()}
    if recorder is None:
        return losses, state, 0, []
    return losses, state, recorder.steps_recorded, recorder.failures[:2]


def difference(one: Trained, other: Trained) -> str | None:
    """What differs first between two trainings; None if nothing does."""
    if not torch.equal(one[0], other[0]):
        return f"loss of step {int((one[0] != other[0]).nonzero()[0])}"
    return next((n for n, v in one[1].items() if not torch.equal(v, other[1][n])), None)


def compare_operations(ctx: Context, folder: Path) -> None:
    """The modules and lines of the operations of a step, on the device and on the CPU."""
    found = []
    for place in dict.fromkeys(("cpu", ctx.device)):
        trainee = Trainee(models.TINY["gpt"], place)
        run = folder / place
        with mpdiag.record(trainee.model, trainee.optimizer, run, every=1, operations=1):
            trainee.step()
            trainee.step()
        rows = mpdiag.open_run(run).operations()
        forward = [o for o in rows if o.phase == "forward"]
        found.append(
            (
                len(rows),
                {o.module for o in forward},
                sum(bool(o.file) for o in forward),
                len(forward),
            )
        )
    rows, modules, lined, forward = found[-1]
    held = rows > 0 and modules == found[0][1] and lined >= 0.9 * forward
    figure = f"{rows} operations, {len(modules)} modules, {lined} of {forward} with a line"
    reason = "" if held else f"on the CPU {found[0][0]} operations, {len(found[0][1])} modules"
    ctx.check("b-operations", held, figure, reason=reason)


# -- cost ------------------------------------------------------------------------------------------


def time_steps(ctx: Context) -> None:
    """Every promise of cost, of the models that fit any card."""
    sizes = ctx.sized(models.FULL, models.SMALL, models.TINY)
    tf32(on=True)
    torch.backends.cudnn.benchmark = True
    for name in NAMES:
        promises = [f"b-{what}-{name}" for what in ("every", "default", "memory")]
        with ctx.settling(*promises), ctx.folder() as folder:
            trainee = Trainee(sizes[name], ctx.device)
            time_model(ctx, name, trainee, folder, count=ctx.sized(8, 4, 1))
            del trainee
        free(ctx.device)
    for name in NAMES:  # last, for others' habits take the longest
        with ctx.settling(f"b-peers-{name}"), ctx.folder() as folder:
            trainee = Trainee(sizes[name], ctx.device)
            trainee.step()
            time_peers(ctx, name, trainee, folder)
            del trainee
        free(ctx.device)


def time_large(ctx: Context) -> None:
    """The promises of cost of the model that only a large card holds."""
    promises = [f"b-{what}-xl" for what in ("every", "default", "memory")]
    if ctx.cuda:
        there = torch.cuda.get_device_properties(0).total_memory / 2**30
        if there < LARGE_GIB:
            ctx.skip(f"needs {LARGE_GIB} GiB of memory; the card has {there:.0f}", *promises)
            return
    tf32(on=True)
    with ctx.settling(*promises), ctx.folder() as folder:
        sizes = models.FULL if ctx.cuda else models.TINY
        trainee = Trainee(sizes["xl"], ctx.device, fused=ctx.cuda)
        time_model(ctx, "xl", trainee, folder, count=ctx.sized(3, 3, 1))


def time_model(ctx: Context, name: str, trainee: Trainee, folder: Path, *, count: int) -> None:
    """Step times with and without a recorder, in turns on one model, and peak memory."""
    runs = itertools.count()
    trainee.step()
    trainee.step()
    with peak(ctx.device) as most:
        plain = [seconds_of(trainee.step, count, ctx.device)]
        without = most()

    def recorded(steps: int, warm: int, **options: Any) -> float:
        run = folder / f"{name}-{next(runs)}"
        with mpdiag.record(trainee.model, trainee.optimizer, run, operations=0, **options) as made:
            for _ in range(warm):
                trainee.step()
            taken = seconds_of(trainee.step, steps, ctx.device)
        if made.failures:
            message = f"recording failed: {made.failures[0]}"
            raise RuntimeError(message)
        return taken

    every = []
    with peak(ctx.device) as most:
        every.append(recorded(count, 2, every=1))
        with_recorder = most()
    weights = sum(p.numel() * p.element_size() for p in trainee.model.parameters())
    more = with_recorder - without
    figures = {"mib": round(more / 2**20), "weights_mib": round(weights / 2**20)}
    figures |= {"plain_peak_mib": round(without / 2**20)}
    figure = f"{mib(more)} more, of which the weights are {mib(weights)}; plain {mib(without)}"
    ctx.check(f"b-memory-{name}", more <= weights + MEMORY, figure, **figures)
    for _ in range(ctx.sized(2, 1, 1)):
        plain.append(seconds_of(trainee.step, count, ctx.device))
        every.append(recorded(count, 2, every=1))
    best, dear = sorted(plain)[len(plain) // 2], sorted(every)[len(every) // 2]
    same = apart(*plain)
    figures = {"plain_ms": round(1e3 * best, 2), "recorded_ms": round(1e3 * dear, 2)}
    figure = f"{ratio(dear / best)} of a step of {1e3 * best:.1f} ms (steps without: {same:.3f})"
    held = dear / best <= EVERY * same
    ctx.check(f"b-every-{name}", held, figure, ratio=dear / best, same=same, **figures)
    periods = ctx.sized(1 if name == "xl" else 3, 1, 0)
    if ctx.left < (periods * PERIOD + PERIOD) * best * 1.5 + PERIOD * (dear - best):
        ctx.skip("the part's time did not suffice", f"b-default-{name}")
        return
    sparse = recorded(max(1, periods * PERIOD), PERIOD if ctx.cuda else 2)
    plain.append(seconds_of(trainee.step, 2 * count, ctx.device))
    same = apart(best, plain[-1])
    best = (best + plain[-1]) / 2
    figure = f"{sparse / best:.3f} of a step, over {max(1, periods * PERIOD)} steps"
    held = sparse / best <= DEFAULT * same
    ctx.check(f"b-default-{name}", held, figure, ratio=sparse / best, same=same)


def time_peers(ctx: Context, name: str, trainee: Trainee, folder: Path) -> None:
    """The habits of others on the same model, each some steps, against recording every step."""
    promise = f"b-peers-{name}"
    found: dict[str, float] = {}
    said = []
    count = ctx.sized(3, 2, 1)
    found["plain"] = seconds_of(trainee.step, count, ctx.device)
    with mpdiag.record(trainee.model, trainee.optimizer, folder / "peers", every=1, operations=0):
        trainee.step()
        found["mpdiag, every step"] = seconds_of(trainee.step, count, ctx.device)
    for title, attach in (("torch.histc", histc), ("add_histogram", tensorboard)):
        values = 2 * sum(p.numel() for p in trainee.model.parameters())
        expected = HISTOGRAM_SECONDS * values if title == "add_histogram" else 20 * found["plain"]
        if expected > min(PATIENCE, ctx.left):
            said.append(f"{title} left out: a step would take some {expected:.0f} s")
            continue
        try:
            with ExitStack() as stack:
                attach(trainee, stack, folder)
                found[title] = seconds_of(
                    trainee.step, 1 if title == "add_histogram" else count, ctx.device
                )
        except ImportError as error:
            said.append(f"{title}: {error}")
        finally:
            trainee.after_backward = lambda: None
    ours = found["mpdiag, every step"]
    ratios = {k: round(v / found["plain"], 3) for k, v in found.items() if k != "plain"}
    others = [v for k, v in found.items() if k not in ("plain", "mpdiag, every step")]
    figure = ", ".join(f"{k} {ratio(v)}" for k, v in ratios.items())
    held = all(ours < v for v in others) if others else None
    ctx.check(promise, held, figure, reason="; ".join(said), ratios=ratios)


def histc(trainee: Trainee, stack: ExitStack, folder: Path) -> None:
    """Hooks with torch.histc of log2|x|: activation gradients and weight gradients."""

    def tally(t: torch.Tensor) -> None:
        torch.histc(t.detach().float().abs().log2(), bins=64, min=-50, max=14).cpu()

    def forward(module: nn.Module, args: Any, output: Any) -> None:
        for t in output if isinstance(output, tuple) else (output,):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(tally)

    for module in trainee.model.modules():
        stack.callback(module.register_forward_hook(forward).remove)

    def log() -> None:
        for p in trainee.model.parameters():
            if p.grad is not None:
                tally(p.grad)

    trainee.after_backward = log


def tensorboard(trainee: Trainee, stack: ExitStack, folder: Path) -> None:
    """SummaryWriter.add_histogram of every weight and weight gradient, every step."""
    from torch.utils.tensorboard import SummaryWriter

    writer = stack.enter_context(SummaryWriter(str(folder / "tensorboard")))

    def log() -> None:
        for name, p in trainee.model.named_parameters():
            writer.add_histogram(f"weights/{name}", p, trainee.step_index)
            if p.grad is not None:
                writer.add_histogram(f"gradients/{name}", p.grad, trainee.step_index)

    trainee.after_backward = log


__all__ = ["Trainee", "compare_bits", "difference", "in_turns", "time_large", "time_steps"]
