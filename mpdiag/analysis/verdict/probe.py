"""What a short training by the plan says beside the same steps in FP32, or in BF16 for block formats."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpdiag.analysis.findings import Finding
from mpdiag.analysis.verdict.evidence import SAME_BITS, UNTRIED
from mpdiag.display.wording import counted
from mpdiag.files.documents import finite
from mpdiag.files.paths import AnyPath
from mpdiag.plan import Verdict
from mpdiag.runs.results import PROBE, read_with_earlier, write_before_earlier

LATE = 0.25
"""Share of the probe's steps whose losses are compared: its last ones."""


@dataclass(frozen=True)
class Probe:
    """The same first steps of a script, in a reference and by the plan with its rounding emulated.

    Attributes:
        fp32, by_plan: The loss of each step that both sides logged one for, in order. ``fp32`` is the
            reference's, whatever that is.
        skipped: How many of its steps the training by the plan skipped.
        wanted: How many steps were asked for.
        failure: How the training by the plan ended, if it failed before the reference.
        recorder_ulps: Of a compiled recording, how far its losses are from those in FP32, which nothing
            records, and how far these are from another such training's: the largest difference of a
            loss, in units in the last place. None if they were not compared.
        reference: What it is compared with: ``FP32``, of a plan with block formats ``BF16``.
    """

    fp32: tuple[float, ...]
    by_plan: tuple[float, ...]
    skipped: int
    wanted: int
    failure: str = ""
    recorder_ulps: tuple[int, int] | None = None
    reference: str = "FP32"

    @property
    def steps(self) -> int:
        """How many steps were compared."""
        return len(self.by_plan)

    @property
    def late(self) -> int:
        """How many of them, the last ones, give the means."""
        return max(1, round(LATE * self.steps))

    @property
    def means(self) -> tuple[float, float]:
        """The mean loss over the last steps, of the reference and by the plan."""
        return statistics.fmean(self.fp32[-self.late :]), statistics.fmean(
            self.by_plan[-self.late :]
        )

    @property
    def rise(self) -> float:
        """How much higher the loss by the plan is, as a share of the reference's; NaN if not known."""
        fp32, by_plan = self.means
        known = fp32 and math.isfinite(fp32) and math.isfinite(by_plan)
        return (by_plan - fp32) / abs(fp32) if known else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation of the reference's loss there; 0 of one step, NaN if not finite."""
        losses = self.fp32[-self.late :]
        return statistics.pstdev(losses) if all(map(math.isfinite, losses)) else math.nan

    @property
    def outcome(self) -> str:
        """``diverges``, ``differs``, ``agrees``, or ``unknown`` where the reference diverges."""
        fp32, by_plan = self.means
        if not math.isfinite(fp32):
            return "unknown"
        if self.failure or not math.isfinite(by_plan) or 2 * self.skipped > self.steps:
            return "diverges"
        return "differs" if abs(by_plan - fp32) > self.spread else "agrees"

    def describe(self) -> str:
        """What was seen, in a clause."""
        fp32, by_plan = self.means
        return (
            f"probe of the first {counted(self.steps, 'step')}, trained by the plan in emulation: mean "
            f"loss {by_plan:.5g} over the last {self.late}, {fp32:.5g} in {self.reference}; "
            f"{self.skipped} skipped"
            + (f"; then it failed: {self.failure}" if self.failure else "")
        )

    def describe_recorder(self) -> str:
        """What the recorder changed in a compiled training, in a sentence; "" if it was not compared."""
        if self.recorder_ulps is None:
            return ""
        recorded, again = self.recorder_ulps
        if not recorded:
            return " Without a recorder these losses have the same bits."
        return (
            f" Without a recorder these losses differ by up to {counted(recorded, 'ulp')} (two such "
            f"trainings: {counted(again, 'ulp')})."
        )

    def to_json(self) -> dict[str, Any]:
        """The ``probe`` of ``mpdiag analyze --probe --json``."""
        fp32, by_plan = self.means
        document = {
            **asdict(self),
            "steps": self.steps,
            "outcome": self.outcome,
            "mean_fp32": fp32,
            "mean_by_plan": by_plan,
            "rise": self.rise,
            "spread": self.spread,
        }
        plain: dict[str, Any] = finite(document)
        return plain


def write_probe(folder: AnyPath, probe: Probe, decisions: str) -> None:
    """Keep a probe in the recording, over an earlier one of the same decisions.

    Args:
        folder: The run.
        probe: What was trained.
        decisions: Fingerprint of the plan's decisions, see ``PrecisionPlan.digest``.

    Raises:
        OSError: If it cannot be written.
    """
    write_before_earlier(folder / PROBE, {"decisions": decisions, **probe.to_json()})


def read_probe(folder: AnyPath, decisions: str) -> Probe | None:
    """The probe of a plan with these decisions; None if a run has none that can be read."""
    kept = (d for d in read_with_earlier(folder / PROBE) if d.get("decisions") == decisions)
    try:
        document = next(kept)
        fp32, by_plan = (
            tuple(math.nan if loss is None else float(loss) for loss in document[name])
            for name in ("fp32", "by_plan")
        )
        counts = int(document["skipped"]), int(document["wanted"])
        changed = document.get("recorder_ulps")
        ulps = None if changed is None else (int(changed[0]), int(changed[1]))
        reference = str(document.get("reference", "FP32"))  # an earlier version's has none
        probe = Probe(fp32, by_plan, *counts, str(document["failure"]), ulps, reference)
        return probe if len(fp32) == len(by_plan) > 0 else None
    except (StopIteration, ValueError, LookupError, TypeError, OverflowError):
        return None


def with_probe(verdict: Verdict, probe: Probe) -> Verdict:
    """The verdict after a probe: a failure is one, a success widens what was looked at, no more."""
    beyond = f"beyond its first {counted(probe.steps, 'step')}"
    compared = probe.describe_recorder()
    open_questions = tuple(
        f"{clause} {beyond}" if clause.startswith(UNTRIED) else clause
        for clause in verdict.not_examined
        if not (compared and clause.startswith(SAME_BITS))
    )
    told = replace(
        verdict, evidence=(probe.describe(), *verdict.evidence), not_examined=open_questions
    )
    if verdict.level == "cannot":
        return replace(told, text=f"{told.text}{compared}")
    if probe.outcome == "diverges":
        text = (
            f"This plan does not work: a probe of {counted(probe.steps, 'step')} fails with it, and "
            f"{probe.reference} does not."
        )
        return replace(told, level="cannot", text=f"{text}{compared}")
    words = {
        "agrees": "A probe of {n} agrees with {of}.",
        "differs": "In a probe of {n} the losses differ from {of}'s by more than {of}'s vary.",
        "unknown": "A probe of {n} shows nothing: {of} itself diverges in it.",
    }
    said = words[probe.outcome].format(n=counted(probe.steps, "step"), of=probe.reference)
    return replace(told, text=f"{told.text} {said}{compared}")


def probe_findings(probe: Probe) -> Iterator[Finding]:
    """A finding where the probe speaks against the plan."""
    if probe.outcome not in ("diverges", "differs"):
        return
    fails = probe.outcome == "diverges"
    yield Finding(
        severity="error" if fails else "warning",
        code="probe-diverges" if fails else "probe-differs",
        message=probe.describe(),
        evidence=probe.to_json(),
        fix="find the operations that need FP32 (mpdiag why), or analyze with another --target"
        if fails
        else f"train by the plan to the end, and compare with {probe.reference}",
    )
