"""(i) ``mpdiag demo NAME --size large``: workloads at sizes that a CPU cannot train."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpu_sections import programs
from gpu_sections.promises import of_part
from gpu_sections.runner import has

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_sections.child import Context

STEPS = {"language_model": 40, "ssd": 100, "gpt": 20, "digits": 60, "vit": 30}
SHARE = 0.5
"""Of the time that is left, what one workload may take."""


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
    found = {run.name: metric_of(run) for run in sorted(folder.iterdir()) if run.is_dir()}
    fp32, plan = found.get(name), found.get(f"{name}-fp16-plan")
    bare = found.get(f"{name}-fp16-no-scale")
    margin = workloads.load(name).margin
    if fp32 is None or plan is None:
        message = f"the runs {', '.join(found)} hold no metric of FP32 and of the plan"
        raise RuntimeError(message)
    held = abs(fp32 - plan) <= margin
    figure = f"FP32 {fp32:.4g}, by the plan {plan:.4g}, without a scale {bare or float('nan'):.4g}"
    figures: dict[str, Any] = {"steps": steps, "margin": margin, "metrics": found}
    ctx.check(promise, held, f"{figure}; margin {margin:g}", **figures)


def metric_of(run: Path) -> float | None:
    """The metric in a run's log; None if it holds none."""
    log = run / "training.jsonl"
    if not log.exists():
        return None
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    values = [line["value"] for line in lines if "metric" in line]
    return values[-1] if values else None
