"""(i) ``mpdiag demo NAME --size large``: workloads at sizes that a CPU cannot train."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_sections import programs
from gpu_sections.promises import of_part
from gpu_sections.runner import has

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_sections.child import Context

STEPS = {"language_model": 40, "ssd": 100, "gpt": 20, "digits": 60, "vit": 30}
SHARE = 0.5
"""Of the time that is left, what one workload may take."""
ALIKE = 0.1
"""By how much of FP32's the mean loss of the last steps may be off: so few steps say little by their
metric, which a workload's margin allows for after a whole training."""


def train(ctx: Context) -> None:
    """As many workloads as the time allows, in the order of the promises."""
    for promise in of_part("i-families"):
        name = promise.id.removeprefix("i-")
        if not ctx.cuda and name != "gpt":
            ctx.skip("a rehearsal trains one workload", promise.id)
        elif name != "language_model" and name != "gpt" and not has("sklearn"):
            ctx.skip("its data comes with scikit-learn", promise.id)
        elif ctx.left < 12:
            ctx.skip("the section's time did not suffice: add --minutes 30", promise.id)
        else:
            with ctx.settling(promise.id), ctx.folder() as folder:
                demonstrate(ctx, promise.id, name, folder)


def demonstrate(ctx: Context, promise: str, name: str, folder: Path) -> None:
    """Run the command, and compare the metrics in the runs it leaves."""
    from mpdiag import workloads

    size = ctx.sized("large", "large", "small")
    steps = STEPS[name] if ctx.cuda else 2
    options = ("--folder", folder, "--size", size, "--device", ctx.device, "--steps", steps)
    limit = max(12.0, SHARE * ctx.left) if ctx.cuda else ctx.left
    ran = programs.run(programs.mpdiag("demo", name, *options), limit, folder)
    if ran.code is None:
        ctx.skip(f"three trainings of {steps} steps took longer than {limit:.0f} s", promise)
        return
    ran.expect_success()
    logs = {run.name: log_of(run) for run in sorted(folder.iterdir()) if run.is_dir()}
    judge(ctx, promise, steps, workloads.load(name).margin, logs)


@dataclass(frozen=True)
class Log:
    """What a training's log holds.

    Attributes:
        metric: The workload's metric at the end; None if it was not measured.
        losses: Of each step; NaN where there was none.
        stopped: Why the training ended early; empty if it did not.
    """

    metric: float | None
    losses: tuple[float, ...]
    stopped: str = ""

    @property
    def last(self) -> float:
        """Mean loss of the last fifth of the steps, those without a loss left out."""
        end = self.losses[-max(1, len(self.losses) // 5) :]
        known = [loss for loss in end if math.isfinite(loss)]
        return sum(known) / len(known) if known else math.nan


def judge(ctx: Context, promise: str, steps: int, margin: float, logs: dict[str, Log]) -> None:
    """FP32 against the plan: by the loss of the last steps, or by the metric.

    Raises:
        RuntimeError: If a training left no log.
    """
    name = promise.removeprefix("i-")
    fp32, plan, bare = (logs.get(f"{name}{end}") for end in ("", "-fp16-plan", "-fp16-no-scale"))
    if fp32 is None or plan is None or fp32.metric is None or plan.metric is None:
        message = f"the runs {', '.join(logs)} hold no metric of FP32 and of the plan"
        raise RuntimeError(message)
    by_loss = abs(plan.last - fp32.last) <= ALIKE * abs(fp32.last)
    by_metric = abs(plan.metric - fp32.metric) <= margin
    ways = {"FP32": fp32, "by the plan": plan, "without a scale": bare}
    figure = ", ".join(
        f"{way} {log.metric:.4g} (loss {log.last:.4g})"
        for way, log in ways.items()
        if log is not None and log.metric is not None
    )
    figures = {"steps": steps, "margin": margin, "losses": {k: v.last for k, v in logs.items()}}
    figures["metrics"] = {k: v.metric for k, v in logs.items()}
    held = not plan.stopped and (by_loss or by_metric)
    ctx.check(promise, held, f"{figure}; margin {margin:g}", reason=plan.stopped, **figures)


def log_of(run: Path) -> Log:
    """The metric and the losses in a run's log; empty if there is none."""
    path = run / "training.jsonl"
    if not path.exists():
        return Log(None, ())
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    values = [line["value"] for line in lines if "metric" in line]
    losses = [line["loss"] for line in lines if "step" in line and "loss" in line]
    known = tuple(math.nan if loss is None else float(loss) for loss in losses)
    stopped = "".join(str(line["stopped"]) for line in lines if "stopped" in line)
    return Log(float(values[-1]) if values else None, known, stopped)
