"""``mpdiag demo``: the main job on real data, from training to verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mpdiag import workloads
from mpdiag.analysis.analyzer import analyze
from mpdiag.recording.recorder import record
from mpdiag.reports import terminal, text
from mpdiag.runs import free_name
from mpdiag.workloads.protocol import start

if TYPE_CHECKING:
    from pathlib import Path


def run_demo(name: str, folder: Path) -> Path:
    """Train a workload in FP32 with a recorder attached, analyze it, print the verdict.

    Args:
        name: A workload.
        folder: Where runs are kept; the run gets a name that is free there.

    Returns:
        The run folder, with ``plan.json`` in it.

    Raises:
        UsageError: If there is no such workload.
    """
    workload = workloads.load(name)
    run = free_name(folder, name)
    console = Console(stderr=True)
    console.print(f"{workload.title}: {workload.summary}", highlight=False)
    session = start(workload)
    with _progress(console) as progress:
        task = progress.add_task("training in FP32, recording", total=session.steps, loss=0.0)

        def advance(step: int, loss: float) -> None:
            progress.update(task, completed=step + 1, loss=loss)

        with record(session.model, session.optimizer, run):
            session.run(on_step=advance)
    metric = session.evaluate()
    console.print(f"{workload.metric} in FP32: {metric:.3f}", highlight=False)
    analysis = analyze(run)
    analysis.plan.save(run / "plan.json")
    terminal.show(text.analysis_text(analysis))
    terminal.name_next(text.after_analysis(analysis, run))
    return run


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=console,
    )
