"""``mpdiag demo``: the whole workflow on a built-in workload, or on one from a file."""

import os
from pathlib import Path
from typing import Annotated

from typer import Option

from mpdiag.commands.shared.options import WorkloadArgument, refuse_file


def demo(
    workload: WorkloadArgument = "ssd",
    folder: Annotated[Path, Option(metavar="FOLDER", help="Where runs are kept.")] = Path("runs"),
    seed: Annotated[int, Option(metavar="N", help="Seed of weights and batches.")] = 0,
    steps: Annotated[
        int | None, Option(min=1, metavar="N", help="Steps of each training; fewer show less.")
    ] = None,
    no_masters: Annotated[
        bool, Option("--no-masters", help="Also train FP16 weights without FP32 masters.")
    ] = False,
    record_only: Annotated[bool, Option("--record-only", help="Stop after the analysis.")] = False,
    size: Annotated[
        str, Option(help="small (two CPU cores) or large (a GPU).", metavar="SIZE")
    ] = "small",
    device: Annotated[
        str, Option(metavar="DEVICE", help="Where to train: cpu, cuda, cuda:1 …")
    ] = "cpu",
) -> None:
    """Try it: record in FP32, analyze, train by the plan, compare. Takes a few minutes."""
    refuse_file(folder, "--folder")
    # Threads that wait sleep instead of spinning: on a busy machine that is five times as fast. It
    # is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from mpdiag.demo.workflow import run_demo

    run_demo(
        workload,
        folder,
        seed=seed,
        steps=steps,
        no_masters=no_masters,
        record_only=record_only,
        size=size,
        device=device,
    )
