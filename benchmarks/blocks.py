"""What block formats cost: an emulated step over one in BF16, and a recording with operands.

    python benchmarks/blocks.py --part recorded [--steps 200] [--json FILE]
    python benchmarks/blocks.py --part emulated --workload transformer cnn --steps 10

The copies of a model take turns step by step; all figures are processor time. An emulated step is a
ratio of minima. A recording is a ratio of whole trainings of ``--steps`` steps, from before the
recorder is made to after its folder is closed.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

from machine import machine
from recording import WORKLOADS, plain, recorded
from recording import Trainee as Recorded
from torch import nn
from training import PLAN, Trainee, show, step_times

import mpdiag
from mpdiag.numerics.block_recipes import BLOCK_RECIPES
from mpdiag.plan import BlockLayer, BlockPlan, LossScalePlan


class Emulated(Trainee):
    """Every linear layer and convolution by a recipe; BF16 alone without one."""

    def prepare(self, recipe: str = "") -> None:
        kinds = {nn.Linear: "linear", nn.Conv2d: "convolution"}
        layers = tuple(
            BlockLayer(name, "weight", kind, *[recipe] * 3)
            for name, module in self.model.named_modules()
            for base, kind in kinds.items()
            if isinstance(module, base)
        )
        blocks = BlockPlan(recipe, BLOCK_RECIPES[recipe].formats(), layers) if recipe else None
        plan = replace(PLAN, target="bf16", loss_scale=LossScalePlan(), blocks=blocks)
        self.mp = mpdiag.MixedPrecision(self.model, self.optimizer, plan, backend="emulated")

    def train(self) -> None:
        with self.mp.autocast():
            loss = self.loss()
        self.mp.step(loss)


def emulated(workload: str, steps: int) -> dict[str, float]:
    """A step in each recipe over one in BF16."""
    recipes = ("", "mxfp8", "fp8-tensor", "nvfp4")
    trainees: dict[str, Trainee] = {r: Emulated(workload, "cpu", recipe=r) for r in recipes}
    times = step_times(trainees, steps, time.process_time)
    least = {name: min(values) for name, values in times.items()}
    ratios = {f"{r} / BF16": least[r] / least[""] for r in recipes[1:]}
    return {**ratios, "BF16 step, ms": 1e3 * least[""]}


def recordings(workload: str, steps: int) -> dict[str, float]:
    """Trainings that are recorded, with and without operands, over one that is not."""
    variants = {
        "plain": plain,
        "operations": recorded(),
        "operations and blocks": recorded(blocks=True),
    }
    total: defaultdict[str, float] = defaultdict(float)
    trainees = {name: Recorded(workload, "cpu", time.process_time) for name in variants}
    stacks = {name: ExitStack() for name in variants}
    for name, attach in variants.items():
        begin = time.process_time()
        place = stacks[name].enter_context(tempfile.TemporaryDirectory())
        attach(trainees[name], stacks[name], Path(place))
        total[name] += time.process_time() - begin
    for _ in range(steps):
        for name, trainee in trainees.items():
            begin = time.process_time()
            trainee.step()
            total[name] += time.process_time() - begin
    for name, stack in stacks.items():
        begin = time.process_time()
        stack.close()
        total[name] += time.process_time() - begin
    seconds = total.pop("plain")
    ratios = {f"{name} / plain": whole / seconds for name, whole in total.items()}
    return {**ratios, "plain step, ms": 1e3 * seconds / steps}


PARTS = {"emulated": emulated, "recorded": recordings}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", nargs="*", choices=[*WORKLOADS], default=["transformer"])
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--part", nargs="*", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = machine(clock="processor")
    for workload, part in product(options.workload, options.part):
        title = f"{workload}, {part}, {options.steps} steps"
        results[title] = figures = PARTS[part](workload, options.steps)
        show(title, figures)
        if options.json:
            kept = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
            options.json.write_text(json.dumps(kept | results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
