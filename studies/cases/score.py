"""Holds what an analysis foretells of the cases against their truth.

    python studies/cases/score.py --half HALF [NAME …] [--minutes M] [--docs]

Each case is recorded once in FP32 (seed 0, the recorder's defaults) and analyzed without a probe. For
each question the analysis' answer is held against ``truth/HALF.json``:

* *needs a scale*: ``plan.loss_scale.needed``.
* *needs masters*: ``plan.master_weights.needed``.
* *plan fails*: the plan is trained (emulated, two seeds and a third where they disagree); foretold is a
  verdict of ``cannot`` on a recording that allows an answer.
* *operation needs FP32*, by what the advice does. Recall is over cases: those in which FP16 fails at
  every scale, and the rest of the operations holds in FP16 once those are FP32 that fail alone, or in a
  group; found is one whose plan names operations beyond autocast's own lists and trains as FP32 does.
  Precision is over the operations that plans name: they are left out one at a time, in the plan's
  order, as long as training without them holds; what is left was needed (``advice.needed``). Where the
  plan fails, one counts as right that fails alone, or with others, by the truth. So of two operations
  of which either would do, one is right and one is false.
* *BF16 fails*, as autocast trains it: foretold is ``cannot``, or operations that stay in FP32, in the
  analysis for BF16.
* *FP16 fails as it is*, by autocast alone: foretold is ``cannot``, a scale that is needed, or operations
  that must stay in FP32.

* Beside the plan, FP16 by the defaults of autocast and ``GradScaler`` and BF16 by autocast's are counted
  where all three are known (``side_by_side``).

Whatever else is said counts as a no, so abstaining is a miss. Recordings and trainings of plans are
kept (``--kept``, by default in ``runs/cases``); what has not been trained when the time is up is trained
by the next call, and by ``--quick`` not at all. A half that is scored whole leaves
``results/cases-HALF.json`` and, for the documentation, its table beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import mpdiag
from cases import advice, collection, truth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cases.case import Case
    from mpdiag.plan import PrecisionPlan

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "runs" / "cases"
RESULTS = ROOT / "studies" / "results"
QUESTIONS = {
    "needs a scale": "needs_scale",
    "needs masters": "needs_masters",
    "operation needs FP32": "operation",
    "plan fails": "plan_fails",
    "BF16 fails": "bf16_fails",
    "FP16 fails as it is": "fp16_fails",
}


# -- counting --------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Right and wrong answers to one question.

    Attributes:
        found, missed, false, rest: True positives, false negatives, false positives, true negatives.
        right: What was rightly said, where that is counted apart from what was found.
        mistakes: Where, in words.
    """

    found: int = 0
    missed: int = 0
    false: int = 0
    rest: int = 0
    right: int | None = None
    mistakes: list[str] = field(default_factory=list)

    def add(self, where: str, *, is_so: bool, said: bool) -> None:
        """Count one answer."""
        self.found += is_so and said
        self.missed += is_so and not said
        self.false += said and not is_so
        self.rest += not is_so and not said
        if is_so != said:
            self.mistakes.append(f"{'missed' if is_so else 'false'}: {where}")

    def to_json(self) -> dict[str, Any]:
        """The counts, precision and recall with their intervals."""
        right = self.found if self.right is None else self.right
        return {
            "positives": self.found + self.missed,
            "negatives": self.false + self.rest,
            "found": self.found,
            "missed": self.missed,
            "said": right + self.false,
            "false": self.false,
            "precision": share(right, right + self.false),
            "recall": share(self.found, self.found + self.missed),
            "mistakes": self.mistakes,
        }


def share(count: int, of: int) -> dict[str, float] | None:
    """A share with Wilson's 95 % interval; None of nothing."""
    if of == 0:
        return None
    z = 1.959964
    p = count / of
    middle = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return {
        "share": round(p, 4),
        "low": round(max(0.0, middle - half), 4),
        "high": round(min(1.0, middle + half), 4),
    }


# -- recording and analysis ------------------------------------------------------------------------


def record(case: Case, kept: Path = KEPT, tick: Callable[[], None] = lambda: None) -> Path:
    """The case's recording, made unless there is one of this source and this recorder."""
    run = kept / "recordings" / f"{case.name}-{collection.fingerprint(case)}-{_recorder()}"
    if not (run / "done").is_file():
        tick()
        torch.manual_seed(0)
        training = case.build(0)
        with mpdiag.record(training.model, training.optimizer, run, overwrite=True, budget=None):
            for step in range(case.steps):
                if training.schedule is not None:
                    training.schedule(step)
                training.optimizer.zero_grad()
                training.loss(step).backward()
                if training.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip_norm)
                training.optimizer.step()
        (run / "done").touch()
    return run


def _recorder() -> str:
    """A hash of the recorder's sources."""
    digest = hashlib.sha256()
    for part in ("recording", "tracing", "runs", "emulation"):
        for file in sorted((ROOT / "mpdiag" / part).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


# -- one case --------------------------------------------------------------------------------------


def examine(
    case: Case,
    entry: dict[str, Any],
    run: Path,
    trainings: advice.PlanTrainings | None,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """What is said of a case, and what is so; without what only trainings say that are left."""
    analysis, bf16 = mpdiag.analyze(run), mpdiag.analyze(run, "bf16")
    plan = analysis.plan
    said, cannot = advice.named(plan), _denies(analysis)
    is_so = _truth(entry["truth"])
    if trainings is not None:
        bench = truth.Bench(case, entry["trainings"])
        with contextlib.suppress(truth.OutOfTime):
            is_so |= _by_training(
                plan, is_so, lambda p: advice.fails(p, case, bench, trainings, tick)
            )
            is_so["metrics"] = dict(trainings.metrics(case, plan))
    return {
        "said": {
            "level": analysis.verdict.level,
            "needs_scale": plan.loss_scale.needed,
            "needs_masters": plan.master_weights.needed,
            "operations": said,
            "plan_fails": cannot,
            "bf16_fails": _denies(bf16) or bool(advice.named(bf16.plan)),
            "fp16_fails": cannot or plan.loss_scale.needed or bool(said),
            "scale": f"{plan.loss_scale.method} {plan.loss_scale.init_scale:g}",
        },
        "is_so": is_so,
    }


def _denies(analysis: mpdiag.Analysis) -> bool:
    """Whether the verdict is that training fails; a recording that allows no answer abstains."""
    return analysis.verdict.level == "cannot" and not analysis.unanswered


def _by_training(
    plan: PrecisionPlan, is_so: dict[str, Any], fails: Callable[[PrecisionPlan], bool]
) -> dict[str, Any]:
    """What trainings by a plan say of it, and of the operations that it names.

    Raises:
        OutOfTime: If a training was cut short; those before it are kept.
    """
    said = advice.named(plan)
    if fails(plan):
        needed = [o for o in said if any(advice.means(o, n) for n in _alone_or_together(is_so))]
        return {"plan_fails": True, "named_and_needed": needed}
    needed = advice.needed(plan, said, lambda p: not fails(p))
    return {"plan_fails": False, "named_and_needed": needed}


def _truth(known: dict[str, Any]) -> dict[str, Any]:
    """A settled truth by the questions; what only trainings by a plan say is missing."""
    return {
        "needs_scale": known["needs_scale"],
        "needs_masters": known["needs_masters"],
        "needs_operations": not known["fp16_trains"] and known.get("rest_trains", False),
        "operations": known["operations"],
        "together": known.get("together", []),
        "plan_fails": None,
        "named_and_needed": None,
        "bf16_fails": not known["bf16_trains"],
        "fp16_fails": known["fp16_fails_without_scale"],
        "default_fails": not known["default_trains"] if "default_trains" in known else None,
    }


def _alone_or_together(is_so: dict[str, Any]) -> list[tuple[str, str]]:
    """The operations that fail in FP16 alone, or in a group."""
    return [tuple(o) for o in (*is_so["operations"], *(o for g in is_so["together"] for o in g))]


def tallies(cases: dict[str, Any]) -> dict[str, Tally]:
    """The answers to each question over all cases."""
    found = {question: Tally() for question in QUESTIONS}
    for name, case in cases.items():
        said, is_so = case["said"], case["is_so"]
        for question, key in QUESTIONS.items():
            if key == "operation":
                _count_operations(found[question], name, said, is_so)
            elif is_so[key] is not None:
                found[question].add(name, is_so=is_so[key], said=said[key])
    return found


def _count_operations(tally: Tally, name: str, said: Any, is_so: Any) -> None:
    if is_so["named_and_needed"] is None:
        return
    tally.right = tally.right or 0
    holds = bool(said["operations"]) and not is_so["plan_fails"]
    if is_so["needs_operations"]:
        tally.add(name, is_so=True, said=holds)
    elif not said["operations"]:
        tally.rest += 1
    right = [tuple(o) for o in is_so["named_and_needed"]]
    for one in map(tuple, said["operations"]):
        if one in right:
            tally.right += 1
        else:
            tally.add(f"{name} {one[0] or '(root)'}:{one[1]}", is_so=False, said=True)


def expected_plans(cases: dict[str, Any]) -> dict[str, Any]:
    """How many trained plans of the verdict *expected* failed, with the interval of their share."""
    known = [c for c in cases.values() if c["is_so"]["plan_fails"] is not None]
    expected = [c["is_so"]["plan_fails"] for c in known if c["said"]["level"] == "expected"]
    return {
        "trained": len(expected),
        "failed": sum(expected),
        "share": share(sum(expected), len(expected)),
    }


def side_by_side(cases: dict[str, Any]) -> dict[str, Any] | None:
    """The plan beside FP16 and BF16 by the defaults of autocast and ``GradScaler``.

    Returns:
        Of the cases that were trained in all three ways how many train as FP32 in each, and those in
        which a default trains and the plan does not, with the plan's verdict. None: no case was.
    """
    known = {
        name: c
        for name, c in cases.items()
        if None not in (c["is_so"]["plan_fails"], c["is_so"]["default_fails"])
    }
    if not known:
        return None
    ways = {"plan": "plan_fails", "fp16": "default_fails", "bf16": "bf16_fails"}
    worse = {
        f"plan worse than {way}": {
            name: c["said"]["level"]
            for name, c in known.items()
            if c["is_so"]["plan_fails"] and not c["is_so"][key]
        }
        for way, key in list(ways.items())[1:]
    }
    trains = {way: sum(not c["is_so"][key] for c in known.values()) for way, key in ways.items()}
    return {"cases": len(known), "trains": trains, **worse}


def docs_table(results: dict[str, Any]) -> str:
    """The score as a table of the documentation."""

    def cell(s: dict[str, float] | None) -> str:
        return "–" if s is None else f"{s['share']:.2f} ({s['low']:.2f}–{s['high']:.2f})"

    rows = ["| question | yes | no | precision | recall |", "|---|---|---|---|---|"]
    rows += [
        f"| {q} | {t['positives']} | {t['negatives']} | {cell(t['precision'])} | {cell(t['recall'])} |"
        for q, t in results["questions"].items()
    ]
    return "\n".join(rows)


def score(
    half: str, only: Iterable[str], minutes: float, kept: Path, *, quick: bool
) -> dict[str, Any]:
    """Score a half; prints each case."""
    file = truth.TruthFile(half)
    trainings = None if quick else advice.PlanTrainings(kept / f"{half}-plans.json")
    until = time.monotonic() + 60 * minutes

    def tick() -> None:
        if time.monotonic() > until:
            raise truth.OutOfTime

    cases: dict[str, Any] = {}
    left: list[str] = []
    for name, case in collection.load(half, list(only)).items():
        entry = file.entry(case)
        if entry["truth"] is None:
            print(f"{name}: {truth.words(entry)}", file=sys.stderr)
            continue
        try:
            run = record(case, kept, tick)
        except truth.OutOfTime:
            left.append(name)
            continue
        cases[name] = examine(case, entry, run, trainings, tick)
        print(f"{name}: {json.dumps(cases[name])}", file=sys.stderr, flush=True)
        if trainings is not None and cases[name]["is_so"]["plan_fails"] is None:
            left.append(name)
    known = collection.load(half)
    return {
        "half": half,
        "left": left,
        "without_truth": [
            n
            for n, c in known.items()
            if file.entry(c)["truth"] is None and "unusable" not in file.entry(c)
        ],
        "unusable": [n for n, c in known.items() if "unusable" in file.entry(c)],
        "by_an_older_rule": [n for n, c in known.items() if file.is_old(c)],
        "questions": {q: t.to_json() for q, t in tallies(cases).items()},
        "expected_plans": expected_plans(cases),
        "side_by_side": side_by_side(cases),
        "cases": cases,
    }


def tell(results: dict[str, Any]) -> None:
    """Print the score, question by question."""
    for question, tally in results["questions"].items():
        print(f"{question}: {tally['positives']} yes, {tally['negatives']} no")
        for what in ("precision", "recall"):
            s = tally[what]
            told = "–" if s is None else f"{s['share']:.2f} ({s['low']:.2f} to {s['high']:.2f})"
            print(f"    {what} {told}")
        for mistake in tally["mistakes"]:
            print(f"    {mistake}")
    plans = results["expected_plans"]
    print(f"plans of the verdict 'expected': {plans['failed']} of {plans['trained']} fail")
    if beside := results["side_by_side"]:
        trains = ", ".join(f"{way} {count}" for way, count in beside["trains"].items())
        print(f"of {beside['cases']} cases train as FP32: {trains}")
        print(
            *(f"{k}: {v}" for k, v in beside.items() if k.startswith("plan worse") and v), sep="\n"
        )
    for key, what in (
        ("without_truth", "have no truth"),
        ("unusable", "are no cases: they diverge in FP32"),
        ("by_an_older_rule", "were settled by an older rule"),
        ("left", "are left: call again"),
    ):
        if results[key]:
            print(f"{len(results[key])} {what} ({', '.join(results[key])})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--half", choices=collection.HALVES, required=True)
    parser.add_argument("--minutes", type=float, default=3.5, help="Train nothing after this.")
    parser.add_argument("--quick", action="store_true", help="Train no plan at all.")
    parser.add_argument("--kept", type=Path, default=KEPT, help="Recordings and trainings.")
    parser.add_argument("--docs", action="store_true", help="Print the table of the documentation.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = score(options.half, options.names, options.minutes, options.kept, quick=options.quick)
    if not (options.names or options.quick):
        path = RESULTS / f"cases-{options.half}.json"
        path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(docs_table(results) + "\n", encoding="utf-8")
    if options.docs:
        print(docs_table(results))
    else:
        tell(results)


if __name__ == "__main__":
    main()
