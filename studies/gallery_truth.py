"""Which exhibits of the gallery need FP32 somewhere, and where: by training them, never by rule.

    python studies/gallery_truth.py [NAME …] [--json studies/results/gallery-truth.json]

For each exhibit: FP32 with five seeds, whose spread says what counts as good; the loss scale that
``analyze`` recommends from a recording; emulated FP16 with every operation narrow (three seeds), and
by the operation policy's lists (three seeds). Where everything narrow fails, each operation of each
module in turn is kept in FP32 alone, then each pair, to see which suffice (beyond two: one set from
which none can be taken away, found by trying each); and each module.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from one_by_one import take_away_one_by_one

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpdiag
from mpdiag.plan import Fp32Choice, PrecisionPlan
from mpdiag.sensitivity.fp32_search import _finish, narrow_options
from mpdiag.sensitivity.loss_estimate import Fp32Candidate, RankingTrainer, candidates_of
from mpdiag.sensitivity.search_state import SeedSpread, spread_of
from mpdiag.training.trainer import MixedPrecision
from studies import exhibits as gallery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from studies.exhibits.exhibit import Exhibit

FP32_SEEDS = (0, 1, 2, 3, 4)
SEEDS = (0, 1, 2)
RESULTS = Path(__file__).parent / "results" / "gallery-truth.json"


def recommend(exhibit: Exhibit) -> PrecisionPlan:
    """The plan of a recorded FP32 training, its own choice of FP32 operations left out."""
    model, optimizer, _ = exhibit.build(0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with mpdiag.record(model, optimizer, run):
            for batch in exhibit.batches(0):
                optimizer.zero_grad()
                model(*batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
        plan = mpdiag.analyze(run).plan
    return replace(plan, run="", fp32_operations=(), fp32_modules=(), levels=(), layer_formats=())


def fp32(exhibit: Exhibit, seed: int) -> float:
    model, optimizer, train = exhibit.build(seed)
    with MixedPrecision(model, optimizer, PrecisionPlan(), level="O0") as trainer:
        return _finish(train, trainer)


def operations(exhibit: Exhibit, plan: PrecisionPlan) -> list[Fp32Candidate]:
    """Every operation of every module that was met."""
    model, optimizer, train = exhibit.build(0)
    with RankingTrainer(model, optimizer, plan, plan.loss_scale.init_scale) as trainer:
        train(trainer)
    return [c for c, _ in candidates_of(trainer.weights, lists=False, whole_modules=False)]


def narrow(
    exhibit: Exhibit,
    plan: PrecisionPlan,
    seed: int,
    kept: tuple[Fp32Candidate, ...],
    *,
    lists: bool,
) -> float:
    """The metric of emulated FP16 with these in FP32; NaN if it diverged."""
    model, optimizer, train = exhibit.build(seed)
    chosen = replace(
        plan,
        fp32_operations=tuple(Fp32Choice(c.op, c.module) for c in kept if c.op),
        fp32_modules=tuple(Fp32Choice("", c.module) for c in kept if not c.op),
    )
    with MixedPrecision(model, optimizer, chosen, **narrow_options(chosen, lists=lists)) as trainer:
        return _finish(train, trainer)


def holds(
    exhibit: Exhibit,
    plan: PrecisionPlan,
    spread: SeedSpread,
    kept: tuple[Fp32Candidate, ...],
    **options: bool,
) -> tuple[bool, list[float]]:
    metrics = []
    for seed in SEEDS:
        metrics.append(narrow(exhibit, plan, seed, kept, **options))
        if kept and not spread.holds(metrics[-1]):
            break
    return all(map(spread.holds, metrics)), metrics


def sufficient(exhibit: Exhibit, plan: PrecisionPlan, spread: SeedSpread) -> dict[str, Any]:
    """Which single operations suffice; if none does, which pairs; and which modules."""
    every = operations(exhibit, plan)

    def good(kept: Iterable[Fp32Candidate]) -> bool:
        return holds(exhibit, plan, spread, tuple(kept), lists=False)[0]

    fixes: list[tuple[Fp32Candidate, ...]] = []
    for size in (1, 2):
        fixes = [kept for kept in itertools.combinations(every, size) if good(kept)]
        if fixes:
            break
    else:  # three or more at once: one set from which none can be taken away
        smallest = take_away_one_by_one(every, good)
        fixes = [] if smallest is None else [tuple(sorted(smallest))]
    modules = sorted({Fp32Candidate(c.module, "") for c in every} - {Fp32Candidate("", "")})
    whole = [m for m in modules if good((m,))]
    return {
        "operations": len(every),
        "fixes": [[[c.module, c.op] for c in kept] for kept in fixes],
        "fixing_modules": [m.module for m in whole],
    }


def examine(exhibit: Exhibit) -> dict[str, Any]:
    began = time.perf_counter()
    spread = spread_of([fp32(exhibit, s) for s in FP32_SEEDS], higher_is_better=False)
    plan = recommend(exhibit)
    bare, bare_metrics = holds(exhibit, plan, spread, (), lists=False)
    listed, listed_metrics = holds(exhibit, plan, spread, (), lists=True)
    result: dict[str, Any] = {
        "title": exhibit.title,
        "held_back": exhibit.held_back,
        "fp32": list(spread.metrics),
        "bound": spread.bound,
        "loss_scale": plan.loss_scale.init_scale,
        "method": plan.loss_scale.method,
        "narrow": list(map(plain, bare_metrics)),
        "by_lists": list(map(plain, listed_metrics)),
        "needs_fp32": not bare,
        "needs_fp32_beyond_lists": not listed,
    }
    if not bare:
        result |= sufficient(exhibit, plan, spread)
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result


def plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="Leave out which operations suffice.")
    options = parser.parse_args()
    if options.quick:
        globals()["sufficient"] = lambda *_: {}
    torch.set_num_threads(1)
    known = json.loads(options.json.read_text()) if options.json.is_file() else {"exhibits": {}}
    for name in options.names or gallery.names():
        found = examine(gallery.load(name))
        known["exhibits"][name] = found
        show(name, found)
        known |= {"date": date.today().isoformat(), "torch": torch.__version__}
        known["exhibits"] = {
            n: known["exhibits"][n] for n in gallery.names() if n in known["exhibits"]
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(known, indent=1, allow_nan=False) + "\n")


def show(name: str, r: dict[str, Any]) -> None:
    def figures(values: list[float | None]) -> str:
        return " ".join("diverged" if v is None else f"{v:.4g}" for v in values)

    verdict = "needs FP32" if r["needs_fp32"] else "needs none"
    beyond = ", beyond the lists too" if r["needs_fp32_beyond_lists"] else ""
    print(f"{name}: {verdict}{beyond}  [{r['seconds']} s, scale {r['loss_scale']:g}]")
    print(f"    FP32 {figures(r['fp32'])} (bound {r['bound']:.4g})")
    print(f"    narrow {figures(r['narrow'])}; by lists {figures(r['by_lists'])}")
    if r.get("fixes"):
        print(f"    suffices: {r['fixes'][:6]}; modules {r['fixing_modules']}", flush=True)


if __name__ == "__main__":
    main()
