"""The verdict of an analysis: why no answer is possible, what trainings showed, what is expected.

A recording is of an FP32 training. That nothing in it leaves a format's range does not show that a
training in that format ends as well: rounding, and what was not recorded, stay open. So a recording
alone gives an expectation, with its evidence and with what was not looked at; only a training by the
plan shows more.
"""

from collections.abc import Iterator

from mpdiag.analysis.recording_checks import FEW_STEPS, NOT_FP32, WIDER_THAN_FP32
from mpdiag.analysis.scaling.necessity import NEEDED
from mpdiag.analysis.verdict.evidence import Case, evidence_of, failure_of, not_examined_in
from mpdiag.display.wording import counted, percent, scale_text, spoken_layer, spoken_layers
from mpdiag.numerics.distributions import largest_share
from mpdiag.numerics.formats import TRAINABLE
from mpdiag.plan import NO_SCALE, Verdict
from mpdiag.runs.coverage import stepped_in
from mpdiag.runs.results import StoredComparison


def judge(case: Case) -> Verdict:
    """The verdict on training in the target format by the plan."""
    evidence, open_questions = tuple(evidence_of(case)), tuple(not_examined_in(case))
    trained = case.trained
    unfit = unanswered(case) or None
    if unfit is None and trained is not None and trained.verdict == "equivalent":
        text = f"{_how(case, 'works')} Shown by training: {how_ended(trained)}, equivalent to FP32."
        return Verdict("shown", text, evidence, open_questions)
    reason = unfit or next(_why_not(case), None)
    if reason is not None:
        return Verdict("cannot", _failed_first(case, reason), evidence, open_questions)
    text = f"{_how(case, 'should work')}{_bound(case)}{_rounded(case)}"
    if case.run_again == () and trained is None:
        text += " No step was run again, so the effect of rounding on the gradients is unknown."
    if trained is not None:
        text += f" {outcome(trained)}."
    text += f" ({case.extent.steps()} recorded{_few(case)})"
    return Verdict("expected", _failed_first(case, text), evidence, open_questions)


def unanswered(case: Case) -> str:
    """Why the recording allows no answer, as a sentence; empty if it allows one."""
    return next(_why_unfit(case), "")


def _why_unfit(case: Case) -> Iterator[str]:
    """Why the recording allows no answer, the reason that goes before the others first."""
    fmt, codes = case.target.label, case.codes
    steps = case.extent.steps()
    if failure_of(case.run) and case.extent.recorded < FEW_STEPS:
        yield f"The recording is too short ({steps}) to say whether {fmt} works."
    if codes & {"non-finite-gradients", "non-finite-losses", "exploding-gradients"}:
        label = case.run.half_precision.label
        yield f"This training diverges in {label}: fix that before you change the format."
    if "no-activation-gradients" in codes:
        yield f"The recording has no activation gradients, so it cannot show whether {fmt} works."
    yield from _not_a_training_in_fp32(case)
    if case.trained is None or case.trained.verdict != "equivalent":
        for optimizer in stepped_in(case.run):
            if optimizer.unseen:
                yield (
                    f"No step of {optimizer.kind} was recorded ({counted(optimizer.taken, 'step')} of "
                    f"{case.extent.seen:,}), so the recording cannot show whether {fmt} works."
                )


def _why_not(case: Case) -> Iterator[str]:
    """Why a training would fail, or did."""
    fmt = case.target.label
    if case.trained is not None and case.trained.verdict == "different":
        yield (
            f"{fmt} does not work with this plan: {how_ended(case.trained)}, which differs from FP32."
        )
    if not case.scale.fits:
        suits = case.target.name != "bf16" and "bf16-precision" not in case.codes
        yield f"{fmt} does not work with any loss scale{'; try BF16' if suits else ''}."
    for f in case.unmended[:1]:
        yield (
            f"{fmt} does not work with this code, and no plan can change that: {f.subject}: {f.reason}. "
            f"{f.fix[:1].upper()}{f.fix[1:]}."
        )
    for optimizer in stepped_in(case.run):
        if optimizer.searches:
            yield (
                f"{optimizer.kind} compares {optimizer.evaluations:,} evaluations of its loss, and "
                f"{fmt} rounds them: an FP32 recording does not show where its search ends. Train by "
                "the plan, and compare."
            )


def _not_a_training_in_fp32(case: Case) -> Iterator[str]:
    fmt, codes = case.target.label, case.codes
    weights = next((f for f in case.findings if f.code == NOT_FP32), None)
    dtypes = frozenset(weights.evidence.get("dtypes") or ()) if weights is not None else frozenset()
    narrow = "" if case.rounded_to else _narrow(case)
    if dtypes and dtypes <= WIDER_THAN_FP32:
        yield (
            f"This recording is of a training in {' and '.join(sorted(dtypes))}: it does not show "
            f"whether FP32 works, and so not whether {fmt} does."
        )
    elif narrow:
        yield (
            f"This recording is not of an FP32 training ({narrow}), so it cannot show what {fmt} loses."
        )
    if "no-optimizer" in codes:
        yield (
            "This recording has no optimizer and no weight update, so it cannot show whether "
            f"{fmt} works."
        )
    if "no-optimizer-step" in codes:
        yield (f"The recording has no optimizer step, so it cannot show whether {fmt} works.")


def _narrow(case: Case) -> str:
    """What of the recorded training is not FP32, as a clause; empty if all of it is."""
    found = next((f for f in case.findings if f.code == NOT_FP32), None)
    if found is None:
        half = case.run.half_precision
        return f"it computes in {half.label}" if half.computed else ""
    evidence = found.evidence
    if "autocast" in evidence:
        return f"the script used autocast in {' and '.join(evidence['autocast'])}"
    if "half_modules" in evidence:
        return f"{counted(evidence['half_modules'], 'module')} returned half precision"
    if "policies" in evidence:
        return f"{' and '.join(sorted(evidence['policies']))} casts its weights to half precision"
    if "not_switched_off" in evidence:
        return f"--fp32 could not switch off {evidence['not_switched_off'][0]}"
    if "half_products" in evidence:
        return "its own code computes products in half precision"
    of = "" if evidence["share"] == 1 else f"{percent(evidence['share'], 1)} of "
    return f"{of}its weights are {' and '.join(evidence['dtypes'])}"


def _failed_first(case: Case, text: str) -> str:
    """The text, after the failure of the recording if there was one."""
    failure = failure_of(case.run)
    return f"{failure} {text}" if failure else text


def _how(case: Case, works: str) -> str:
    """How it trains, or, where nothing here computes in the format, whether it fits, in sentences."""
    fmt, plan, rest = case.target.label, case.scale.plan, _kept(case)
    scale = scale_text(plan.recommended)
    if case.target not in TRAINABLE:
        return f"The values fit {fmt} with a scale per tensor{rest}. To train, use --target fp8-tensor."
    if plan.need == "needed":
        return f"{fmt} {works} with a loss scale of {scale}{rest}. Without one, {_harm(case)}."
    if plan.need == "advisable":
        return f"{fmt} {works}{rest}. A loss scale of {scale} is recommended."
    if plan.method != NO_SCALE:
        return (
            f"{fmt} {works}{rest}. Its gradients come close to {fmt}'s largest value: a loss scale of "
            f"{scale} leaves them room."
        )
    return f"{fmt} {works} without a loss scale{rest}."


def _harm(case: Case) -> str:
    """What happens without a loss scale, in a clause."""
    figures, layer = case.scale.figures, case.scale.deciding_layer
    over, pooled = figures.find("overflowing-unscaled"), figures.find("all-weights-sum")
    if over is not None and over.count:
        return "gradients overflow"
    if pooled is not None:
        return f"all weights together lose {pooled.said} of their gradient"
    lost = figures.find("layer-sum", layer)
    # Many small values decide, see ``describe_necessity``.
    if lost is not None and lost.value < NEEDED:
        values = figures.said("layer-values", layer)
        return f"{spoken_layer(layer)} loses {values} of its gradient's values"
    return f"{spoken_layer(layer)} loses {figures.said('layer-sum', layer)} of its gradient"


def _kept(case: Case) -> str:
    """What must stay in FP32, in a phrase; empty if nothing."""
    parts = []
    if case.fp32_modules:
        parts.append(f"{counted(case.fp32_modules, 'overflowing module')} in FP32")
    parts += [f"{spoken_layer(module)} in FP32" for module in case.scale.fp32_modules]
    lines = sum(f.code.startswith("operation-") for f in case.findings)
    if lines:
        code = counted(lines, "line of code", "lines of code")
        parts.append(f"{code} kept in FP32 or rewritten")
    return f", with {' and '.join(parts)}" if parts else ""


def _few(case: Case) -> str:
    """How little few steps bound, after the extent.

    The verdict is ``expected`` from one step on, for a recording has no failure to show before
    training; a failure that none of n steps shows may still be in a share of 1 - 0.05^(1/n) of all.
    """
    if case.extent.recorded >= FEW_STEPS or case.extent.recorded < 1:
        return ""
    share = percent(largest_share(0, case.extent.recorded))
    return f"; a fault that they do not show may be in up to {share} of all steps, with 95 % confidence"


def _bound(case: Case) -> str:
    """What part of the model the verdict does not hold for; empty if it holds for all of it."""
    seen = case.extent.seen_of_the_model()
    beyond = sorted(case.scale.out_of_reach)
    lost = f"{case.target.label} loses the gradient of {spoken_layers(beyond)} at every loss scale"
    return (f" But {lost}." if beyond else "") + (f" mpdiag recorded only {seen}." if seen else "")


def _rounded(case: Case) -> str:
    """That figures are of values which were rounded before, in a sentence; empty if they were not."""
    if case.rounded_to is None:
        return ""
    return (
        f" The recording is not of an FP32 training ({_narrow(case)}), so these figures are bounds, up "
        f"to one rounding to {case.rounded_to.label}."
    )


def outcome(trained: StoredComparison) -> str:
    """How trainings by the plan ended beside FP32, by the metric that the script logs first."""
    one = trained.seeds == 1
    whose = "A training by this plan" if one else f"{trained.seeds} trainings by this plan"
    return f"{whose} ended {trained.answer}" + "".join(f": {m}" for m in trained.metrics[:1])


def how_ended(trained: StoredComparison) -> str:
    """How trainings by the plan ended, in a clause."""
    metrics = ", ".join(trained.metrics) or "its metrics"
    return f"{trained.against} ({counted(trained.seeds, 'seed')}) ended with {metrics}"
