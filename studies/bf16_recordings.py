"""Recordings in BF16 of ten small trainings, each answer beside what FP32 shows.

    python studies/bf16_recordings.py --json studies/results/bf16-recordings.json
    python studies/bf16_recordings.py digits gpt                                     # some

``analyze`` answers some questions of a BF16 recording with *exact* and some with *bound*. Each is
checked by a recording that can tell:

``replayed``
    An FP32 training is recorded twice, bit for bit the same one: as it is, and with each tensor rounded
    to BF16 before it is counted. *Bound* promises that FP32's counts and both ends of the interval of
    loss scales lie within the bounds of the second recording, and each step's largest gradient within
    one rounding.
``twin``
    The training itself in BF16, with BF16 weights or under autocast, and in FP32 from the same weights
    and the same batch, for one step: later ones start from other weights. Here each value has the errors
    of all operations before it, which no bound holds. The ends of the interval are compared in octaves,
    and it is counted how many shares lie outside of the bounds, and by how much at most.
``updates``
    *Exact* promises the number of weights that changed and, of FP32 weights, of updates that weights in
    FP16 or BF16 would round away. They are counted apart, from copies.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import mpdiag
from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.format_advice import summarise_formats
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.run_statistics import read_statistics
from mpdiag.analysis.scaling.loss_scale import analyze_loss_scale
from mpdiag.numerics.formats import BF16
from mpdiag.recording import observer, weights
from mpdiag.recording.counting.tensors import countable
from mpdiag.runs.run import Run, open_run
from mpdiag.workloads import load
from mpdiag.workloads.protocol import Batch, Session, start

MODES = {
    "digits": "weights",
    "gpt": "weights",
    "language_model": "weights",
    "vgg": "weights",
    "vit": "weights",
    "ssd": "autocast",
    "denoiser": "autocast",
    "speech": "autocast",
    "translation": "autocast",
    "two_stage": "autocast",
}
"""What is in BF16 in each: the weights, or the operations that autocast casts."""
STEPS = 6
"""Of the replayed trainings."""


def step(session: Session, batch: Batch, *, autocast: bool = False) -> Tensor:
    """One step, under BF16 autocast if it is asked for."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = session.workload.loss(session.model, batch)
    session.optimizer.zero_grad()
    loss.float().backward()
    session.optimizer.step()
    return loss.detach()


def train(session: Session, folder: Path, *, dtype: torch.dtype, autocast: bool = False) -> Run:
    """Record a session to its end, with inputs of a dtype, rounded to BF16 before where it is FP32."""
    with mpdiag.record(session.model, session.optimizer, folder, every=1, operations=0):
        session.model.train()
        for batch in session.workload.batches(session.steps, session.seed):
            cast = (t.bfloat16().to(dtype) if t.is_floating_point() else t for t in batch)
            step(session, tuple(cast), autocast=autocast)
    return open_run(folder)


@contextmanager
def rounded_when_counted() -> Iterator[None]:
    """Activations and gradients are rounded to BF16 before they are counted; the training is not."""

    def rounded(tensor: Tensor) -> Any:
        return countable(tensor.detach().bfloat16() if tensor.dtype == torch.float32 else tensor)

    places = ((observer, "countable"), (weights, "countable"))
    with mock.patch.object(*places[0], rounded), mock.patch.object(*places[1], rounded):
        yield


def replayed(name: str, folder: Path) -> dict[str, Any]:
    """FP32's counts and ends of the interval beside the bounds of rounded values."""
    runs = {}
    for kind in ("fp32", "bf16"):
        session = start(load(name), steps=STEPS)
        place = folder / f"{name}-{kind}"
        if kind == "bf16":
            with rounded_when_counted():
                runs[kind] = train(session, place, dtype=torch.float32)
        else:
            runs[kind] = train(session, place, dtype=torch.float32)
    scales, layers = {}, {}
    for kind, run in runs.items():
        statistics = read_statistics(run)
        layers[kind] = statistics.layers()
        optimizers = run.meta["optimizers"]
        rounded_to = BF16 if kind == "bf16" else None
        scales[kind] = analyze_loss_scale(
            statistics, layers[kind], optimizers=optimizers, rounded_to=rounded_to
        )
    exponent = round(math.log2(scales["bf16"].plan.recommended))
    compared, outside = shares(layers["bf16"], layers["fp32"], exponent)
    maxima = [read_statistics(run).step_maxima()[1] for run in runs.values()]
    apart = float(abs(maxima[1] / maxima[0] - 1).max())
    bounds = scales["bf16"].bounds
    assert bounds is not None
    ends = {
        "lower": [bounds.lower[0], scales["fp32"].plan.lower, bounds.lower[1]],
        "upper": [bounds.upper[0], scales["fp32"].plan.upper, bounds.upper[1]],
    }
    return {
        "shares": compared,
        "outside": outside,
        "largest_apart": apart,
        **ends,
        "holds": not outside and apart <= 2.0**-8 and all(a <= b <= c for a, b, c in ends.values()),
    }


def shares(rounded: Layers, true: Layers, exponent: int) -> tuple[int, list[list[Any]]]:
    """How many shares that formats lose were compared, and those outside of the bounds."""
    found = summarise_formats(rounded, exponent, BF16)
    compared, outside = 0, []
    for fmt, summary in summarise_formats(true, exponent).items():
        for kind, figures in summary["kinds"].items():
            if kind == "update":  # counted from weights that were not rounded
                continue
            for what in ("underflow", "overflow"):
                low, high = found[fmt]["kinds"][kind][f"{what}_bounds"]
                compared += 1
                if not low - 1e-12 <= figures[what] <= high + 1e-12:
                    outside.append([fmt, kind, what, low, figures[what], high])
    return compared, outside


def twin(name: str, folder: Path) -> dict[str, Any]:
    """The interval of loss scales that a step in BF16 shows, beside that of the same step in FP32."""
    in_weights = MODES[name] == "weights"
    narrow = start(load(name), steps=1)
    wide = start(load(name), steps=1)
    if in_weights:
        for p in (*narrow.model.parameters(), *wide.model.parameters()):
            p.data = p.data.bfloat16().float()
        narrow.model.bfloat16()
    before = [p.detach().clone() for p in narrow.model.parameters()]
    dtype = torch.bfloat16 if in_weights else torch.float32
    run = train(narrow, folder / f"{name}-narrow", dtype=dtype, autocast=not in_weights)
    train(wide, folder / f"{name}-wide", dtype=torch.float32)
    found = mpdiag.analyze(run)
    fp32 = mpdiag.analyze(folder / f"{name}-wide")
    bounds = found.loss_scale.bounds
    assert bounds is not None
    ends = {
        "lower": [bounds.lower[0], fp32.loss_scale.plan.lower, bounds.lower[1]],
        "upper": [bounds.upper[0], fp32.loss_scale.plan.upper, bounds.upper[1]],
    }
    octaves = {
        end: max(0.0, math.log2(low / true), math.log2(true / high))
        for end, (low, true, high) in ends.items()
    }
    exponent = round(math.log2(found.plan.loss_scale.recommended))
    compared, outside = shares(found.layers, fp32.layers, exponent)
    return {
        **ends,
        "octaves_outside": octaves,
        "shares": compared,
        "shares_outside": len(outside),
        "farthest": max((max(o[3] - o[4], o[4] - o[5]) for o in outside), default=0.0),
        "verdict": [found.verdict.level, fp32.verdict.level],
        "need": [found.plan.loss_scale.need, fp32.plan.loss_scale.need],
        "answers": {a.question: a.answer for a in found.answers},
        "updates": updates(run, narrow.model, before, found),
    }


def updates(run: Run, model: nn.Module, before: list[Tensor], found: Analysis) -> dict[str, Any]:
    """How many weights changed in the step, and what narrow ones would lose: recorded, and by copies."""
    records = run.records
    rows = records.of_kind("update")
    pairs = list(zip([p.detach() for p in model.parameters()], before, strict=True))
    recorded = {"changed": int(records.changed[rows].sum())}
    true = {"changed": sum(int((new != old).sum()) for new, old in pairs)}
    if all(new.dtype == torch.float32 for new, _ in pairs):
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            recorded[name] = int(records.fact("swallowed", name)[rows].sum())
            true[name] = sum(
                int(((old.to(dtype) + (new - old).to(dtype) == old.to(dtype)) & (new != old)).sum())
                for new, old in pairs
            )
    exact = next(a.answer for a in found.answers if a.question == "updates rounded away")
    return {"answer": exact, "recorded": recorded, "true": true, "holds": recorded == true}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*MODES, []])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    with TemporaryDirectory(prefix="mpdiag-bf16-") as name:
        for workload in options.names or MODES:
            place = Path(name)
            one = {
                "mode": MODES[workload],
                "replayed": replayed(workload, place),
                "twin": twin(workload, place),
            }
            results[workload] = one
            print(workload, json.dumps(one), flush=True)
    held = sum(
        one["replayed"]["holds"] and one["twin"]["updates"]["holds"] for one in results.values()
    )
    print(f"{held} of {len(results)} hold")
    if options.json:
        document = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, torch {torch.__version__}",
            "held": held,
            "of": len(results),
            "trainings": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
