"""How the answers change with each threshold of the analysis, on the tuning half alone.

    python studies/cases/curves.py [THRESHOLD …] [--kept FOLDER]

Of each threshold and value: how many cases are found, missed and falsely said, in one question. Each
case is analyzed again from its recording; nothing is trained. *Names operations* stands for *operation
needs FP32* here: whether a plan names any, against whether FP16 fails at every scale.

The value is also chosen without each family of cases (each file of ``tuning/``) in turn, and that family
judged by it: the last line is what a value that was chosen this way would score on cases unlike its own.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpdiag
from cases import advice, collection, score, truth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cases.case import Case

Answers = dict[str, tuple[bool, bool]]
"""Of each case, whether something is so, and whether it was said."""


@dataclass(frozen=True)
class Threshold:
    """A threshold, where it stands, and what it decides.

    Attributes:
        places: Modules that hold it.
        name: Its name there.
        values: To try, the present one among them.
        target: The format that is analyzed for.
        question: A key of ``answers``.
    """

    places: tuple[str, ...]
    name: str
    values: tuple[float, ...]
    target: str
    question: str


_RULES = "mpdiag.analysis.operations.rules"
_PRECISION = "mpdiag.analysis.operations.precision_rules"
_NECESSITY = "mpdiag.analysis.scaling.necessity"
_SHARES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
THRESHOLDS = {
    "wrong": Threshold((_RULES,), "WRONG", _SHARES, "fp16", "operations"),
    "wrong-bf16": Threshold((_RULES,), "WRONG", _SHARES, "bf16", "bf16_fails"),
    "noise": Threshold((_PRECISION,), "NOISE", _SHARES, "fp16", "operations"),
    "noise-bf16": Threshold((_PRECISION,), "NOISE", _SHARES, "bf16", "bf16_fails"),
    "felt": Threshold((_RULES,), "FELT", (0.25, 0.5, 1.0, 2.0, 4.0), "fp16", "operations"),
    "felt-bf16": Threshold((_RULES,), "FELT", (0.25, 0.5, 1.0, 2.0, 4.0), "bf16", "bf16_fails"),
    "swallowed": Threshold((_RULES,), "SWALLOWED", (0.1, 0.25, 0.5, 0.75), "fp16", "operations"),
    "swallowed-bf16": Threshold(
        (_RULES,), "SWALLOWED", (0.1, 0.25, 0.5, 0.75), "bf16", "bf16_fails"
    ),
    "running": Threshold((_RULES,), "RUNNING", (2, 4, 8, 16, 32), "fp16", "operations"),
    "running-bf16": Threshold((_RULES,), "RUNNING", (2, 4, 8, 16, 32), "bf16", "bf16_fails"),
    "needed": Threshold((_NECESSITY,), "NEEDED", (0.1, 0.2, 0.25, 0.3, 0.5), "fp16", "needs_scale"),
    "needed-sum": Threshold(
        (_NECESSITY,), "NEEDED_SUM", (0.02, 0.05, 0.1, 0.15), "fp16", "needs_scale"
    ),
    "masters": Threshold(
        ("mpdiag.analysis.weight_updates",),
        "NEEDED",
        (0.02, 0.05, 0.1, 0.15, 0.2),
        "fp16",
        "needs_masters",
    ),
}


def answers(threshold: Threshold, kept: Path) -> dict[float, Answers]:
    """The answers of all settled cases, by value."""
    file = truth.TruthFile("tuning")
    found: dict[float, Answers] = {value: {} for value in threshold.values}
    for name, case in collection.load("tuning").items():
        known = file.entry(case)["truth"]
        if known is None:
            continue
        is_so = _is_so(known)[threshold.question]
        if is_so is None:
            continue
        run = mpdiag.open_run(score.record(case, kept))
        for value in threshold.values:
            with _set(threshold, value):
                found[value][name] = (is_so, _said(run, threshold))
    return found


def _is_so(known: dict[str, Any]) -> dict[str, bool | None]:
    return {
        "operations": not known["fp16_trains"],
        "bf16_fails": not known["bf16_trains"],
        "needs_scale": known["needs_scale"],
        "needs_masters": known["needs_masters"],
    }


def _said(run: mpdiag.Run, threshold: Threshold) -> bool:
    analysis = mpdiag.analyze(run, threshold.target)
    plan = analysis.plan
    if threshold.question == "needs_scale":
        return plan.loss_scale.needed
    if threshold.question == "needs_masters":
        return plan.master_weights.needed
    cannot = threshold.question == "bf16_fails" and analysis.verdict.level == "cannot"
    return cannot or bool(advice.named(plan))


@contextmanager
def _set(threshold: Threshold, value: float) -> Iterator[None]:
    """The threshold at another value, wherever it stands."""
    modules = [importlib.import_module(place) for place in threshold.places]
    before = [getattr(module, threshold.name) for module in modules]
    try:
        for module in modules:
            setattr(module, threshold.name, value)
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            setattr(module, threshold.name, old)


def counts(answered: Answers) -> Counter[str]:
    """How many answers were found, missed, false and rightly no."""
    names = {(True, True): "found", (True, False): "missed", (False, True): "false"}
    return Counter(names.get(a, "rest") for a in answered.values())


def f1(answered: Answers) -> float:
    """The harmonic mean of precision and recall."""
    n = counts(answered)
    of = 2 * n["found"] + n["false"] + n["missed"]
    return 2 * n["found"] / of if of else 1.0


def chosen_without_each(
    by_value: dict[float, Answers], families: dict[str, str], present: float
) -> tuple[Answers, dict[str, float]]:
    """Each family's answers at the value that is best without it; of equals the nearest to `present`."""
    answered: Answers = {}
    values: dict[str, float] = {}
    for family in sorted(set(families.values())):
        others = {
            value: {n: a for n, a in answers.items() if families[n] != family}
            for value, answers in by_value.items()
        }
        best = max(others, key=lambda v: (f1(others[v]), -abs(v - present)))
        values[family] = best
        answered |= {n: a for n, a in by_value[best].items() if families[n] == family}
    return answered, values


def family(case: Case) -> str:
    """The file that a case stands in."""
    return str(inspect.unwrap(case.build).__module__).rpartition(".")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("thresholds", nargs="*", choices=[[], *THRESHOLDS], metavar="THRESHOLD")
    parser.add_argument("--kept", type=Path, default=score.KEPT, help="Recordings.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    families = {name: family(case) for name, case in collection.load("tuning").items()}
    for key in options.thresholds or THRESHOLDS:
        threshold = THRESHOLDS[key]
        present = getattr(importlib.import_module(threshold.places[0]), threshold.name)
        print(f"{key}: {threshold.name}, {threshold.target}, {threshold.question}; now {present}")
        by_value = answers(threshold, options.kept)
        for value, answered in by_value.items():
            wrong = [n for n, (is_so, said) in answered.items() if is_so != said]
            print(f"  {value:<6g} F1 {f1(answered):.2f} {dict(counts(answered))} {' '.join(wrong)}")
        answered, values = chosen_without_each(by_value, families, present)
        print(f"  without each family: {dict(counts(answered))}, chosen {values}", flush=True)


if __name__ == "__main__":
    main()
