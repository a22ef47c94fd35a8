"""What is watched from step to step: counts, the run log, alarms, and when training must stop.

A scale that still falls is searching: from 2^16 to a scale of 8 takes 13 skips, none of which says
that anything is wrong. So skips count at an unchanged scale, or where no scale could help.

A plan is as good as its recording. ``DriftWatch`` compares the skips that a trainer sees, and now
and then its gradients, with the figures the plan was made from.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpdiag.analysis.findings import Finding
from mpdiag.display.wording import percent
from mpdiag.errors import TrainingDiverged
from mpdiag.plan import PrecisionPlan
from mpdiag.tracing.precision_share import PrecisionShare
from mpdiag.training.callers import loop_stacklevel
from mpdiag.training.judgement import norms, values_of
from mpdiag.training.results import StepResult
from mpdiag.training.run_log import RunLog
from mpdiag.training.tensor_core_check import TensorCoreCheck

LOOK_EVERY = 50
WINDOW = 200
ALLOWED_OCTAVES = 2.0
"""Growth of the largest gradient beyond the recorded one that a plan's headroom covers."""
ALLOWED_ZEROS = 0.25
"""Further share of gradients that are zero before it is an alarm."""
SURPRISE = 1e-4
"""How unlikely so many skips must be, if the plan were right."""


@dataclass(frozen=True)
class Alarm:
    """Something that the recording did not predict.

    Attributes:
        alarm: ``overflow``, ``magnitude`` or ``underflow``.
        step: When it was seen.
        predicted, observed: The figure, by the plan and now.
        message: A sentence.
    """

    alarm: str
    step: int
    predicted: float
    observed: float
    message: str

    def to_json(self) -> dict[str, Any]:
        """A line of ``training.jsonl``."""
        return asdict(self)


class DriftWatch:
    """Watches one training; each kind of alarm is raised once."""

    def __init__(self, plan: PrecisionPlan, say: Callable[[str], None] | None = None) -> None:
        self.say = say or _warn
        self._evidence = plan.loss_scale.evidence
        self._skips: deque[bool] = deque(maxlen=WINDOW)
        self.alarms: list[Alarm] = []

    def due(self, step: int) -> bool:
        """Whether to look at the gradients of this step."""
        return (step == 1 or step % LOOK_EVERY == 0) and "weight_grad_absmax" in self._evidence

    def note_skip(self, step: int, skipped: bool) -> Alarm | None:
        """Count skips against the predicted rate."""
        self._skips.append(skipped)
        if "predicted_overflow_rate" not in self._evidence:  # a plan without a recording
            return None
        rate = float(self._evidence["predicted_overflow_rate"])
        count = sum(self._skips)
        if not skipped or count < 3 or _tail(count, len(self._skips), rate) > SURPRISE:
            return None
        message = (
            f"{count} of the last {len(self._skips)} steps overflowed, where the recording "
            f"predicted at most {percent(rate)}: record again and analyze"
        )
        return self._raise(Alarm("overflow", step, rate, count / len(self._skips), message))

    def look(self, step: int, found: Sequence[Tensor]) -> Alarm | None:
        """Compare unscaled gradients with the recorded ones.

        Args:
            step: The present step.
            found: The gradients, finite and unscaled, before clipping.
        """
        values = [values_of(g) for g in found]
        top = max(float(n) for n in norms(values, math.inf))
        recorded = float(self._evidence["weight_grad_absmax"])
        if recorded > 0 and top > recorded * 2**ALLOWED_OCTAVES:
            message = (
                f"gradients reach {top:.3g}, {math.log2(top / recorded):.1f} octaves beyond the "
                f"recorded {recorded:.3g}: the scale may overflow soon; record again"
            )
            return self._raise(Alarm("magnitude", step, recorded, top, message))
        size = sum(v.numel() for v in values)
        zero = sum(v.numel() - int(torch.count_nonzero(v)) for v in values) / max(1, size)
        predicted = float(self._evidence.get("weight_grad_zero_after", 1.0))
        begun = step > 0  # LoRA's B is 0 in step 0, so no gradient reaches its A
        if begun and zero > predicted + ALLOWED_ZEROS:
            message = (
                f"{percent(zero, 0)} of the gradients are zero, where the recording predicted "
                f"{percent(predicted, 0)}: a larger loss scale may be needed; record again"
            )
            return self._raise(Alarm("underflow", step, predicted, zero, message))
        return None

    def _raise(self, alarm: Alarm) -> Alarm | None:
        if any(a.alarm == alarm.alarm for a in self.alarms):
            return None
        self.alarms.append(alarm)
        self.say(f"step {alarm.step}: {alarm.message}")
        return alarm


@dataclass(frozen=True)
class SkipCounts:
    """The skips of one optimizer since its last step that was taken.

    Attributes:
        in_a_row: All of them.
        at_scale: Those since the scale last fell.
        at_any_scale: The last ones, whose loss or forward pass was not finite.
    """

    in_a_row: int = 0
    at_scale: int = 0
    at_any_scale: int = 0

    def after(self, result: StepResult) -> "SkipCounts":
        """The counts with one more step."""
        if not result.skipped:
            return _NONE
        falling = result.next_scale < result.scale
        return SkipCounts(
            in_a_row=self.in_a_row + 1,
            at_scale=0 if falling else self.at_scale + 1,
            at_any_scale=self.at_any_scale + 1 if result.at_any_scale else 0,
        )

    def end_training(self, limit: int) -> bool:
        """Whether so many skips end it."""
        return max(self.at_scale, self.at_any_scale) >= limit


_NONE = SkipCounts()


class SkipLedger:
    """The counts of each group of optimizers that steps together.

    A generator's good steps must not hide a discriminator that is never stepped.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], SkipCounts] = {}

    @property
    def in_a_row(self) -> int:
        """The most skips in a row of any of them."""
        return max((counts.in_a_row for counts in self._counts.values()), default=0)

    def note(self, stepped: Iterable[int], result: StepResult) -> SkipCounts:
        """Count a step.

        Args:
            stepped: Which optimizers stepped, by their place in the trainer's list.
            result: Whether the step was taken.
        """
        key = tuple(stepped)
        counts = self._counts.get(key, _NONE).after(result)
        self._counts[key] = counts
        return counts

    def in_a_row_of(self, stepped: Iterable[int]) -> int:
        """How often these were skipped in a row."""
        return self._counts.get(tuple(stepped), _NONE).in_a_row

    def to_plain(self) -> list[dict[str, Any]]:
        """The counts as plain values, for a checkpoint."""
        return [
            {"optimizers": list(key), **asdict(counts)}
            for key, counts in self._counts.items()
            if counts.in_a_row
        ]

    def restore(self, plain: Iterable[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint's counts."""
        self._counts = {}
        for row in plain:
            fields = {k: int(v) for k, v in row.items() if k != "optimizers"}
            self._counts[tuple(row["optimizers"])] = replace(SkipCounts(), **fields)


def stop_message(result: StepResult, counts: SkipCounts, floor: float | None, unknown: str) -> str:
    """Why training stops, and what to do.

    Args:
        result: The last step.
        counts: The skips that led here.
        floor: The smallest scale of the loss scaler, if it has one.
        unknown: What helps to learn the cause.
    """
    at_floor = floor is not None and result.scale <= floor
    if counts.at_any_scale >= counts.at_scale:
        why = (
            f"{counts.at_any_scale} steps in a row had a loss or a forward pass that was not finite, "
            "which no loss scale changes"
        )
    elif at_floor:
        why = (
            f"the loss scale is at its floor of {result.scale:g}, where {counts.at_scale} steps in a "
            "row were skipped"
        )
    else:
        why = f"{counts.at_scale} steps in a row were skipped at a loss scale of {result.scale:g}"
    smaller = "choose a smaller scale, or one that falls (loss_scale='dynamic')"
    if floor is not None:
        smaller = "let the scale fall sooner (hysteresis, tolerance)"
    if at_floor:
        smaller = "allow smaller scales (min_scale) or analyze a new recording"
    advice = {
        "model": "the model itself diverges: look at the data, the learning rate, the loss",
        "scale": smaller,
        "format": "keep that layer in FP32 (fp32_modules) or train in BF16",
        "unknown": unknown,
    }[result.cause or "unknown"]
    return f"training stopped at step {result.step}: {why} ({result.reason}); {advice}"


class StepMonitor:
    """Counts a training's steps, writes them down, and ends it after too many skips.

    Attributes:
        steps: Steps so far, skipped ones included.
        skipped: How many of them were skipped.
        skips: How many of the last ones were skipped, without a gap, and which of these count.
        log: The run's log, if the training has a run folder.
        check: Whether Tensor Cores are in use; None where there is nothing to check.
        share: Which share of the FLOPs runs in half precision.
        drift: Compares the training with its plan.

    Args:
        drift: See above.
        log: See above.
        check: See above.
        share: See above.
        max_skips: How many skips in a row end the training: at an unchanged scale, or with a loss or
            a forward pass that was not finite.
        advice: How to learn the cause of a skip, for the message where it is unknown.
        first_step: The first step's number.
    """

    def __init__(
        self,
        drift: DriftWatch,
        log: RunLog | None,
        check: TensorCoreCheck | None,
        share: PrecisionShare,
        *,
        max_skips: int,
        advice: str,
        first_step: int = 0,
    ) -> None:
        self.steps, self.skipped = first_step, 0
        self.skips = SkipLedger()
        self._result: StepResult | None = None  # of the last step
        self.drift = drift
        self.log = log
        self.check = check
        self.share = share
        self._max_skips = max_skips
        self._advice = advice

    @property
    def inspect(self) -> Callable[[Sequence[Tensor]], None] | None:
        """What looks at the unscaled gradients of the present step; None for most steps."""
        return self._look if self.drift.due(self.steps) else None

    def _look(self, gradients: Sequence[Tensor]) -> None:
        self._note_alarm(self.drift.look(self.steps, gradients))

    def _note_alarm(self, alarm: Alarm | None) -> None:
        if alarm is not None and self.log is not None:
            self.log.note(alarm.to_json())

    def note_finding(self, finding: Finding) -> None:
        """Say something about the training, and write it down."""
        self.drift.say(f"step {self.steps}: {finding.message}; {finding.fix} [{finding.code}]")
        if self.log is not None:
            self.log.note({**finding.to_json(), "before_step": self.steps + 1})

    def note_average(self, message: str, names: list[str]) -> None:
        """Say that weights which no optimizer holds are written in every step, and write it down."""
        self.drift.say(f"step {self.steps}: {message}")
        if self.log is not None:
            self.log.note({"averages": names, "before_step": self.steps + 1, "message": message})

    def note_step(
        self,
        result: StepResult,
        floor: float | None,
        *,
        stepped: Sequence[int] = (0,),
        shares_step: bool = False,
    ) -> None:
        """Count a step and write it down.

        A step is what one update of the weights needs, as for ``mpdiag record``: optimizers that step
        one after another, with no forward or backward pass between them, share it.

        Args:
            result: The step.
            floor: The smallest scale of the loss scaler, if it has one.
            stepped: Which optimizers stepped, by their place in the trainer's list.
            shares_step: Whether another optimizer has taken this step before. It is counted once, and
                written again if it was skipped now.

        Raises:
            TrainingDiverged: If too many steps in a row were skipped.
        """
        before, first = self._result, not shares_step or self._result is None
        if before is not None and not first:
            loss = before.loss if result.loss is None else result.loss
            result = replace(result, step=before.step, loss=loss)
        if first:
            self.steps += 1
            self.share.step_ended()
        self._result = result
        if self.log is not None and (first or result.skipped):
            self.log.note_step(result)
        use = None if self.check is None else self.check.after_step(self.steps)
        if use is not None and self.log is not None:
            self.log.note(use.to_json())
        self._note_alarm(self.drift.note_skip(result.step, result.skipped))
        counts = self.skips.note(stepped, result)
        if not result.skipped:
            return
        self.skipped += first or before is None or not before.skipped
        if counts.end_training(self._max_skips):
            raise TrainingDiverged(stop_message(result, counts, floor, self._advice))


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=loop_stacklevel())


def _tail(count: int, size: int, rate: float) -> float:
    """The chance of at least ``count`` of ``size`` events of this rate (Poisson)."""
    expected = max(rate * size, 1e-3)
    below = sum(
        math.exp(-expected + k * math.log(expected) - math.lgamma(k + 1)) for k in range(count)
    )
    return max(0.0, 1 - below)
