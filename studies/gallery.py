"""Precision and recall of ways to flag operations, on the gallery.

    python studies/gallery.py [--json studies/results/gallery.json]

The truth is that of ``studies/gallery_truth.py``: emulated FP16 training, everything narrow. Each
way sees the FP32 training alone, but ``search``, which trains. To score another, add it to FLAGGERS.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpdiag
from mpdiag.numerics.autocast_lists import LISTS
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.sensitivity.fp32_search import search_fp32
from mpdiag.sensitivity.loss_estimate import estimate
from studies import exhibits as gallery
from studies.exhibits.scoring import Score, judge, load_truth, score

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from studies.exhibits.exhibit import Batch
    from studies.exhibits.scoring import Flagger

RESULTS = Path(__file__).parent / "results"
SHARE = 0.05


def by_lists(model: nn.Module, batch: Batch) -> set[tuple[str, str]]:
    """Every operation that autocast's lists keep in FP32."""
    found = estimate(model, lambda: model(*batch))
    return {(e.site.module, e.site.op) for e in found if LISTS.get(e.site.op) == "fp32"}


def by_estimate(model: nn.Module, batch: Batch) -> set[tuple[str, str]]:
    """Operations whose estimated error reaches a share of the loss, or leaves the range."""
    found = estimate(model, lambda: model(*batch))
    return {
        (e.site.module, e.site.op)
        for e in found
        if e.reach > SHARE * abs(e.loss) and e.reach > 1e-6
    }


def by_rules(model: nn.Module, batch: Batch, *, beyond_lists: bool = False) -> set[tuple[str, str]]:
    """What ``analyze`` finds in the operation records of one step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with mpdiag.record(model, optimizer, run):
            model(*batch).backward()
            optimizer.step()
        found = mpdiag.analyze(run).operations
    return {(f.module or "", f.op) for f in found if not (beyond_lists and f.covered)}


FLAGGERS: dict[str, tuple[Flagger, bool]] = {
    "autocast's lists": (by_lists, False),
    "estimate": (by_estimate, False),
    "rules": (by_rules, False),
    "rules, beyond the lists": (partial(by_rules, beyond_lists=True), True),
}


def by_search(truth: Mapping[str, Mapping[str, Any]], names: list[str]) -> tuple[Score, int]:
    """What the search finds with everything else narrow, and its trainings."""
    judged, trainings = [], 0
    for name in names:
        scale = LossScalePlan(method=truth[name]["method"], init_scale=truth[name]["loss_scale"])
        result = search_fp32(
            gallery.load(name).build,
            replace(PrecisionPlan(), loss_scale=scale),
            higher_is_better=False,
            lists=False,
        )
        trainings += sum(len(p.metrics) for p in result.probes)
        judged.append(judge(name, {(c.module, c.op) for c in result.fp32}, truth[name]))
    return Score(tuple(judged)), trainings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, default=RESULTS / "gallery-truth.json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-search", action="store_true")
    parser.add_argument("--only", nargs="*", choices=[*FLAGGERS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    truth = load_truth(options.truth)
    shown = [n for n, t in truth.items() if not t["held_back"]]
    back = [n for n in truth if n not in shown]
    results: dict[str, Any] = {}
    if options.json and options.json.is_file():  # ways that are not tried this time stay
        results = json.loads(options.json.read_text(encoding="utf-8"))
    results |= {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "exhibits": len(truth),
        "need_fp32": sum(t["needs_fp32"] for t in truth.values()),
        "need_fp32_beyond_lists": sum(t["needs_fp32_beyond_lists"] for t in truth.values()),
    }
    print({k: v for k, v in results.items() if k not in ("date", "torch")})
    for title in options.only or FLAGGERS:
        flagger, beyond = FLAGGERS[title]
        results[title] = {
            "shown": score(flagger, truth, shown, beyond_lists=beyond).to_json(),
            "held_back": score(flagger, truth, back, beyond_lists=beyond).to_json(),
        }
        show(title, results[title])
    if not options.no_search:
        parts = {"shown": by_search(truth, shown), "held_back": by_search(truth, back)}
        results["search"] = {k: s.to_json() | {"trainings": n} for k, (s, n) in parts.items()}
        show("search", results["search"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


def show(title: str, parts: dict[str, Any]) -> None:
    for part, s in parts.items():
        print(
            f"{title}, {part.replace('_', ' ')}: precision {s['precision']:.2f}, recall "
            f"{s['recall']:.2f}, flags suffice {s['covered']:.2f}, spare flags "
            f"{s['spare_flags']} of {s['flags']}; mistakes: {', '.join(s['mistakes']) or 'none'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
