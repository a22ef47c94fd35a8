"""Does FP16 without a loss scale lose, and does the plan restore it? Several seeds, paired.

    python studies/paper_effect.py [--workload ssd] [--seeds 3] [--json FILE]

The plan is made once, from the recording of the first seed, as a user would do it. Every training
leaves a run in --folder, so that ``mpdiag compare`` can be asked again.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import mpdiag
from mpdiag import workloads
from mpdiag.demo import workflow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="ssd")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    workload = workloads.load(options.workload)
    plan = None
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        with workflow.training_progress(Console(stderr=True, quiet=True)) as progress:
            run = options.folder / "fp32" / f"seed{seed}"
            setting = workflow.Setting(workload, seed, options.steps)
            outcomes = [workflow.record_fp32(setting, run, progress)]
            plan = plan or mpdiag.analyze(run).plan
            for variant in (workflow.NO_SCALE, workflow.BY_PLAN):
                place = options.folder / variant.suffix / f"seed{seed}"
                outcomes.append(workflow.train_variant(setting, place, plan, variant, progress))
        rows += [
            {"seed": seed, "way": o.title, "metric": o.metric, "skipped": o.skipped}
            for o in outcomes
        ]
        print(seed, {o.title: round(o.metric or 0, 4) for o in outcomes}, flush=True)
    assert plan is not None
    verdicts = {}
    for variant in (workflow.NO_SCALE, workflow.BY_PLAN):
        sides = options.folder / "fp32", options.folder / variant.suffix
        found = mpdiag.compare(*sides, metric=workload.metric)
        result = found.metrics[0].result
        verdicts[variant.title] = {
            "verdict": found.verdict,
            "difference": result.difference,
            "low": result.low,
            "high": result.high,
            "margin": result.margin,
            "seeds_to_decide": result.seeds_to_decide,
        }
        print(variant.title, verdicts[variant.title])
    if options.json:
        document = {
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "workload": options.workload,
            "metric": workload.metric,
            "loss_scale": plan.loss_scale.recommended,
            "rows": rows,
            "verdicts": verdicts,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
