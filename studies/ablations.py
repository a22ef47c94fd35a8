"""What each of the three techniques is for: take one away at a time. Several seeds, paired.

    python studies/ablations.py --folder runs/families [--seeds 3] [--json FILE] [CELL ...]

A cell is ``WORKLOAD:WAY``, or ``WORKLOAD,OPTION=VALUE,steps=N:WAY`` for a workload of other settings,
which gets a folder of its own.

Ways: ``fp16-no-scale`` (no loss scale), ``fp16-no-masters`` (FP16 weights updated directly, beside
``fp16-o2``, the same with FP32 masters), ``fp16-sums`` (matrix products and reductions added up in
FP16). The plan's own training, ``fp16-plan``, must repair each. A folder that ``families.py``
filled is taken on from there: what is done is not done again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpdiag import workloads
from mpdiag.demo import workflow
from mpdiag.runs import provenance
from mpdiag.runs.run import now
from studies import families

DEFAULT = (
    "language_model:fp16-no-scale",
    "ssd:fp16-no-scale",
    "vgg:fp16-no-masters",
    # A hundredth of the rate, five times the steps: updates far below the weights' last digits.
    "vgg,learning_rate=0.0003,steps=1500:fp16-no-masters",
    "language_model:fp16-sums",
    "vit:fp16-sums",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", default=DEFAULT, metavar="CELL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with workflow.training_progress(Console(stderr=True)) as progress:
        for cell in options.cells:
            rows.append(ablate(options.folder, cell, options.seeds, progress))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        document = {
            "date": now(),
            "device": provenance.device(None),
            "versions": provenance.versions(),
            "seeds": options.seeds,
            "ablations": rows,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def parse(cell: str) -> tuple[str, str, dict[str, Any], int | None]:
    """A cell's workload, way, options and steps."""
    described, _, way = cell.partition(":")
    name, *settings = described.split(",")
    given = dict(setting.split("=", 1) for setting in settings)
    steps = int(given.pop("steps")) if "steps" in given else None
    return name, way, {key: number_or_word(value) for key, value in given.items()}, steps


def number_or_word(text: str) -> Any:
    """JSON where it is that, else the word itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def ablate(folder: Path, cell: str, seeds: int, progress: Any) -> dict[str, Any]:
    """Train a workload in FP32, by the plan and one technique short, and compare."""
    name, way, options, steps = parse(cell)
    workload = workloads.load(name, **options)
    place = folder / cell.partition(":")[0]
    families.fix_settings(place, workload, steps)
    count = workload.default_steps if steps is None else steps
    logs: dict[str, list[Any]] = {}
    for kind in ("fp32", "fp16-plan", way):
        cells = [
            families.FamilyTraining(workload, place, kind, seed, count) for seed in range(seeds)
        ]
        for cell in cells:
            families.train_if_missing(cell, progress)
        logs[kind] = [cell.log() for cell in cells]
    reference = families.metrics_of(workload, logs["fp32"])
    spread = statistics.stdev(reference) if len(reference) > 1 else math.nan
    sides = {
        kind: families.way_result(workload, reference, logs[kind]) for kind in (way, "fp16-plan")
    }
    worse = sides[way].difference * (-1 if workload.higher_is_better else 1)
    hurt: bool | None = math.isnan(worse) or worse > max(workload.margin, 2 * spread)
    if len(reference) < 2:  # the spread of seeds is not known
        hurt = None
    document = {
        "workload": name,
        "options": options,
        "steps": count,
        "way": way,
        "metric": workload.metric,
        "higher_is_better": workload.higher_is_better,
        "margin": workload.margin,
        "fp32": list(reference),
        "spread_of_seeds": spread,
        "hurt_beyond_spread": hurt,
        "without": dataclasses.asdict(sides[way]),
        "by_the_plan": dataclasses.asdict(sides["fp16-plan"]),
    }
    return json.loads(json.dumps(document, allow_nan=True).replace("NaN", "null"))


if __name__ == "__main__":
    main()
