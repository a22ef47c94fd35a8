"""Make the sample runs anew, or bring their stored analyses up to date.

    python sample_runs/make.py [--folder runs/families] [WORKLOAD ...]
    python sample_runs/make.py --plans
    python sample_runs/make.py --sensitivity [WORKLOAD ...]
    python sample_runs/make.py --gpu

The first trains each workload from seed 0 in FP32, recorded, in FP16 without a loss scale and in FP16
by the plan, as ``studies/families.py --seeds 1`` does; what that command left in --folder is taken as it
is. Statistics of the FP16 trainings stay behind, for size. The second analyzes every recording in
``sample_runs`` again and writes its ``plan.json``, and its ``comparison.json`` where the training by
the plan beside it was by this plan. The third trains each workload in FP32 once more
and measures, with the weights it ends with, how sensitive each operation is (``sensitivity.json``).
The fourth writes the trace of a GPU that no GPU recorded, by ``studies/gpu_sample.py``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpdiag import analyze, compare, measure_sensitivity, workloads
from mpdiag.analysis.verdict.trained import stored_comparison
from mpdiag.demo import workflow
from mpdiag.files.atomic import write_json
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.results import COMPARISON, write_comparison
from mpdiag.workloads.protocol import start
from studies import families, gpu_sample

SAMPLES = Path(__file__).resolve().parent
WAYS = {"fp32": "", "fp16-no-scale": "-fp16-no-scale", "fp16-plan": "-fp16-plan"}
JOURNAL = (
    "mpdiag state created updated argv device versions seeds model optimizers steps_seen training"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=families.EVERY, metavar="WORKLOAD")
    parser.add_argument("--folder", type=Path, default=Path("runs/families"))
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--sensitivity", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    if options.gpu:
        gpu_sample.write(SAMPLES / "gpu-sample")
        return
    if options.sensitivity:
        for name in options.names:
            measure(name)
        return
    if options.plans:
        for stats in sorted(SAMPLES.glob("*/stats")):
            judge(stats.parent)
        return
    for name in options.names:
        make(name, options.folder)


def judge(run: Path) -> None:
    """The analysis of a recording, as its plan, after how the training by this plan compares."""
    decisions, trained = analyze(run).plan.digest(), run.with_name(f"{run.name}-fp16-plan")
    (run / COMPARISON).unlink(missing_ok=True)
    if trained.is_dir():
        stored = stored_comparison(compare(run, trained), trained)
        if stored is not None and stored.decisions == decisions:
            write_comparison(run, stored)
    analyze(run).plan.save(run / "plan.json")


def make(name: str, folder: Path) -> None:
    """One workload's three runs."""
    workload = workloads.load(name)
    families.fix_settings(folder / name, workload, None)
    with workflow.training_progress(Console(stderr=True)) as progress:
        for way, suffix in WAYS.items():
            cell = families.FamilyTraining(workload, folder / name, way, 0, workload.default_steps)
            families.train_if_missing(cell, progress)
            keep(cell.run, SAMPLES / f"{name}{suffix}", recording=way == "fp32", name=name)
    judge(SAMPLES / name)
    measure(name)


def measure(name: str) -> None:
    """The sensitivities of one workload, at the end of its FP32 training from seed 0."""
    workload = workloads.load(name)
    session = start(workload, seed=0)
    session.run()
    plan = PrecisionPlan.load(SAMPLES / name / "plan.json")
    batch = next(workload.batches(1, 0))
    found = measure_sensitivity(
        session.model,
        lambda: next(workload.losses(session.model, batch)),
        SAMPLES / name,
        fmt=plan.target,
        scale=plan.loss_scale.recommended,
    )
    print(name, len(found.operations), "operations measured")


def keep(run: Path, place: Path, *, recording: bool, name: str) -> None:
    """Copy a run, with the command that makes it in place of the one that happened to."""
    shutil.rmtree(place, ignore_errors=True)
    unwanted = () if recording else ("stats", "modules", "operations")
    shutil.copytree(run, place, ignore=shutil.ignore_patterns(*unwanted))
    meta: dict[str, Any] = json.loads((place / "meta.json").read_text(encoding="utf-8"))
    meta["argv"] = ["python", "sample_runs/make.py", name]
    if not recording:
        plan = PrecisionPlan.load(place / "plan.json")
        meta["training"] = {
            "level": plan.level,
            "dtype": plan.target,
            "backend": "emulated",
            "loss_scale": plan.loss_scale.method,
        }
        meta = {k: v for k, v in meta.items() if k in ("schema_version", *JOURNAL.split())}
    write_json(place / "meta.json", meta)


if __name__ == "__main__":
    main()
