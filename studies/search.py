"""What the search costs, against taking operations away one by one: trainings and wall time.

    python studies/search.py [NAME …] [--json studies/results/search.json]

On every exhibit of the gallery that needs FP32 with all else narrow, a few that do not, and a deeper
network with one bad layer. Both ways put the same questions to the same trainings from the same FP32
references, with two seeds for each set; neither knows what the other learned.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from one_by_one import take_away_one_by_one
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.sensitivity.fp32_search import _Search, find_smallest
from mpdiag.sensitivity.search_state import SearchState, spread_of
from studies import exhibits as gallery
from studies.exhibits.exhibit import Chain, Exhibit
from studies.exhibits.layers import UnitLength, large
from studies.exhibits.scoring import load_truth

RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2, 3, 4)
NEED_NONE = ("mlp", "layer_norm", "language", "autoencoder")


class Block(nn.Module):
    """Norm, two linear layers, and around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def deep() -> nn.Module:
    """Eight blocks behind vectors divided by their length."""
    body = nn.Sequential(
        UnitLength(), nn.Linear(16, 32), *(Block(32) for _ in range(8)), nn.Linear(32, 8)
    )
    return Chain(body, nn.MSELoss())


DEEP = Exhibit(
    "deep",
    "8 residual blocks, vectors of size 1e3 divided by their length",
    deep,
    large,
    steps=30,
)


@dataclass
class Way:
    """One way to search."""

    probes: int
    trainings: int
    seconds: float
    found: list[str] | None


def search(exhibit: Exhibit, plan: PrecisionPlan, *, ranked: bool) -> tuple[Way, int]:
    """The smallest set by bisection over ranked operations, or one by one; and the candidates."""
    state = SearchState({})
    held = _Search(exhibit.build, plan, state, math.inf, 2, False, "auto", None)
    held._reference(SEEDS)
    held._spread = spread_of([state.reference[s][0] for s in SEEDS], higher_is_better=False)
    candidates = [c for c, _ in state.candidates]
    began = time.perf_counter()
    if ranked:
        found = find_smallest(candidates, held._good)
    else:
        found = take_away_one_by_one(candidates, held._good)
    seconds = time.perf_counter() - began
    names = None if found is None else sorted(map(str, found))
    trainings = sum(len(p.metrics) for p in state.probes)
    return Way(len(state.probes), trainings, seconds, names), len(candidates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--truth", type=Path, default=RESULTS / "gallery-truth.json")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    truth = load_truth(options.truth)
    names = options.names or [
        *(n for n, t in truth.items() if t["needs_fp32"]), *NEED_NONE, DEEP.name,
    ]  # fmt: skip
    rows: dict[str, Any] = {}
    if options.json and options.json.is_file():  # what was measured before, under its own date
        rows = json.loads(options.json.read_text())["exhibits"]
    for name in names:
        exhibit = DEEP if name == DEEP.name else gallery.load(name)
        known = truth.get(name, {"method": "constant", "loss_scale": 1.0})
        scale = LossScalePlan(method=known["method"], init_scale=known["loss_scale"])
        plan = replace(PrecisionPlan(), loss_scale=scale)
        ours, count = search(exhibit, plan, ranked=True)
        plain, _ = search(exhibit, plan, ranked=False)
        rows[name] = {
            "date": date.today().isoformat(),
            "candidates": count,
            "search": ours.__dict__,
            "one_by_one": plain.__dict__,
        }
        print(
            f"{name}: {count} operations; search {ours.probes} sets, {ours.trainings} trainings, "
            f"{ours.seconds:.1f} s → {ours.found}; one by one {plain.probes} sets, "
            f"{plain.trainings} trainings, {plain.seconds:.1f} s → {plain.found}",
            flush=True,
        )
        if options.json:
            text = json.dumps(document(rows), indent=1, allow_nan=False)
            options.json.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in document(rows).items() if k != "exhibits"}, indent=1))


def document(rows: dict[str, Any]) -> dict[str, Any]:
    """Everything measured, with its sums."""
    groups = {
        "need_fp32": [n for n in rows if n not in (*NEED_NONE, DEEP.name)],
        "need_none": [n for n in rows if n in NEED_NONE],
        "deep": [n for n in rows if n == DEEP.name],
    }
    parts = {part: summary([rows[n] for n in group]) for part, group in groups.items()}
    return {"torch": torch.__version__, **parts, "exhibits": rows}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over exhibits, and the ratio of each, one by one over search, as a median."""
    total: dict[str, Any] = {}
    for unit in ("probes", "trainings", "seconds"):
        ours, plain = ([r[way][unit] for r in rows] for way in ("search", "one_by_one"))
        total[unit] = {
            "search": sum(ours),
            "one_by_one": sum(plain),
            "median_ratio": statistics.median(p / o for o, p in zip(ours, plain, strict=True))
            if rows
            else None,
        }
    same = [len(r["search"]["found"] or ()) == len(r["one_by_one"]["found"] or ()) for r in rows]
    return {"exhibits": len(rows), "same_size": sum(same), **total}


if __name__ == "__main__":
    main()
