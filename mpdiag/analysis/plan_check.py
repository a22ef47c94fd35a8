"""Does a stored plan still hold? For CI: only what a change broke counts, not what was always so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpdiag.analysis.findings import Finding
from mpdiag.errors import UsageError
from mpdiag.numerics.formats import FORMATS
from mpdiag.plan import NO_SCALE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpdiag.plan import Fp32Choice, LossScalePlan, PrecisionPlan


@dataclass(frozen=True)
class PlanCheck:
    """A plan held against a later run.

    Attributes:
        findings: What this run needs and the plan does not give, errors first; empty if it holds.
    """

    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether the plan can be kept."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """One sentence."""
        return "The plan still holds." if self.holds else "The plan no longer holds."

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verdict": self.verdict,
            "holds": self.holds,
            "findings": [finding.to_json() for finding in self.findings],
        }


def check_plan(plan: PrecisionPlan, now: PrecisionPlan) -> PlanCheck:
    """Hold a stored plan against the plan of a new recording.

    Args:
        plan: What trainings go by.
        now: What the new recording needs.

    Raises:
        UsageError: If they are for different formats.
    """
    if plan.target != now.target:
        name = FORMATS[plan.target].label if plan.target in FORMATS else plan.target
        message = f"the plan to hold against is for {name}: analyze with --target {plan.target}"
        raise UsageError(message)
    found = [
        *_scale(plan.loss_scale, now.loss_scale),
        *_operations(plan, now),
        *_masters(plan, now),
    ]
    return PlanCheck(tuple(sorted(found, key=lambda f: f.severity != "error")))


def _scale(plan: LossScalePlan, now: LossScalePlan) -> Iterator[Finding]:
    """The scales that the plan can take, against those that this run admits."""
    if plan.adaptive:
        lowest, highest = plan.min_scale, plan.max_scale
    else:
        lowest = highest = plan.recommended
    has = "no loss scale" if plan.method == NO_SCALE else f"a loss scale of {highest:g}"
    limits = {"lower": now.lower, "upper": now.upper, "plan": plan.recommended}
    if highest < now.lower and now.need != "not needed":
        yield Finding(
            severity="error" if now.needed else "warning",
            code="plan-scale-too-small",
            message=f"the plan has {has}, and this run needs {now.lower:g} or more: {now.reason}",
            evidence=limits,
            fix=f"scale the loss by {now.recommended:g}, or find what made the gradients smaller",
        )
    elif now.upper is not None and lowest > now.upper:
        yield Finding(
            severity="error",
            code="plan-scale-too-large",
            message=f"the plan has {has}, and this run overflows from {now.upper:g} on",
            evidence=limits,
            fix=f"scale the loss by {now.recommended:g}, or find what made the gradients larger",
        )


def _operations(plan: PrecisionPlan, now: PrecisionPlan) -> Iterator[Finding]:
    """Operations proven to need FP32 that the plan leaves narrow; lines may have moved."""
    kept = Counter(map(_identity, plan.fp32_operations))
    whole = {choice.module for choice in plan.fp32_modules if not choice.op}
    for choice in now.fp32_operations:
        evidence = choice.evidence
        if evidence.get("policy") is not False or choice.module in whole:
            continue
        kept[_identity(choice)] -= 1
        if kept[_identity(choice)] < 0:
            where = choice.module or "the model"
            line = f" at {evidence['line']}" if evidence.get("line") else ""
            yield Finding(
                severity="error",
                code="plan-lacks-operation",
                message=f"{choice.op} in {where}{line} needs FP32, and the plan does not keep it there: "
                f"{choice.reason}",
                evidence=dict(evidence),
                fix=str(evidence.get("fix") or "keep it in FP32"),
            )


def _identity(choice: Fp32Choice) -> tuple[Any, ...]:
    """What stays the same of an operation when lines above it come and go."""
    return choice.op, choice.module, choice.evidence.get("rule"), choice.evidence.get("code")


def _masters(plan: PrecisionPlan, now: PrecisionPlan) -> Iterator[Finding]:
    if now.master_weights.needed and plan.level == "O3":
        yield Finding(
            severity="error",
            code="plan-lacks-masters",
            message=f"the plan's level O3 has no FP32 masters: {now.master_weights.reason}",
            evidence=dict(now.master_weights.evidence),
            fix="train at level O1 or O2",
        )
