"""Master weights: how many updates a 16-bit weight would swallow; and the levels, with their memory."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.layers import Layers, share
from mpdiag.analysis.run_statistics import UPDATE_FIGURES, RunStatistics
from mpdiag.analysis.shapes.recorded import largest_output
from mpdiag.display.wording import counted, percent
from mpdiag.numerics.formats import BF16, FP16, HALVES, FloatFormat
from mpdiag.plan import LevelAdvice, MasterWeightsPlan
from mpdiag.runs.precision import LABELS
from mpdiag.runs.run import Run
from mpdiag.runs.schema import SAMPLED

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
FAINT = 2.0**-12
"""Largest value of a bias, as a share of its module's mean output, that FP16 rounds away there."""
HELD = 0.25
"""Share of a parameter's Σ|w| that a format makes 0, from which it does not hold the parameter."""


def analyze_weight_updates(
    evidence: RunStatistics,
    target: FloatFormat,
    layers: Layers | None = None,
    stored: Collection[str] = (),
) -> MasterWeightsPlan:
    """Decide on FP32 master weights from the measured updates, and from the weights themselves.

    A weight in a format swallows an update if Δw ≠ 0 and r(r(w) + r(Δw)) = r(w), where r rounds to
    the format. A parameter's path is its Σ|Δw|; it is stalled in a fifth of the training in which at
    least ``STALLED`` of its path is swallowed.

    Args:
        evidence: The run's rows.
        target: The format to train in.
        layers: The same, merged; without them the weights are not looked at.
        stored: Dtypes of half precision in which trained weights were stored, without masters.
    """
    if stored:
        labels = "/".join(sorted(LABELS[dtype] for dtype in stored))
        return MasterWeightsPlan(
            needed=True,
            reason=f"the recorded weights are {labels}, which hides updates that are rounded away, so "
            "the plan keeps FP32 masters",
        )
    names, sums = evidence.updates()
    known = dict(zip(UPDATE_FIGURES, sums, strict=True))
    changed = known["changed"]
    if changed.sum() == 0:
        return MasterWeightsPlan(
            needed=True,
            reason="no weight update was recorded, so the plan keeps FP32 masters to be safe",
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
    told = f"{held.label} rounds {percent(gone)} of {parameter}'s sum to 0" if gone >= HELD else ""
    limit = f"limit: {100 * NEEDED:.0f} %"
    missed = f"{held.label} weights would miss {percent(standing)} of the total weight change"
    unjudged = (
        "" if needed else f"; mpdiag did not test how precisely {held.label} weights converge"
    )
    return MasterWeightsPlan(
        needed=needed,
        swallowed_fraction=fraction,
        worst_parameter=parameter if told else names[worst],
        reason=f"{f'{told}; ' if told else ''}{missed} ({limit}){unjudged}; "
        f"{percent(fraction)} of the recorded updates would be rounded away"
        f"{_sampling(known['numel'], known[SAMPLED])}",
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
        f"; {percent(seen.sum() / of.sum())} of the updates of {who} were recorded, the same elements "
        "in each step, because copies of all weights did not fit the memory budget"
    )


def _vanished(layers: Layers | None, held: FloatFormat) -> tuple[float, str]:
    """The largest share of a parameter's Σ|w| that a format makes 0, and its name.

    A bias far below what it is added to does not count: the bias of an attention's keys stays near 0,
    as softmax takes out what is the same for all keys.
    """
    weights = None if layers is None else layers.of_kind("weight")
    if layers is None or weights is None or len(weights) == 0:
        return 0.0, ""
    h, outputs = weights.histograms, layers.of_kind("activation")
    means = share(outputs.histograms.abs_sum().value, outputs.histograms.finite)
    beside = {f"{name}.bias": FAINT * mean for name, mean in zip(outputs.names, means, strict=True)}
    faint = [top < beside.get(name, 0.0) for name, top in zip(weights.names, h.absmax, strict=True)]
    lost = share(h.abs_sum(held.zero_exponent).value, h.abs_sum().value)
    lost[faint] = 0.0
    worst = int(np.argmax(lost))
    return float(lost[worst]), str(weights.names[worst])


# FP32 values an optimizer keeps for each weight; all others are counted like Adam.
STATES = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "LBFGS": 20}
# Bytes per weight: model, masters, casts and copies to compare; gradients. And per stored activation.
_WEIGHTS = {"O0": 4 + 4, "O1": (4 + 2) + 4, "O2": (2 + 4 + 2) + 4, "O3": 2 + 2}
_ACTIVATION = {"O0": 4, "O1": 2, "O2": 2, "O3": 2}
# Bytes per output value in the loss's backward pass: cross entropy's logarithms and two gradients, FP32.
_LOSS = 3 * 4


def advise_levels(
    run: Run, evidence: RunStatistics, masters: MasterWeightsPlan
) -> tuple[LevelAdvice, ...]:
    """The levels in the order to try them, each with its memory and the batch it allows.

    The estimate counts bytes. A recording knows the sizes of weights and of what modules return, but not
    what autograd keeps of plain functions, nor a kernel's workspace; see ``docs/analysis.md``.
    """
    weights = int((run.meta.get("model") or {}).get("parameters") or 0)
    stored = evidence.activations_per_step()
    if weights == 0:
        return ()
    states = max(map(_states, run.meta.get("optimizers") or []), default=0)  # each has its weights
    output = largest_output(run.modules())
    fixed = {k: weights * (w + (2 if k == "O3" else 4) * states) for k, w in _WEIGHTS.items()}
    batch = {k: stored * w + output * (_LOSS - w) for k, w in _ACTIVATION.items()}
    whole = fixed["O0"] + batch["O0"]
    reasons = {
        "O0": "FP32: the baseline for every other level",
        "O1": "try first: FP32 weights, each operation in its own precision, no code changes",
        "O2": "try next: half the memory traffic for weights, with FP32 masters for the updates",
        "O3": "an upper bound on speed: no FP32 masters",
    }
    if masters.needed:
        reasons["O3"] = f"not for this training: {masters.reason}"
    elif states:
        reasons["O3"] = (
            "an upper bound on speed: FP16 weights would keep the updates, but the optimizer state "
            "would be FP16, too, and the recording does not show whether that works"
        )
    advice = []
    for level, reason in reasons.items():
        held, more = fixed[level], batch[level]
        # Rounded down: a batch that is a little too large does not fit.
        factor = max(0, 100 * (whole - held) // more) / 100 if more else 1.0
        possible = level != "O3" or not (masters.needed or states)
        advice.append(LevelAdvice(level, held + more, factor, possible, reason))
    return tuple(advice)


def _states(optimizer: Mapping[str, Any]) -> int:
    """How many values an optimizer keeps for each weight."""
    kind = str(optimizer.get("type"))
    return STATES.get(kind, 2) if kind != "SGD" or optimizer.get("momentum") else 0
