"""Master weights: how many updates a 16-bit weight would swallow, as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpdiag.analysis.layers import share
from mpdiag.analysis.run_statistics import UPDATE_FIGURES
from mpdiag.display.wording import counted, percent
from mpdiag.numerics.formats import BF16, FP16, HALVES
from mpdiag.plan import MasterWeightsPlan
from mpdiag.runs.schema import SAMPLED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpdiag.analysis.layers import Layers
    from mpdiag.analysis.run_statistics import RunStatistics
    from mpdiag.numerics.formats import FloatFormat

STALLED = 0.4
"""Share of its path that a parameter loses in a part of the training from which it is stalled there."""
NEEDED = 0.1
"""Share of all parameters' paths that lies where they are stalled, from which masters are needed.

Sixty trainings whose weights were stored in FP16, each against its FP32 twin (``studies/cases``), say
what counts: not how many updates are rounded away (up to 60 % without harm), for most of these are far
smaller than those that are not; nor that a schedule's last steps are, for they lead nowhere; but that
weights stand still where they would have gone on. Harmless up to 0.08, harmful from 0.11. Not seen
this way: trainings that end in a fine fit, which rounded weights cannot hold though updates arrive.
"""


HELD = 0.25
"""Share of a parameter's Σ|w| that a format makes 0, from which it does not hold the parameter."""


def analyze_weight_updates(
    evidence: RunStatistics, target: FloatFormat, layers: Layers | None = None
) -> MasterWeightsPlan:
    """Decide on FP32 master weights from the measured updates, and from the weights themselves.

    A weight in a format swallows an update if Δw ≠ 0 and r(r(w) + r(Δw)) = r(w), where r rounds to
    the format. A parameter's path is its Σ|Δw|; it is stalled in a fifth of the training in which at
    least ``STALLED`` of its path is swallowed.

    Args:
        evidence: The run's rows.
        target: The format to train in.
        layers: The same, merged; without them the weights are not looked at.
    """
    names, sums = evidence.updates()
    known = dict(zip(UPDATE_FIGURES, sums, strict=True))
    changed = known["changed"]
    if changed.sum() == 0:
        return MasterWeightsPlan(
            needed=True,
            reason="no weight update was recorded, so FP32 masters are kept to be safe",
        )
    held = target if target in HALVES else BF16  # nothing is counted for FP8 weights
    swallowed, vanished = known["swallowed", held.name], known["vanished", FP16.name]
    fractions = share(swallowed, changed)
    paths = evidence.update_paths()
    whole, lost = paths[0], paths[1 + HALVES.index(held)]
    stalled = np.where(lost >= STALLED * whole, lost, 0.0)
    standing = float(share(stalled.sum(), whole.sum()))
    worst = int(np.argmax(stalled.sum(axis=0))) if standing else int(np.argmax(fractions))
    fraction = float(share(swallowed.sum(), changed.sum()))
    gone, parameter = _vanished(layers, held)
    needed = standing >= NEEDED or gone >= HELD
    told = f"{held.label} makes {percent(gone)} of the sum of {parameter} 0" if gone >= HELD else ""
    limit = f"FP32 masters are needed from {100 * NEEDED:.0f} % on"
    unjudged = "" if needed else "; how fine a fit such weights can hold was not judged"
    return MasterWeightsPlan(
        needed=needed,
        swallowed_fraction=fraction,
        worst_parameter=parameter if told else names[worst],
        reason=f"{f'{told}; ' if told else ''}{percent(standing)} of the way that weights go lies where "
        f"{held.label} weights would stand still ({limit}){unjudged}; {percent(fraction)} of the "
        f"recorded updates would be rounded away{_sampling(known['numel'], known[SAMPLED])}",
        evidence={
            "format": held.name,
            "changed": int(changed.sum()),
            "swallowed": int(swallowed.sum()),
            "vanished_fp16": int(vanished.sum()),
            "worst_parameter_swallowed": float(fractions[worst]),
            "path_swallowed": float(share(lost.sum(), whole.sum())),
            "path_stalled": standing,
            "threshold": NEEDED,
            "weights_vanished": gone,
            "vanishing_parameter": parameter if told else None,
            **_sampled(known["numel"], known[SAMPLED]),
        },
    )


def _sampled(seen: NDArray[np.int64], of: NDArray[np.int64]) -> dict[str, int]:
    """Of parameters whose updates were sampled, how many are counted, and of how many; by name."""
    return {"sampled": int(seen.sum()), "sampled_from": int(of.sum())} if of.any() else {}


def _sampling(seen: NDArray[np.int64], of: NDArray[np.int64]) -> str:
    """The same as the end of a sentence."""
    if not of.any():
        return ""
    who = counted(int((of > 0).sum()), "parameter")
    return (
        f"; of {who} {percent(seen.sum() / of.sum())} of the updates were recorded, the same elements "
        "in each step, as copies of all weights did not fit the budget"
    )


def _vanished(layers: Layers | None, held: FloatFormat) -> tuple[float, str]:
    """The largest share of a parameter's Σ|w| that a format makes 0, and its name."""
    weights = None if layers is None else layers.of_kind("weight")
    if weights is None or len(weights) == 0:
        return 0.0, ""
    h = weights.histograms
    lost = share(h.abs_sum(held.zero_exponent).value, h.abs_sum().value)
    worst = int(np.argmax(lost))
    return float(lost[worst]), str(weights.names[worst])
