"""Checks in CI whether a stored plan still holds: only regressions count."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpdiag.analysis.findings import Finding, by_severity, error, info, warning
from mpdiag.display.wording import scale_text
from mpdiag.errors import InputError, UsageError
from mpdiag.numerics.block_recipes import format_label
from mpdiag.plan import NO_SCALE, Fp32Choice, LossScalePlan, PrecisionPlan
from mpdiag.tracing.conditions import changes
from mpdiag.tracing.fingerprint import compare_models, other_model


@dataclass(frozen=True)
class PlanCheck:
    """The result of checking a plan against a later run.

    Attributes:
        findings: What this run needs and the plan lacks, errors first; then, as notes, where the
            model is not the plan's, or that this is not known.
        of_this_model: Whether the plan is of this model; None if it does not say.
    """

    findings: tuple[Finding, ...]
    of_this_model: bool | None = True

    @property
    def holds(self) -> bool:
        """Whether the plan can be kept."""
        return all(finding.severity == "info" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """Whether the plan holds, in one sentence."""
        if not self.holds:
            return "The plan no longer holds."
        if self.of_this_model is None:
            return "The plan still holds, if it is a plan of this model."
        return "The plan still holds."

    def to_json(self) -> dict[str, Any]:
        """The verdict and findings as plain values."""
        return {
            "verdict": self.verdict,
            "holds": self.holds,
            "of_this_model": self.of_this_model,
            "findings": [finding.to_json() for finding in self.findings],
        }


def check_plan(plan: PrecisionPlan, now: PrecisionPlan, unanswered: str = "") -> PlanCheck:
    """Check a stored plan against the plan of a new recording.

    Args:
        plan: The stored plan, which trainings use.
        now: The plan of the new recording.
        unanswered: Why that recording allows no answer, as a sentence; empty if it allows one.

    Raises:
        UsageError: If they are for different formats.
        InputError: If the plan is of another model.
    """
    if plan.aim != now.aim:
        words = f"the stored plan is for {format_label(plan.aim)}: analyze with --target {plan.aim}"
        raise UsageError(words)
    found = [
        *_unanswered(now, unanswered),
        *_scale(plan.loss_scale, now.loss_scale),
        *_operations(plan, now),
        *_products(plan, now),
        *_masters(plan, now),
        *_model(plan, now),
        *_conditions(plan, now),
    ]
    known = None if plan.model is None or now.model is None else True
    return PlanCheck(by_severity(found), known)


def _model(plan: PrecisionPlan, now: PrecisionPlan) -> Iterator[Finding]:
    """Whether the run trains the plan's model; an edited one is a note, for layers come and go.

    Raises:
        InputError: If it is another model.
    """
    if plan.model is None or now.model is None:
        whose = "the plan" if plan.model is None else "the run"
        yield info(
            code="plan-model-unknown",
            message=f"{whose} does not store which model it is for, so mpdiag did not check this",
            evidence={"plan": plan.model is not None, "run": now.model is not None},
            fix="write the plan again with mpdiag analyze RUN -o PLAN",
        )
        return
    difference = compare_models(plan.model, now.model)
    if difference.disjoint:
        raise InputError(other_model(difference, plan.model, now.model, "run"))
    prefix = difference.first_prefix or difference.second_prefix
    if not (difference.changes or prefix):
        return
    whose = "plan" if difference.first_prefix else "run"
    below = f"compared with {prefix} of the {whose}" if prefix else ""
    yield info(
        code="plan-model-differs",
        message="the model has changed since the plan: "
        + "; ".join(filter(None, (difference.changes, below))),
        evidence={
            "changed": list(difference.changed),
            "new": list(difference.only_second),
            "gone": list(difference.only_first),
            "plan_prefix": difference.first_prefix,
            "run_prefix": difference.second_prefix,
        },
        fix="the check holds for this run's layers; a new plan would name the new layers, too",
    )


def _conditions(plan: PrecisionPlan, now: PrecisionPlan) -> Iterator[Finding]:
    """What is not as it was recorded for the plan; each is a note, for this run answers anew."""
    if plan.conditions is None or now.conditions is None:
        return
    for change in changes(plan.conditions, now.conditions):
        yield info(
            code="plan-training-differs",
            message=str(change),
            evidence=vars(change),
            fix=f"compare with a new plan of this run: {change.touches}",
        )


def _unanswered(now: PrecisionPlan, why: str) -> Iterator[Finding]:
    """That the new recording cannot tell: one without an optimizer, say, confirms no plan."""
    if now.loss_scale.need == "unknown":
        why = now.loss_scale.reason
    if why:
        yield error(
            code="plan-not-checked",
            message=f"this run cannot show whether the plan holds: {why.rstrip('.')}",
            evidence={"level": now.verdict.level},
            fix="record an FP32 training that converges, with its optimizer, and check again",
        )


def _scale(plan: LossScalePlan, now: LossScalePlan) -> Iterator[Finding]:
    """Compare the scales that the plan can use with those that this run allows."""
    if now.need == "unknown":  # which the verdict says
        return
    if plan.adaptive:
        lowest, highest = plan.min_scale, plan.max_scale
    else:
        lowest = highest = plan.recommended
    has = "no loss scale" if plan.method == NO_SCALE else f"a loss scale of {scale_text(highest)}"
    lower, recommended = scale_text(now.lower), scale_text(now.recommended)
    limits = {"lower": now.lower, "upper": now.upper, "plan": plan.recommended}
    if highest < now.lower and now.need != "not needed":
        yield Finding(
            severity="error" if now.needed else "warning",
            code="plan-scale-too-small",
            message=f"the plan has {has}, but this run needs {lower} or more: {now.reason}",
            evidence=limits,
            fix=f"scale the loss by {recommended}, or find what made the gradients smaller",
        )
    elif now.upper is not None and lowest > now.upper:
        yield error(
            code="plan-scale-too-large",
            message=f"the plan has {has}, but this run overflows above {scale_text(now.upper)}",
            evidence=limits,
            fix=f"scale the loss by {recommended}, or find what made the gradients larger",
        )


def _operations(plan: PrecisionPlan, now: PrecisionPlan) -> Iterator[Finding]:
    """Operations that provably need FP32 and that the plan leaves narrow; their lines may have moved."""
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
            yield error(
                code="plan-lacks-operation",
                message=f"{choice.op} in {where}{line} needs FP32, but the plan does not keep it there: "
                f"{choice.reason}",
                evidence=dict(evidence),
                fix=str(evidence.get("fix") or "keep it in FP32"),
            )


def _products(plan: PrecisionPlan, now: PrecisionPlan) -> Iterator[Finding]:
    """Products that the plan quantises to a block format and that should now stay in BF16."""
    stored = {(c.module, c.parameter): c for c in plan.blocks.layers} if plan.blocks else {}
    for layer in now.blocks.layers if now.blocks else ():
        planned = stored.get((layer.module, layer.parameter))
        wide = (
            [gemm for gemm in planned.quantised if gemm not in layer.quantised] if planned else []
        )
        if wide:
            yield warning(
                code="plan-lacks-operation",
                message=f"{', '.join(wide)} of {layer.module or 'the model'} should stay in BF16, but "
                f"the plan quantises them: {layer.reason}",
                evidence=dict(layer.evidence),
                fix="write the plan again",
            )


def _identity(choice: Fp32Choice) -> tuple[Any, ...]:
    """What identifies an operation even if lines above it are added or removed."""
    return choice.op, choice.module, choice.evidence.get("rule"), choice.evidence.get("code")


def _masters(plan: PrecisionPlan, now: PrecisionPlan) -> Iterator[Finding]:
    if now.master_weights.needed and plan.level == "O3":
        yield error(
            code="plan-lacks-masters",
            message=f"the plan's level O3 has no FP32 masters: {now.master_weights.reason}",
            evidence=dict(now.master_weights.evidence),
            fix="train at level O1 or O2",
        )
