"""Whether what was recorded is a training that a verdict can speak of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mpdiag.analysis.findings import Finding
from mpdiag.display.wording import counted
from mpdiag.errors import MpdiagError
from mpdiag.runs.coverage import stepped_in

if TYPE_CHECKING:
    from mpdiag.analysis.layers import Layers
    from mpdiag.runs.run import Run


def training_findings(run: Run, layers: Layers) -> list[Finding]:
    """A recording without an optimizer, and one whose losses stop being finite."""
    return [*_optimizer_findings(run, layers), *_search_findings(run), *_loss_findings(run)]


def _optimizer_findings(run: Run, layers: Layers) -> list[Finding]:
    if run.meta.get("optimizers") != [] or len(layers.of_kind("update")):
        return []
    return [
        Finding(
            severity="warning",
            code="no-optimizer",
            message="no optimizer was recorded, so no weight update was seen",
            evidence={"optimizers": 0},
            fix="hand the optimizer to mpdiag.record, too, and record again",
        )
    ]


def _search_findings(run: Run) -> list[Finding]:
    """Optimizers that go by differences which a recording of FP32 does not show rounded."""
    return [
        Finding(
            severity="warning",
            code="optimizer-searches",
            message=f"{one.kind} evaluated its loss {counted(one.evaluations, 'time')} in "
            f"{counted(one.taken, 'step')}, and goes by differences between the evaluations: where its "
            "search ends in half precision, which rounds them, cannot be seen here",
            evidence={
                "optimizer": one.kind,
                "steps": one.taken,
                "evaluations": one.evaluations,
            },
            fix="train by the plan and compare with FP32, or train this phase in FP32",
        )
        for one in stepped_in(run)
        if one.searches
    ]


def _loss_findings(run: Run) -> list[Finding]:
    """Losses of the FP32 training that are not finite; all its steps have one, recorded or not."""
    try:
        steps = run.recorded_steps()
    except MpdiagError:  # other commands say what is wrong with the log
        return []
    bad = [s.step for s in steps if s.loss is not None and not math.isfinite(s.loss)]
    if not bad:
        return []
    return [
        Finding(
            severity="error",
            code="non-finite-losses",
            message=f"the loss of the FP32 training was infinite or NaN in {counted(len(bad), 'step')}"
            f", first in step {bad[0]}",
            evidence={"steps": len(bad), "first": bad[0]},
            fix="fix the FP32 training first; a loss scale cannot help",
        )
    ]
