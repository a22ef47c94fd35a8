"""What a verdict rests on: the steps and shares that were recorded, and what was not looked at."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.findings import Finding
from mpdiag.analysis.operations.rules import OperationFinding
from mpdiag.analysis.scaling.loss_scale import LossScaleAnalysis
from mpdiag.analysis.scaling.windows import unseen_windows
from mpdiag.display.wording import counted, enumerated, percent, scale_text, spoken_layer
from mpdiag.numerics.formats import TRAINABLE, FloatFormat
from mpdiag.plan import NO_SCALE
from mpdiag.runs import coverage
from mpdiag.runs.coverage import stepped_in
from mpdiag.runs.results import StoredComparison
from mpdiag.runs.run import Run
from mpdiag.runs.training_log import read_recorded


@dataclass(frozen=True)
class Case:
    """All that a verdict is judged by.

    Attributes:
        run: The recording.
        target: The format to train in.
        scale: The loss scale.
        findings: All findings.
        extent: What was recorded.
        trained: What a comparison said of trainings by this very plan; None without one.
        superseded: Whether a comparison is in the run, but of another plan.
        fp32_modules: How many modules with overflowing values the plan keeps in FP32.
        unmended: Operations that go wrong and that no plan can keep in FP32.
        run_again: The steps of which the effect of rounding was measured; None where no operations were
            recorded.
    """

    run: Run
    target: FloatFormat
    scale: LossScaleAnalysis
    findings: tuple[Finding, ...]
    extent: "Extent"
    trained: StoredComparison | None = None
    superseded: bool = False
    fp32_modules: int = 0
    unmended: tuple[OperationFinding, ...] = ()
    run_again: tuple[int, ...] | None = None

    @property
    def rounded_to(self) -> FloatFormat | None:
        """The format that the recorded values were rounded to, if it answers for the target."""
        stored = self.run.half_precision.rounded_to
        return None if stored == self.target else stored

    @property
    def codes(self) -> frozenset[str]:
        """The codes of all findings."""
        return frozenset(f.code for f in self.findings)


def evidence_of(case: Case) -> Iterator[str]:
    """What the verdict rests on."""
    trained, extent, scale = case.trained, case.extent, case.scale
    if trained is not None:
        metrics = ", ".join(trained.metrics)
        yield f"a training by this plan, {trained.against}, ended {trained.answer} ({metrics})"
    where = f", from step {extent.first} to step {extent.last}" if extent.recorded else ""
    yield f"{extent.steps()} recorded{where}"
    if scale.limiting_layer is not None:
        yield _overflows(case.target, scale)
    yield from _losses(scale)
    operations = (case.run.meta.get("operations") or {}).get("steps") or []
    if operations and not case.run.half_precision.computed:
        yield f"the values of every operation in {counted(len(operations), 'step')}"


def _losses(scale: LossScaleAnalysis) -> Iterator[str]:
    """What the layer that decides loses without a scale, and where."""
    figures, layer = scale.figures, scale.deciding_layer
    lost = None if layer is None else figures.find("layer-sum", layer)
    if lost is None:
        return
    most = lost.layer == figures.layers()[0]
    judged = "a loss scale can help" if scale.out_of_reach else "moves weights"
    which = "" if most else f" that {judged}"
    if lost.value == 0:
        yield f"{lost.at_scale}, no layer{which} loses any of its gradient {lost.where}"
    elif most or scale.plan.need != "needed":
        of = f" of each layer{which}" if which else ""
        yield (
            f"{lost.at_scale}, {spoken_layer(lost.layer)} loses the most{of}: {lost.said} of its "
            f"gradient {lost.where}"
        )
    else:
        yield (
            f"{lost.at_scale}, {spoken_layer(lost.layer)} loses "
            f"{figures.said('layer-values', lost.layer)} of its gradient's values, and {lost.said} of "
            f"their sum, {lost.where}"
        )


def _overflows(target: FloatFormat, scale: LossScaleAnalysis) -> str:
    """How many recorded steps overflow, and what that allows at most."""
    plan, seen = scale.plan, scale.figures.find("overflowing-steps")
    at = "" if plan.method == NO_SCALE else f" at a loss scale of {scale_text(plan.recommended)}"
    if plan.adaptive:
        at = f" under the plan's scale ({plan.method} from {scale_text(plan.init_scale)})"
    count, of = (0, 0) if seen is None else (seen.count or 0, seen.of or 0)
    return (
        f"gradients overflow {target.label}{at} in {count:,} of {counted(of, 'recorded step')} (at most "
        f"{scale.figures.said('overflow-bound')} of all steps, 95 % confidence)"
    )


def not_examined_in(case: Case) -> Iterator[str]:
    """What was not checked, and so may still fail."""
    run, extent = case.run, case.extent
    if extent.seen > extent.recorded:
        yield f"{extent.seen - extent.recorded:,} of {extent.seen:,} steps"
    for name in extent.unseen_parts:
        yield f"{name} (no step recorded)"
    yield from _not_examined_of_optimizers(run, case.target)
    state = run.meta.get("state")
    if state in ("recording", "interrupted", "failed"):
        ended = {"recording": "has not ended", "interrupted": "was interrupted"}
        yield f"the steps after {extent.last:,} (the run {ended.get(state, 'failed')})"
    if case.scale.void:
        return
    yield from _not_trained(case)
    yield from _not_seen_in_operations(case)
    precision = run.meta.get("precision")
    if not isinstance(precision, dict):
        yield "whether the script used autocast"
    unseen = extent.unseen_of_the_model()
    if unseen:
        yield unseen
    compiled = (run.meta.get("coverage") or {}).get("compiled") or {}
    if compiled_by_inductor(run):
        yield f"{SAME_BITS} (--probe compares losses)"
    if hidden := compiled.get("parameters_hidden"):
        total = int((run.meta.get("model") or {}).get("parameters") or hidden)
        flops = int(compiled.get("flops") or 0)
        work = (
            f", {percent(compiled['flops_hidden'] / flops)} of the forward FLOPs" if flops else ""
        )
        share = f"{percent(hidden / total)} of the parameters{work}"
        yield f"modules that compiled graphs may hide ({share})"


def compiled_by_inductor(run: Run) -> bool:
    """Whether inductor may have compiled modules of the run: what reads a value changes its fusion."""
    compiled = (run.meta.get("coverage") or {}).get("compiled") or {}
    return bool(compiled.get("modules") and compiled.get("inductor", 1))


def fp32_losses_of_inductor(run: Run) -> dict[int, float] | None:
    """The losses of an FP32 recording that inductor compiled, by step; None of another.

    Raises:
        InputError: If its log cannot be read.
    """
    if not compiled_by_inductor(run) or run.half_precision.computed:
        return None
    return {s.step: s.loss for s in read_recorded(run.folder) if s.loss is not None}


def _not_seen_in_operations(case: Case) -> Iterator[str]:
    """Values that no recorded operation showed as FP32 has them."""
    steps = (case.run.meta.get("operations") or {}).get("steps") or []
    if case.rounded_to is not None:
        yield f"what {case.rounded_to.label} rounded away; sensitive operations (--fp32 shows both)"
    elif not steps:
        yield "values inside operations (none recorded)"
    elif (last := max(steps)) < case.extent.last:
        yield f"values inside operations after step {last:,}"


def _not_trained(case: Case) -> Iterator[str]:
    """What a training by the plan would have shown."""
    if case.target not in TRAINABLE:
        yield f"an actual {case.target.label} training (mpdiag cannot run one)"
    elif case.trained is None:
        another = " (the compared one followed another plan)" if case.superseded else ""
        yield f"{UNTRIED} {case.target.label} training{another}"
        yield "accumulated rounding error"
    if case.trained is None:
        yield from _not_run_again(case.run_again)


def _not_run_again(steps: tuple[int, ...] | None) -> Iterator[str]:
    """Steps in which the effect of rounding on gradients is unknown; nothing without operations."""
    if steps:
        known = enumerated([f"{step:,}" for step in steps])
        if len(steps) > _FEW:
            known = f"{counted(len(steps), 'step')} from {steps[0]:,} to {steps[-1]:,}"
        else:
            known = f"{'step' if len(steps) == 1 else 'steps'} {known}"
        yield f"the effect of rounding on gradients, except in {known}"
    elif steps is not None:
        yield "the effect of rounding on gradients (no step was run again)"


def _not_examined_of_optimizers(run: Run, target: FloatFormat) -> Iterator[str]:
    for optimizer in stepped_in(run):
        if optimizer.unseen:
            yield f"{counted(optimizer.taken, 'step')} of {optimizer.kind} (none recorded)"
        if optimizer.searches:
            yield f"where the search of {optimizer.kind} ends in {target.label}"


def failure_of(run: Run) -> str:
    """That the recording failed or never ended, as a sentence; empty if it did not."""
    state, failures = run.meta.get("state"), run.meta.get("failures") or []
    if state == "recording":
        seen, moment = run.meta.get("steps_seen"), str(run.meta.get("updated") or "")
        written = f" (last written at step {seen:,}, {moment[:16].replace('T', ' ')} UTC)"
        return (
            f"The recording has not ended{written if isinstance(seen, int) and moment else ''}: it is "
            "running, was killed, or filled the disk."
        )
    if state != "failed":
        return ""
    if not failures:
        return f"The script failed after {counted(int(run.meta.get('steps_seen') or 0), 'step')}."
    first = failures[0]
    error = str(first.get("error") or "").strip()
    return f"The recording failed at step {first.get('step', 0)} ({error})."


SAME_BITS = "whether inductor computes the same bits without a recorder"
UNTRIED = "an actual"
"""How what only a training by the plan shows begins."""
_SHOWN_REASONS = 2
_FEW = 3
"""Steps that are named one by one."""


@dataclass(frozen=True)
class Extent:
    """What was recorded, beside what there was.

    Attributes:
        recorded, seen: Steps; ``seen`` is 0 where the run does not say.
        first, last: The first and the last recorded step; -1 without any.
        model: What of the model was seen; None where the run does not say.
        unseen_parts: Late parts of the training of which no step was recorded.
        reasons: Why gradients were not seen, each with how many, the most frequent first.
    """

    recorded: int
    seen: int
    first: int
    last: int
    model: coverage.Coverage | None
    unseen_parts: tuple[str, ...]
    reasons: tuple[tuple[str, int], ...]

    def steps(self) -> str:
        """The recorded steps: ``39 of 400 steps``."""
        if self.seen > self.recorded:
            return f"{self.recorded:,} of {self.seen:,} steps"
        return counted(self.recorded, "step")

    def seen_of_the_model(self) -> str:
        """What of the model was seen, in a phrase; empty if all of it was, or nothing is known."""
        return " and ".join(_gradients_of(self.model, seen=True))

    def unseen_of_the_model(self) -> str:
        """What of the model was not seen, with the reasons, in a clause; empty as above."""
        parts = list(_gradients_of(self.model, seen=False))
        why = ", ".join(f"{reason} ({n:,})" for reason, n in self.reasons[:_SHOWN_REASONS])
        return " and ".join(parts) + (f" ({why})" if parts and why else "")


def _gradients_of(model: coverage.Coverage | None, *, seen: bool) -> Iterator[str]:
    """The gradients that were seen, or those that were not, where some were not."""
    if model is not None and model.gradients_unseen:
        share = 1 - model.gradients_unseen if seen else model.gradients_unseen
        yield f"the gradients of {percent(share)} of the trained parameters"
    if model is not None and model.activation_gradients_unseen:
        count, of = model.activation_gradients_seen, model.activation_gradients
        yield f"the output gradients of {count if seen else of - count:,} of {of:,} modules"


def extent_of(run: Run, steps: NDArray[np.int64]) -> Extent:
    """What a run holds.

    Args:
        run: The run.
        steps: int64 (n,), the recorded steps with gradients, in order.
    """
    length = int(run.meta.get("steps_seen") or 0)
    return Extent(
        recorded=max(steps.size, int(run.meta.get("steps_recorded") or 0)),
        seen=length,
        first=int(steps[0]) if steps.size else -1,
        last=int(steps[-1]) if steps.size else -1,
        model=coverage.coverage_of(run),
        unseen_parts=unseen_windows(steps, length),
        reasons=_reasons(run),
    )


def _reasons(run: Run) -> tuple[tuple[str, int], ...]:
    """Why gradients of parameters and of outputs were not recorded, the most frequent reason first."""
    found: dict[str, int] = {}
    for item in (run.meta.get("coverage") or {}).get("not_recorded") or []:
        reason = str(item.get("reason") or "")
        needed = reason not in (coverage.FROZEN, coverage.UNTRAINED)
        if item.get("what") in ("parameter", "activation_grad") and needed:
            found[reason] = found.get(reason, 0) + 1
    return tuple(sorted(found.items(), key=lambda pair: -pair[1]))
