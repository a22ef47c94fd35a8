"""Loss-scale replay: run any scaler over the recorded maxima, without training.

Exact for the recorded steps: a step overflows when its largest unscaled gradient times the scale
leaves FP16's range, and what is lost at a power-of-two scale is a shift of the histogram. Of steps
between two recorded ones nothing is known; they are taken to reach what the smaller of the two does,
so that one recorded spike stays one.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.layers import countable_rows, share
from mpdiag.analysis.scaling.windows import by_step, step_maxima
from mpdiag.errors import DamagedRun
from mpdiag.numerics.formats import FP16, FloatFormat
from mpdiag.numerics.loss_scalers import Scaler, scaler_class, scaler_named
from mpdiag.runs.records import Records
from mpdiag.runs.run import Run, open_run

SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class Played:
    """What a scaler did.

    Attributes:
        scale: float64 (n,), in force at each step.
        overflow: bool (n,): the step is skipped.
        final_scale: The scale afterwards.
    """

    scale: NDArray[np.float64]
    overflow: NDArray[np.bool_]
    final_scale: float


@dataclass(frozen=True, eq=False)
class Replay(Played):
    """What a scaler would have done, at each recorded step.

    Attributes:
        steps: int64 (n,).
        absmax: float64 (n,), largest unscaled |gradient|; infinite where one was not finite.
        lost: float64 (n,), share of non-zero activation gradients lost to zero at that scale.
    """

    steps: NDArray[np.int64]
    absmax: NDArray[np.float64]
    lost: NDArray[np.float64]

    @property
    def skips(self) -> int:
        """How many recorded steps would be skipped."""
        return int(self.overflow.sum())

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag replay --json``; a maximum that was not finite is null."""
        rows = zip(self.steps, self.scale, self.absmax, self.overflow, self.lost, strict=True)
        return {
            "schema_version": SCHEMA_VERSION,
            "skips": self.skips,
            "final_scale": self.final_scale,
            "steps": [
                {
                    "step": int(step),
                    "scale": float(scale),
                    "absmax": float(top) if math.isfinite(top) else None,
                    "overflow": bool(over),
                    "lost": float(lost),
                }
                for step, scale, top, over, lost in rows
            ],
        }


def replay_run(run: str | os.PathLike[str] | Run, scaler: str, **settings: Any) -> Replay:
    """Replay a scaler by name over a run; settings that are None or not the scaler's keep defaults.

    Raises:
        InputError: If the run cannot be read or holds no gradients.
        UsageError: If there is no such scaler, or a setting makes no sense.
    """
    opened = run if isinstance(run, Run) else open_run(Path(run))
    known = scaler_class(scaler).setting_names()
    given = {k: v for k, v in settings.items() if v is not None and k in known}
    state = scaler_named(scaler, **given)
    played = replay(opened.records, state)
    if played.steps.size == 0:
        message = f"{opened.folder} holds no gradients to replay: record a loop that runs backward"
        raise DamagedRun(message)
    return played


def replay(records: Records, scaler: Scaler) -> Replay:
    """Replay a scaler from its present state over a run's rows."""
    steps, maxima, _ = step_maxima(records)
    gradients = records.of_kind("activation_grad") & countable_rows(records)
    histograms = by_step(records, gradients, steps)
    nonzero = histograms.nonzero
    # Values lost at threshold 2^z: a running sum over bins answers for every scale at once.
    below = np.concatenate(
        [np.zeros((steps.size, 1), np.int64), np.cumsum(histograms.counts, axis=1)], axis=1
    )
    played = play(steps, maxima, scaler)
    exponents = np.floor(np.log2(played.scale)).astype(int)
    column = np.clip(FP16.zero_exponent - exponents - histograms.first, 0, below.shape[1] - 1)
    lost = below[np.arange(steps.size), column] + histograms.subnormals
    return Replay(**vars(played), steps=steps, absmax=maxima, lost=share(lost, nonzero))


def play(
    steps: NDArray[np.int64],
    maxima: NDArray[np.float64],
    scaler: Scaler,
    target: FloatFormat = FP16,
) -> Played:
    """Run a scaler over maxima; steps between two recorded ones reach the smaller of their maxima."""
    scales, overflow = np.zeros(steps.size), np.zeros(steps.size, bool)
    for i, absmax in enumerate(maxima.tolist()):
        scale = scaler.scale
        scales[i] = scale
        overflow[i] = not math.isfinite(absmax) or target.overflows(absmax * scale)
        scaler = scaler.adjust(absmax)
        if i + 1 == steps.size:
            break
        between = min(absmax, float(maxima[i + 1]))
        for _ in range(int(steps[i + 1] - steps[i]) - 1):
            before, scaler = scaler, scaler.adjust(between)
            if scaler is before:  # the same maximum would never change it
                break
    return Played(scales, overflow, scaler.scale)
