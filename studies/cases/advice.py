"""Trains cases by the plans of their analyses: does the advice hold, and is all of it needed?

A plan is trained as a user would train by it (``mpdiag.MixedPrecision``, emulated), with the seeds and
by the rule of failure of ``truth.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

import torch

import mpdiag
from cases import collection, truth
from mpdiag.errors import TrainingDiverged, UsageError
from mpdiag.numerics.autocast_lists import CALLED_AS, LISTS, policy_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from cases.arithmetic import Operation
    from cases.case import Case
    from mpdiag.plan import PrecisionPlan


class PlanTrainings:
    """Metrics of trainings by a plan, kept by a hash of case and plan."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def metrics(self, case: Case, plan: PrecisionPlan) -> dict[str, float | None]:
        """What is known of a plan's trainings of a case: metrics by seed, None where one failed."""
        text = json.dumps([collection.fingerprint(case), case.name, _essence(plan)], sort_keys=True)
        entry = self._known.setdefault(hashlib.sha256(text.encode()).hexdigest()[:16], {})
        found: dict[str, float | None] = entry.setdefault("metrics", {})
        return found

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._known, indent=1) + "\n")


def _essence(plan: PrecisionPlan) -> Any:
    """What of a plan decides its training."""
    left_out = ("reason", "evidence", "need", "recommended", "lower", "upper")
    return [
        plan.level,
        plan.target,
        sorted((c.module, c.op) for c in plan.fp32_operations),
        sorted(c.module for c in plan.fp32_modules),
        {k: v for k, v in plan.to_json()["loss_scale"].items() if k not in left_out},
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
        if "without overflow" in str(error):  # a constant that the format cannot hold
            return math.nan
        raise
    with torch.no_grad():
        metric = float(training.evaluate())
    return metric if math.isfinite(metric) else math.nan


def fails(
    plan: PrecisionPlan,
    case: Case,
    bench: truth.Bench,
    kept: PlanTrainings,
    tick: Callable[[], None],
) -> bool:
    """Whether most seeds are worse than FP32; the third is trained where two disagree."""
    bound, count = bench.tolerance(), 0
    metrics = kept.metrics(case, plan)
    for i, seed in enumerate(truth.SEEDS):
        if str(seed) not in metrics:
            value = train_by(plan, case, seed, tick)
            metrics[str(seed)] = float(f"{value:.6g}") if math.isfinite(value) else None
            kept.save()
        known = metrics[str(seed)]
        count += bench.is_worse(math.nan if known is None else known, seed, bound)
        if i == 1 and count != 1:
            break
    return count >= 2


# -- the operations that a plan names --------------------------------------------------------------


def named(plan: PrecisionPlan) -> list[Operation]:
    """What a plan puts into FP32 beyond autocast's lists, in its order; a module has no operation."""
    whole = {c.module for c in plan.fp32_modules}
    found = {(module, ""): None for module in sorted(whole)}
    for c in plan.fp32_operations:
        if c.evidence.get("policy") or LISTS.get(policy_name(c.op)) == "fp32":
            continue
        if c.module not in whole or not c.evidence.get("type"):
            found[c.module, c.op] = None
    return list(found)


def without(plan: PrecisionPlan, gone: Collection[Operation]) -> PrecisionPlan:
    """A plan that leaves some of its named operations to autocast."""
    modules = {module for module, op in gone if not op}

    def stays(module: str, op: str, *, whole: bool) -> bool:
        return not (module in modules and whole) and (module, op) not in gone

    return dataclasses.replace(
        plan,
        fp32_modules=tuple(c for c in plan.fp32_modules if c.module not in modules),
        fp32_operations=tuple(
            c
            for c in plan.fp32_operations
            if stays(c.module, c.op, whole=bool(c.evidence.get("type")))
        ),
    )


def needed(
    plan: PrecisionPlan, operations: Collection[Operation], holds: Callable[[PrecisionPlan], bool]
) -> list[Operation]:
    """Which of a plan's operations its training needs.

    They are left out one at a time, in the plan's order, as long as training without them holds; what is
    left is a smallest set. Where either of two would do, one of them is needed and the other is not.
    """
    gone: list[Operation] = []
    for one in operations:
        if holds(without(plan, [*gone, one])):
            gone.append(one)
    return [o for o in operations if o not in gone]


def means(said: Operation, operation: Operation) -> bool:
    """Whether a plan's choice is this operation, or a module around it."""
    module, op = operation
    if not said[1]:
        return said[0] == module or module.startswith(f"{said[0]}.") or not said[0]
    return said[0] == module and op in {said[1], policy_name(said[1]), *CALLED_AS.get(said[1], ())}
