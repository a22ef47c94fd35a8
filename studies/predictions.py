"""What the FP32 recording foretells, against what the FP16 training then showed.

    python studies/predictions.py [--workload ssd digits denoiser] [--steps 60] [--json FILE]

Each workload is recorded in FP32 and analyzed. Then it is trained again from the same seed in FP16
(emulated on a CPU) and recorded at the same steps: without a loss scale, by the plan at the scale it
chose, and for one step at a scale far too high. Predicted is what the FP32 histograms, shifted by
the scale of each step, say FP16 makes 0 or infinite; observed is how many values that were none in
FP32 were 0, infinite or NaN. Tensors that the FP16 run held in FP32 are left out.

Observed includes what is passed on: a gradient lost in one layer is missing in all before it, one
infinity becomes many, and weights drift apart from step to step.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import mpdiag
from mpdiag import workloads
from mpdiag.analysis.layers import Layers, merge_layers, share
from mpdiag.numerics.formats import FP16
from mpdiag.workloads.protocol import mixed_step, start

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.runs.run import Run
    from mpdiag.workloads.protocol import Batch, Session, Workload

KINDS = ("activation", "activation_grad")


@dataclass(frozen=True)
class Outcome:
    """Predicted and observed, for one kind of tensors of one training.

    Attributes:
        values: Non-zero values of the FP32 recording that were compared.
        predicted_lost, observed_lost: Shares of them that are 0 in FP16.
        layers: How many layers.
        worst_layer, worst_difference: Where the two shares differ most, and by how much.
        predicted_overflow, observed_overflow: Shares of finite values that become infinite or NaN.
    """

    values: int
    predicted_lost: float
    observed_lost: float
    layers: int
    worst_layer: str
    worst_difference: float
    predicted_overflow: float
    observed_overflow: float


def record_fp32(workload: Workload, run: Path, steps: int, every: int) -> Run:
    session = start(workload, steps=steps)
    with mpdiag.record(session.model, list(session.optimizers), run, every=every, operations=0):
        session.run()
    return mpdiag.open_run(run)


def record_fp16(
    workload: Workload,
    run: Path,
    plan: Any,
    steps: int,
    every: int,
    overrides: mpdiag.PrecisionOverrides,
) -> tuple[Run, list[float], list[int]]:
    """The run, the loss scale of every step, and the steps that were skipped."""
    session = start(workload, steps=steps)
    scales: list[float] = []
    skipped: list[int] = []
    with mpdiag.MixedPrecision(
        session.model, session.optimizers, plan, overrides=overrides
    ) as trainer:
        one = mixed_step(trainer)

        def take_step(at: Session, batch: Batch) -> Any:
            before = trainer.skipped
            scales.append(trainer.loss_scale)
            loss = one(at, batch)
            if trainer.skipped > before:
                skipped.append(len(scales) - 1)
            return loss

        models, optimizers = session.model, list(session.optimizers)
        with mpdiag.record(models, optimizers, run, every=every, operations=0):
            session.run(take_step=take_step)
    return mpdiag.open_run(run), scales, skipped


def compare(fp32: Run, fp16: Run, scales: list[float], kind: str) -> Outcome:
    """Add up, over the recorded steps both have, what each layer was to lose and lost."""
    sums: dict[str, np.ndarray[Any, Any]] = {}
    low = stored_low(fp16, kind)
    for step in np.intersect1d(fp32.records.step, fp16.records.step):
        wide, narrow = (at_step(run, int(step), kind) for run in (fp32, fp16))
        names = sorted(low & set(wide) & set(narrow))
        exponent = round(math.log2(scales[step])) if kind == "activation_grad" else 0
        for name in names:
            w, n = wide[name], narrow[name]
            sums.setdefault(name, np.zeros(6))
            sums[name] += [
                w.nonzero,
                w.lost_to_zero(FP16, exponent).value,
                n.zeros - w.zeros,
                w.finite,
                w.overflow(FP16, exponent).value,
                n.infs + n.nans - w.infs - w.nans,
            ]
    names, table = [*sums], np.stack([*sums.values()])
    predicted, observed = (share(table[:, i], table[:, 0]) for i in (1, 2))
    worst = int(np.argmax(abs(predicted - observed)))
    total = table.sum(0)
    return Outcome(
        values=int(total[0]),
        predicted_lost=float(total[1] / total[0]),
        observed_lost=float(total[2] / total[0]),
        layers=len(names),
        worst_layer=names[worst],
        worst_difference=float(observed[worst] - predicted[worst]),
        predicted_overflow=float(total[4] / total[3]),
        observed_overflow=float(total[5] / total[3]),
    )


def at_step(run: Run, step: int, kind: str) -> Mapping[str, Any]:
    """A step's histograms of a kind by layer."""
    merged: Layers = merge_layers(run.records, run.records.step == step).of_kind(kind)  # type: ignore[arg-type]
    return {str(n): merged.histograms[i] for i, n in enumerate(merged.names)}


def stored_low(run: Run, kind: str) -> set[str]:
    """Names of layers whose every recorded tensor of a kind was FP16."""
    rows = run.records.of_kind(kind)  # type: ignore[arg-type]
    pairs = set(zip(run.records.texts("name")[rows], run.records.texts("dtype")[rows], strict=True))
    wide = {name for name, dtype in pairs if dtype != "float16"}
    return {str(name) for name, _ in pairs if name not in wide}


def examine(name: str, steps: int, every: int) -> dict[str, Any]:
    workload = workloads.load(name)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        fp32 = record_fp32(workload, place / "fp32", steps, every)
        analysis = mpdiag.analyze(fp32)
        plan = analysis.plan
        gradients = analysis.layers.of_kind("activation_grad")
        top = float(gradients.histograms.absmax.max())
        high = 2.0 ** (math.ceil(math.log2(FP16.max / top)) + 2)
        ways: dict[str, tuple[int, mpdiag.PrecisionOverrides]] = {
            "no scale": (steps, mpdiag.PrecisionOverrides(loss_scale=1.0)),
            "the plan": (steps, mpdiag.PrecisionOverrides()),
            "scale too high": (1, mpdiag.PrecisionOverrides(loss_scale=high)),
        }
        result: dict[str, Any] = {
            "steps": steps,
            "every": every,
            "scale": plan.loss_scale.init_scale,
            "method": plan.loss_scale.method,
            "predicted_overflow_rate": analysis.loss_scale.plan.evidence["predicted_overflow_rate"],
        }
        for way, (count, overrides) in ways.items():
            fp16, scales, skipped = record_fp16(
                workload, place / way.replace(" ", "-"), plan, count, every, overrides
            )
            kinds = {kind: asdict(compare(fp32, fp16, scales, kind)) for kind in KINDS}
            result[way] = {"scales": [min(scales), max(scales)], "steps": count}
            result[way] |= {"skipped": len(skipped), **kinds}
            show(name, way, result[way])
    return result


def show(name: str, way: str, found: dict[str, Any]) -> None:
    low, high = found["scales"]
    at = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    print(f"{name}, {way} (scale {at}): {found['skipped']} of {found['steps']} steps skipped")
    for kind in KINDS:
        o = found[kind]
        print(
            f"    {kind}: lost {o['predicted_lost']:.3%} predicted, {o['observed_lost']:.3%} "
            f"observed (furthest apart: {o['worst_layer']}, {o['worst_difference']:+.2%}); overflow "
            f"{o['predicted_overflow']:.3%} predicted, {o['observed_overflow']:.3%} observed",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", default=["ssd", "digits", "denoiser"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"date": date.today().isoformat(), "torch": torch.__version__}
    if options.json and options.json.is_file():  # workloads that are not tried this time stay
        results = json.loads(options.json.read_text(encoding="utf-8")) | results
    for name in options.workload:
        results[name] = examine(name, options.steps, options.every)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
