"""Whether training holds with every layer in the format the plan advises for it, all at once.

    python studies/cases/formats.py [--half tuning|opened|opened_2|unseen_2] [NAME …]

Each module's output, and the gradient with respect to it, is rounded to its advised format (FP8 under a
power-of-two scale of its own, FP16 gradients under the plan's loss scale), two seeds each; compared with
FP32 by the rule of ``truth.py``. A case whose advice is as it was is not trained again. The figures go
to ``cases-formats-HALF.json`` beside the other results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._pytree import tree_map

import mpdiag
from cases import arithmetic, collection, score, truth
from mpdiag.emulation.rounding import round_to
from mpdiag.numerics.formats import FloatFormat, format_named

if TYPE_CHECKING:
    from cases.case import Case, Training
    from mpdiag.plan import PrecisionPlan

RESULTS = Path(__file__).resolve().parents[1] / "results"
_Store = tuple[FloatFormat, float]
"""A format, and the loss scale of what is stored in it."""


class _Stored(torch.autograd.Function):
    """A tensor stored in one format, and its gradient in another.

    A format comes with the scale that gradients have in it. Storing a gradient is such an operation
    itself, so gradients of gradients pass it as they pass a cast: a rounding is passed straight through.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: _Store, back: _Store) -> Any:
        ctx.back = back
        return stored(x, *there)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Stored.apply(gradient, ctx.back, ctx.back), None, None


def stored(x: torch.Tensor, fmt: FloatFormat, scale: float) -> torch.Tensor:
    """A tensor rounded to a format: FP8 under its own scale, FP16 under the given one."""
    if fmt.needs_tensor_scale:
        top = max(float(x.abs().max()), 2.0**-120)
        scale = 2.0 ** (math.floor(math.log2(fmt.max / top)) - 1) if math.isfinite(top) else 1.0
    elif not fmt.needs_loss_scale:
        scale = 1.0
    return round_to(x * scale, fmt) / scale


class AllAtOnce(arithmetic.Fp32):
    """Every module's output and its gradient in the formats of a plan."""

    def __init__(self, training: Training, plan: PrecisionPlan) -> None:
        advised = {(a.kind, a.name): format_named(a.format) for a in plan.layer_formats}
        fp32 = format_named("fp32")
        scale = plan.loss_scale.recommended
        for name, module in training.model.named_modules():
            there = advised.get(("activation", name), fp32)
            back = advised.get(("activation_grad", name), fp32)
            if there != fp32 or back != fp32:
                module.register_forward_hook(_hook(there, back, scale))


def _hook(there: FloatFormat, back: FloatFormat, scale: float) -> Any:
    def store(x: Any) -> Any:
        floating = isinstance(x, torch.Tensor) and x.dtype == torch.float32
        return _Stored.apply(x, (there, 1.0), (back, scale)) if floating else x

    return lambda _module, _args, output: (
        tree_map(store, output) if torch.is_grad_enabled() else None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--half", choices=collection.HALVES, default="tuning")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--docs", action="store_true", help="Train nothing, print the table.")
    options = parser.parse_args()
    if options.docs:
        print(docs_table())
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    file, until = truth.TruthFile(options.half), time.monotonic() + 60 * options.minutes
    place = RESULTS / f"cases-formats-{options.half}.json"
    found: dict[str, Any] = json.loads(place.read_text("utf-8")) if place.is_file() else {}
    for name, case in collection.load(options.half, options.names).items():
        entry = file.entry(case)
        if entry["truth"] is None or time.monotonic() > until:
            continue
        plan = mpdiag.analyze(score.record(case)).plan
        advice = digest(plan, collection.fingerprint(case))
        if found.get(name, {}).get("advice") != advice:
            found[name] = {"advice": advice, **judged(case, entry, plan)}
            place.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(found[name]), flush=True)
    failed = sum(f["fails"] for f in found.values())
    layers = sum((Counter(f["formats"]) for f in found.values()), Counter())
    print(f"{failed} of {len(found)} fail; formats of layers: {dict(layers)}")


def docs_table() -> str:
    """The results as a table of the documentation: as each half was first trained, and now.

    Halves that were not trained in formats are left out.
    """
    rows = [
        "| | cases | fail at first | fail now | layers in FP8 at first, now | in FP32 at first, now |",
        "|---|---|---|---|---|---|",
    ]
    for half in collection.HALVES:
        if not (RESULTS / f"cases-formats-{half}.json").is_file():
            continue
        first, now = (
            json.loads((RESULTS / f"cases-formats-{half}{when}.json").read_text("utf-8"))
            for when in ("-first", "")
        )
        failed = [_with_interval(sum(f["fails"] for f in f.values()), len(f)) for f in (first, now)]
        then, new = (
            sum((Counter(f["formats"]) for f in f.values()), Counter()) for f in (first, now)
        )
        fp8, fp32 = (f"{then[k]}, {new[k]} of {new.total()}" for k in ("fp8_e4m3", "fp32"))
        rows.append(f"| `{half}` | {len(now)} | {failed[0]} | {failed[1]} | {fp8} | {fp32} |")
    return "\n".join(rows)


def _with_interval(count: int, of: int) -> str:
    found = score.share(count, of)
    assert found is not None
    return f"{count} ({100 * found['low']:.1f}–{100 * found['high']:.1f} %)"


def judged(case: Case, entry: dict[str, Any], plan: PrecisionPlan) -> dict[str, Any]:
    """Whether training fails with every layer in its advised format."""
    used = Counter(a.format for a in plan.layer_formats)
    if set(used) <= {"fp32"}:  # that is FP32
        return {"fails": False, "formats": dict(used), "metrics": {}}
    bench = truth.Bench(case, {k: v for k, v in entry["trainings"].items() if "fp32" in k})
    fails = bench.fails("formats", arithmetic=lambda training: AllAtOnce(training, plan))
    return {"fails": fails, "formats": dict(used), "metrics": bench.known["formats"]}


def digest(plan: PrecisionPlan, case: str) -> str:
    """What decides such a training: the case, the formats, and the loss scale where FP16 has it."""
    formats = sorted((a.kind, a.name, a.format) for a in plan.layer_formats)
    return hashlib.sha256(f"{case} {formats} {plan.loss_scale.recommended}".encode()).hexdigest()[
        :16
    ]


if __name__ == "__main__":
    main()
