"""Holds what an analysis foretells of the cases against their truth.

    python studies/cases/score.py --half tuning|unseen [NAME …] [--minutes M] [--docs]

Each case is recorded once in FP32 (seed 0, the recorder's defaults) and analyzed without a probe. For
each question the analysis' answer is held against ``truth/HALF.json``:

* *needs a scale*: ``plan.loss_scale.needed``.
* *needs masters*: ``plan.master_weights.needed``.
* *operation needs FP32*, operation by operation: those that the plan puts into FP32 beyond autocast's
  own lists. One that fails alone in FP16 counts as found if it does not run in FP16 under the plan; one
  that is named counts as right if it fails alone, or with others.
* *plan fails*: the plan is trained (emulated, two seeds and a third where they disagree); foretold is a
  verdict of ``cannot``.
* *BF16 fails*, as autocast trains it: foretold is ``cannot``, or operations that stay in FP32, in the
  analysis for BF16.
* *FP16 fails as it is*, by autocast alone: foretold is ``cannot``, a scale that is needed, or operations
  that must stay in FP32.

Whatever else is said counts as a no, so abstaining is a miss. Recordings and trainings of plans are kept
in ``runs/cases``; what has not been trained when the time is up is trained by the next call.
"""

from __future__ import annotations

import argparse
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
from cases import collection, truth
from cases.arithmetic import FirstSteps
from mpdiag.errors import TrainingDiverged, UsageError
from mpdiag.numerics.autocast_lists import CALLED_AS, LISTS, policy_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cases.arithmetic import Operation
    from cases.case import Case
    from mpdiag.analysis.analyzer import Analysis
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
        mistakes: Where, in words.
    """

    found: int = 0
    missed: int = 0
    false: int = 0
    rest: int = 0
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
        return {
            "positives": self.found + self.missed,
            "negatives": self.false + self.rest,
            "found": self.found,
            "missed": self.missed,
            "false": self.false,
            "precision": share(self.found, self.found + self.false),
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


def record(case: Case) -> Path:
    """The case's recording, made unless there is one of this source and this recorder."""
    run = KEPT / "recordings" / f"{case.name}-{collection.fingerprint(case)}-{_recorder()}"
    if not (run / "done").is_file():
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
    for part in ("recording", "tracing", "runs"):
        for file in sorted((ROOT / "mpdiag" / part).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def level(analysis: Analysis) -> str:
    """The verdict's level; of an older verdict, which is a sentence, by its beginning."""
    verdict: Any = analysis.verdict
    if isinstance(verdict, str):
        can = verdict.startswith("This can train")
        return "expected" if can else "cannot"
    return str(verdict.level)


def chosen(plan: PrecisionPlan) -> list[Operation]:
    """What a plan puts into FP32 beyond autocast's lists; whole modules without an operation."""
    found = {
        (c.module, c.op)
        for c in plan.fp32_operations
        if not c.evidence.get("policy") and LISTS.get(policy_name(c.op)) != "fp32"
    }
    return sorted(found | {(c.module, "") for c in plan.fp32_modules})


def names(op: str) -> set[str]:
    """The names under which a plan's operation may be met."""
    return {op, policy_name(op), *CALLED_AS.get(op, ())}


def means(said: Operation, operation: Operation) -> bool:
    """Whether a plan's choice is this operation, or a module around it."""
    module, op = operation
    if not said[1]:
        return said[0] == module or module.startswith(f"{said[0]}.") or not said[0]
    return said[0] == module and op in names(said[1])


# -- training by the plan --------------------------------------------------------------------------


class PlanTrainings:
    """Metrics of trainings by a plan, kept by a hash of case and plan."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def entry(self, case: Case, plan: PrecisionPlan) -> dict[str, Any]:
        """What is known of a plan's trainings of a case."""
        text = json.dumps([collection.fingerprint(case), case.name, _essence(plan)], sort_keys=True)
        return self._known.setdefault(hashlib.sha256(text.encode()).hexdigest()[:16], {})

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._known, indent=1) + "\n")


def _essence(plan: PrecisionPlan) -> Any:
    """What of a plan decides its training."""
    scale = plan.loss_scale.to_json() if hasattr(plan.loss_scale, "to_json") else None
    scale = scale or plan.to_json()["loss_scale"]
    left_out = ("reason", "evidence", "need", "recommended", "lower", "upper")
    return [
        plan.level,
        plan.target,
        sorted((c.module, c.op) for c in plan.fp32_operations),
        sorted(c.module for c in plan.fp32_modules),
        {k: v for k, v in scale.items() if k not in left_out},
    ]


def train_by(plan: PrecisionPlan, case: Case, seed: int, tick: Callable[[], None]) -> float:
    """The metric of a training by the plan; NaN if it diverged or was refused."""
    torch.manual_seed(seed)
    training = case.build(seed)
    try:
        with mpdiag.MixedPrecision(
            training.model, training.optimizer, plan, backend="emulated"
        ) as trainer:
            for step in range(case.steps):
                tick()
                if training.schedule is not None:
                    training.schedule(step)
                with trainer.autocast():
                    loss = training.loss(step)
                trainer.step(loss, clip_norm=training.clip_norm)
    except (TrainingDiverged, UsageError):
        return math.nan
    except RuntimeError as error:
        if "without overflow" in str(error):
            return math.nan
        raise
    with torch.no_grad():
        metric = float(training.evaluate())
    return metric if math.isfinite(metric) else math.nan


def narrow_under(plan: PrecisionPlan, case: Case) -> list[list[str]]:
    """The operations that read or store FP16 in the first steps of a training by the plan."""
    training = case.build(0)
    notes = FirstSteps(training.model)
    try:
        with mpdiag.MixedPrecision(
            training.model, training.optimizer, plan, backend="emulated"
        ) as trainer:
            for step in range(min(case.steps, FirstSteps.COUNT)):
                with trainer.autocast(), notes.forward():
                    loss = training.loss(step)
                trainer.step(loss)
    except (TrainingDiverged, UsageError, RuntimeError):
        pass
    return [list(o) for o in notes.found]


def plan_fails(
    plan: PrecisionPlan,
    case: Case,
    bench: truth.Bench,
    kept: dict[str, Any],
    tick: Callable[[], None],
) -> bool:
    """Whether most seeds are worse than FP32."""
    bound, count = bench.tolerance(), 0
    metrics = kept.setdefault("metrics", {})
    for i, seed in enumerate(truth.SEEDS):
        if str(seed) not in metrics:
            value = train_by(plan, case, seed, tick)
            metrics[str(seed)] = value if math.isfinite(value) else None
        value = metrics[str(seed)]
        count += bench.is_worse(math.nan if value is None else value, seed, bound)
        if i == 1 and count != 1:
            break
    return count >= 2


# -- one case --------------------------------------------------------------------------------------


def examine(
    case: Case, entry: dict[str, Any], kept: PlanTrainings, tick: Callable[[], None]
) -> Any:
    """What is said of a case, and what is so."""
    bench = truth.Bench(case, entry["trainings"])
    known = entry["truth"]
    run = record(case)
    tick()
    analysis, bf16 = mpdiag.analyze(run), mpdiag.analyze(run, "bf16")
    plan = analysis.plan
    trained = kept.entry(case, plan)
    try:
        fails = plan_fails(plan, case, bench, trained, tick)
        if known["operations"] and "narrow" not in trained:
            trained["narrow"] = narrow_under(plan, case)
    finally:
        kept.save()
    said = chosen(plan)
    cannot = level(analysis) == "cannot"
    return {
        "said": {
            "level": level(analysis),
            "needs_scale": plan.loss_scale.needed,
            "needs_masters": plan.master_weights.needed,
            "operations": said,
            "plan_fails": cannot,
            "bf16_fails": level(bf16) == "cannot" or bool(chosen(bf16.plan)),
            "fp16_fails": cannot or plan.loss_scale.needed or bool(said),
            "scale": f"{plan.loss_scale.method} {plan.loss_scale.init_scale:g}",
        },
        "is_so": {
            "needs_scale": known["needs_scale"],
            "needs_masters": known["needs_masters"],
            "operations": known["operations"],
            "together": known.get("together", []),
            "still_narrow": trained.get("narrow", []),
            "plan_fails": fails,
            "bf16_fails": not known["bf16_trains"],
            "fp16_fails": known["fp16_fails_without_scale"],
        },
    }


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
    needed = [tuple(o) for o in is_so["operations"]]
    joint = [tuple(o) for group in is_so["together"] for o in group]
    narrow = {tuple(o) for o in is_so["still_narrow"]}
    for module, op in needed:
        covered = (module, op) not in narrow
        tally.add(f"{name} {module or '(root)'}:{op}", is_so=True, said=covered)
    for one in map(tuple, said["operations"]):
        if not any(means(one, o) for o in (*needed, *joint)):
            tally.add(f"{name} {one[0] or '(root)'}:{one[1]}", is_so=False, said=True)


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


def score(half: str, only: Iterable[str], minutes: float) -> dict[str, Any]:
    """Score a half; prints each case."""
    file = truth.TruthFile(half)
    kept = PlanTrainings(KEPT / f"{half}-plans.json")
    until = time.monotonic() + 60 * minutes

    def tick() -> None:
        if time.monotonic() > until:
            raise truth.OutOfTime

    cases: dict[str, Any] = {}
    left: list[str] = []
    for name, case in collection.load(half, list(only)).items():
        entry = file.entry(case)
        if entry["truth"] is None:
            print(f"{name}: no truth yet", file=sys.stderr)
            left.append(name)
            continue
        try:
            cases[name] = examine(case, entry, kept, tick)
            print(f"{name}: {json.dumps(cases[name])}", file=sys.stderr)
        except truth.OutOfTime:
            left.append(name)
    found = {q: t.to_json() for q, t in tallies(cases).items()}
    return {"half": half, "left": left, "questions": found, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--half", choices=collection.HALVES, required=True)
    parser.add_argument("--minutes", type=float, default=3.5, help="Train no plan after this.")
    parser.add_argument("--docs", action="store_true", help="Print the table of the documentation.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = score(options.half, options.names, options.minutes)
    if not options.names:
        path = RESULTS / f"cases-{options.half}.json"
        path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if options.docs:
        print(docs_table(results))
        return
    for question, tally in results["questions"].items():
        print(f"{question}: {tally['positives']} yes, {tally['negatives']} no")
        for what in ("precision", "recall"):
            s = tally[what]
            told = "–" if s is None else f"{s['share']:.2f} ({s['low']:.2f} to {s['high']:.2f})"
            print(f"    {what} {told}")
        for mistake in tally["mistakes"]:
            print(f"    {mistake}")
    if results["left"]:
        print(f"call again: {len(results['left'])} left ({', '.join(results['left'])})")


if __name__ == "__main__":
    main()
