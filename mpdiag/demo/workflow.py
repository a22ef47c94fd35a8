"""``mpdiag demo``: the whole workflow on real data, from an FP32 training to a verdict.

Record in FP32, analyze, then train again from the same seed in FP16 without a loss scale and in FP16
by the plan. Every training leaves a run, so the figures can be looked at afterwards.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mpdiag import workloads
from mpdiag.analysis.analyzer import analyze
from mpdiag.demo.outcomes import Outcome, demo_text
from mpdiag.demo.side_by_side import train_at_once
from mpdiag.errors import TrainingDiverged, UsageError
from mpdiag.recording.counting.host import prepare
from mpdiag.recording.recorder import record
from mpdiag.reports import terminal
from mpdiag.reports.machine import processor_cores
from mpdiag.reports.text.analysis import after_analysis, gradients_picture, summary_text
from mpdiag.runs.run import free_name
from mpdiag.runs.training_log import LogWriter, Metric, TrainingStep
from mpdiag.training.options import PrecisionOverrides
from mpdiag.training.trainer import MixedPrecision
from mpdiag.workloads.protocol import mixed_step, start

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mpdiag.demo.side_by_side import Bars
    from mpdiag.plan import PrecisionPlan
    from mpdiag.workloads.protocol import Session, Workload


_WORTH_PROCESSES = 10.0
"""Seconds of a training from which starting a process, some seconds itself, pays."""


@dataclass(frozen=True)
class Variant:
    """A way to train: its title, the suffix of its run folder, and what overrides the plan."""

    title: str
    suffix: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all ways to train share: the same data, weights and batches.

    Attributes:
        workload: What is trained.
        seed: Decides weights and batches.
        steps: Of the training; None: the workload's own number.
        device: Where, as torch names it.
    """

    workload: Workload
    seed: int = 0
    steps: int | None = None
    device: str = "cpu"

    def start(self) -> Session:
        """A new training, just before its first step."""
        return start(self.workload, seed=self.seed, steps=self.steps, device=self.device)


NO_SCALE = Variant(
    "FP16, no loss scale", "fp16-no-scale", {"overrides": PrecisionOverrides(loss_scale=1.0)}
)
BY_PLAN = Variant("FP16 by the plan", "fp16-plan", {})
NO_MASTERS = Variant(
    "FP16 weights, no FP32 masters",
    "fp16-no-masters",
    {"level": "O2", "overrides": PrecisionOverrides(master_weights=False)},
)


def run_demo(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    no_masters: bool = False,
    record_only: bool = False,
    size: str = "small",
    device: str = "cpu",
) -> Path:
    """Train a workload three ways and print the verdict.

    Args:
        name: A built-in workload, or a file that defines one.
        folder: Where runs are kept; the runs get names that are free there.
        seed: Decides weights and batches, the same for every way.
        steps: Steps of each training; default: the workload's own number.
        no_masters: Also train with FP16 weights and no FP32 masters.
        record_only: Stop after the analysis.
        size: ``small`` or ``large``.
        device: Where to train, as torch names it.

    Returns:
        The folder of the recorded run, with ``plan.json`` in it.

    Raises:
        UsageError: If there is no such workload, size or device.
        DamagedWorkload: If the workload's file cannot be used.
    """
    options = {} if size == "small" else {"size": size}  # every workload's default, if it has sizes
    workload = workloads.load(name, **options)
    require_device(device)
    run = free_name(folder, workload.name)
    console = Console(stderr=True)
    console.print(f"{workload.title}: {workload.summary}", highlight=False)
    setting = Setting(workload, seed, steps, device)
    with console.status(
        "Loading the counting kernels; the first time they are compiled, for some 20 s"
    ):
        prepare()
    with training_progress(console) as progress:
        fp32 = record_fp32(setting, run, progress)
        analysis = analyze(run)
        analysis.plan.save(run / "plan.json")
        variants = [] if record_only else [NO_SCALE, BY_PLAN, *([NO_MASTERS] if no_masters else [])]
        trainings = [
            (setting, free_name(folder, f"{run.name}-{variant.suffix}"), analysis.plan, variant)
            for variant in variants
        ]
        if len(trainings) > 1 and fp32.seconds >= _WORTH_PROCESSES and _is_free(device):
            trained = train_at_once(train_variant, trainings, progress)
        else:
            trained = [train_variant(*training, progress) for training in trainings]
        outcomes = [fp32, *trained]
    terminal.show(*summary_text(analysis), "", *gradients_picture(analysis))
    if variants:
        terminal.show("", demo_text(workload.metric, workload.higher_is_better, outcomes, analysis))
    terminal.name_next(*after_analysis(analysis, run))
    return run


def _is_free(device: str) -> bool:
    """Whether several trainings can run at the same time without waiting for one another."""
    return device == "cpu" and processor_cores() > 1


def require_device(device: str) -> None:
    """Refuse a device that torch cannot use.

    Raises:
        UsageError: With the reason.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        message = f"cannot train on device {device!r}: {reason}"
        raise UsageError(message) from error


def record_fp32(
    setting: Setting, run: Path, progress: Bars, title: str = "FP32, recording"
) -> Outcome:
    """The FP32 training, with a recorder attached."""
    session, workload = setting.start(), setting.workload
    task = progress.add_task(title, total=session.steps, loss=0.0)
    began = time.perf_counter()
    losses: list[float] = []
    with closing(LogWriter(run)) as log:
        with record(session.model, list(session.optimizers), run):

            def advance(step: int, loss: float) -> None:
                losses.append(loss)
                log.append(TrainingStep(step, loss, 1.0))
                progress.update(task, completed=step + 1, loss=loss)

            session.run(on_step=advance)
        seconds = time.perf_counter() - began
        metric = session.evaluate()
        log.append(Metric(workload.metric, metric, workload.higher_is_better))
    return Outcome("FP32", run, metric, losses[-1], 0, session.steps, seconds)


def train_variant(
    setting: Setting,
    run: Path,
    plan: PrecisionPlan,
    variant: Variant,
    progress: Bars,
    *,
    observed: bool = False,
) -> Outcome:
    """One mixed-precision training from the same seed; ``observed``: recorded while it trains."""
    session, workload = setting.start(), setting.workload
    task = progress.add_task(variant.title, total=session.steps, loss=0.0)
    losses: list[float] = []
    stopped = ""

    def advance(step: int, loss: float) -> None:
        losses.append(loss)
        progress.update(task, completed=step + 1, loss=loss)

    with ExitStack() as stack:
        if observed:  # first: the trainer's log joins a recording, not the reverse
            stack.enter_context(record(session.model, list(session.optimizers), run))
        try:
            trainer = stack.enter_context(
                MixedPrecision(
                    session.model, session.optimizers, plan, run=run, **dict(variant.options)
                )
            )
        except UsageError as error:
            return Outcome(variant.title, None, None, None, 0, 0, 0.0, str(error))
        began = time.perf_counter()
        try:
            session.run(on_step=advance, take_step=mixed_step(trainer))
        except TrainingDiverged as error:
            stopped = str(error)
            if trainer.run_log is not None:
                trainer.run_log.note({"stopped": stopped})
        seconds = time.perf_counter() - began
        metric = session.evaluate()
        trainer.log_metric(workload.metric, metric, higher_is_better=workload.higher_is_better)
    last = losses[-1] if losses else None
    return Outcome(
        variant.title, run, metric, last, trainer.skipped, trainer.steps, seconds, stopped
    )


def training_progress(console: Console) -> Progress:
    """A bar for each training: its name, its steps, the last loss."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=console,
    )
