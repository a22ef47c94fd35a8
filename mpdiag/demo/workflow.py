"""``mpdiag demo``: the whole workflow on real data, from an FP32 training to a verdict.

Record in FP32, analyze, then train again from the same seed in FP16 without a loss scale and in FP16
by the plan. Every training leaves a run, so the figures can be looked at afterwards.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from mpdiag import workloads
from mpdiag.analysis.analyzer import Analysis, analyze
from mpdiag.analysis.comparison.comparison_findings import Answer, one_seed_answer
from mpdiag.analysis.comparison.margins import default_margin, known_margin
from mpdiag.errors import TrainingDiverged, UsageError
from mpdiag.plan import PrecisionPlan
from mpdiag.recording.counting.host import prepare
from mpdiag.recording.recorder import record
from mpdiag.reports import next_commands, terminal
from mpdiag.reports.text.analysis import after_analysis, gradients_picture, summary_text
from mpdiag.reports.text.tables import Fitted
from mpdiag.runs.results import add_to_meta
from mpdiag.runs.run import free_name
from mpdiag.runs.training_log import FINAL_LOSS, LogWriter, Metric, TrainingStep, final_loss
from mpdiag.training.options import PrecisionOverrides
from mpdiag.training.trainer import MixedPrecision
from mpdiag.workloads.protocol import Session, Workload, mixed_step, start


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
        "Loading the counting kernels (compiling them takes about 20 s the first time)"
    ):
        prepare()
    with training_progress(console) as progress:
        fp32 = record_fp32(setting, run, progress)
        analysis = analyze(run)
        analysis.plan.save(run / "plan.json")
        variants = [] if record_only else [NO_SCALE, BY_PLAN, *([NO_MASTERS] if no_masters else [])]
        outcomes = [fp32]
        for variant in variants:
            place = free_name(folder, f"{run.name}-{variant.suffix}")
            outcomes.append(train_variant(setting, place, analysis.plan, variant, progress))
    terminal.show(*summary_text(analysis), "", *gradients_picture(analysis))
    if variants:
        terminal.show("", demo_text(workload.metric, workload.higher_is_better, outcomes, analysis))
    planned = outcomes[2].run if variants else None
    if planned is None:
        terminal.name_next(*after_analysis(analysis, run))
    else:
        terminal.name_next(*next_commands.compare_them(run, planned))
    return run


def require_device(device: str) -> None:
    """Refuse a device that torch cannot use.

    Raises:
        UsageError: With the reason.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UsageError(f"cannot train on device {device!r}: {reason}") from error


def record_fp32(
    setting: Setting, run: Path, progress: Progress, title: str = "FP32, recording"
) -> "Outcome":
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
    margin = getattr(workload, "margin", None)  # a workload of yours may have none
    if margin is not None:
        add_to_meta(run, margins={workload.metric: margin})
    return Outcome("FP32", run, metric, final_loss(losses), 0, session.steps, seconds)


def train_variant(
    setting: Setting,
    run: Path,
    plan: PrecisionPlan,
    variant: Variant,
    progress: Progress,
    *,
    observed: bool = False,
) -> "Outcome":
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
    final = final_loss(losses)
    return Outcome(
        variant.title, run, metric, final, trainer.skipped, trainer.steps, seconds, stopped
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


@dataclass(frozen=True)
class Outcome:
    """The result of one way to train.

    Attributes:
        title: Its name.
        run: Its run folder; None if it never began.
        metric: On held-out data; None if it never began.
        loss: As ``final_loss`` has it.
        skipped, steps: Steps skipped, and all of them.
        seconds: Wall time of the steps.
        stopped: Why it stopped early or never began; empty if it finished.
    """

    title: str
    run: Path | None
    metric: float | None
    loss: float | None
    skipped: int
    steps: int
    seconds: float
    stopped: str = ""


def demo_text(
    metric: str, higher_is_better: bool, outcomes: Sequence[Outcome], analysis: Analysis
) -> RenderableType:
    """The ways to train as a table, and the verdict.

    Args:
        metric: Its name, with the unit.
        higher_is_better: Whether more is better.
        outcomes: FP32 first, then without a scale, then by the plan, then others.
        analysis: The analysis of the recording.
    """
    numbers = (metric, FINAL_LOSS, "skipped", "seconds")
    table = Fitted(
        ("training", *numbers, "run"), "Trained from the same seed", right=frozenset(numbers)
    )
    for o in outcomes:
        table.add_row(
            o.title,
            _figure(o.metric),
            _figure(o.loss),
            f"{o.skipped} of {o.steps}" if o.steps else "–",
            f"{o.seconds:.1f}",
            str(o.run) if o.run else "–",
        )
    verdict, style = judge(metric, higher_is_better, outcomes, analysis)
    notes = [Text(f"{o.title}: {o.stopped}", style="yellow") for o in outcomes if o.stopped]
    return Group(table, *notes, Text(""), Text(verdict, style=style))


def judge(
    metric: str, higher_is_better: bool, outcomes: Sequence[Outcome], analysis: Analysis
) -> tuple[str, str]:
    """The verdict from one seed in a few sentences, and its style."""
    fp32, bare, planned = outcomes[:3]
    own = (analysis.run.meta.get("margins") or {}).get(metric)
    without, with_plan = (_answer(o, fp32, metric, higher_is_better, own) for o in (bare, planned))
    scale = analysis.plan.loss_scale
    full, plan = _figure(fp32.metric), _figure(planned.metric)
    figures = f"{metric} {_figure(bare.metric)} against {full}"
    if "undecided (one seed)" in (without, with_plan):
        first = f"One seed does not decide: {figures} without a loss scale, {plan} by the plan."
        return f"{first} Train several, then mpdiag compare.", "bold yellow"
    hurt, kept = without == "worse (one seed)", with_plan != "worse (one seed)"
    if hurt and kept:
        first = f"FP16 without a loss scale loses: {figures}. The plan restores it: {plan}."
    elif not hurt and kept:
        first = f"FP16 loses nothing here, with a loss scale or without: {figures}."
    elif hurt:
        first = f"FP16 loses with the plan as well: {metric} {plan} against {full}."
    else:
        first = f"FP16 trains without a loss scale, but not by the plan: {plan}."
    said = {
        "needed": "The recording said that a loss scale is needed",
        "advisable": "The recording said that a loss scale is advisable",
        "not needed": "The recording said that no loss scale is needed",
        "unknown": "The recording could not say whether one is needed",
    }[scale.need]
    right = hurt == (scale.need == "needed")
    second = f"{said}{'' if right else ', which this training does not confirm'}."
    third = "One seed is no proof: train several, then mpdiag compare."
    return f"{first} {second} {third}", "bold green" if kept and right else "bold yellow"


def _answer(
    one: Outcome, reference: Outcome, metric: str, higher_is_better: bool, own: object
) -> Answer:
    """What ``mpdiag compare`` would answer, with the margin ``own`` of the run or the metric's kind."""
    if one.metric is None or reference.metric is None or not math.isfinite(one.metric):
        return "worse (one seed)"
    margin = known_margin(own, ()) or default_margin(
        metric, [reference.metric], [one.metric], higher_is_better=higher_is_better
    )
    worse = reference.metric - one.metric if higher_is_better else one.metric - reference.metric
    return one_seed_answer(worse / margin.width)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
