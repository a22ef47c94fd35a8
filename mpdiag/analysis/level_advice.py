"""Which level to try first, the memory each takes, and how much larger a batch it allows.

The estimate counts bytes: a recording knows the size of every weight and of every module's output, but
not what the allocator adds, nor what autograd keeps of plain functions. A benchmark measures how far off
it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdiag.plan import LevelAdvice

if TYPE_CHECKING:
    from mpdiag.analysis.run_statistics import RunStatistics
    from mpdiag.plan import MasterWeightsPlan
    from mpdiag.runs.run import Run

# FP32 values an optimizer keeps for each weight; unknown ones are counted like Adam.
STATES = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "Rprop": 2, "LBFGS": 20}
DEFAULT_STATES = 2

# Bytes per weight: (model, masters and casts; gradients), and bytes per stored activation.
_WEIGHTS = {"O0": (4, 4), "O1": (4 + 2, 4), "O2": (2 + 4, 2 + 4), "O3": (2, 2)}
_ACTIVATION = {"O0": 4, "O1": 2, "O2": 2, "O3": 2}
KEEP_NOTHING_MORE = {"ReLU", "Identity", "Flatten", "Unflatten"}
"""Modules that add nothing to what autograd keeps: the output of a ReLU takes the place of its input,
which nobody else keeps; the others return their input's own memory."""


def advise_levels(
    run: Run, evidence: RunStatistics, masters: MasterWeightsPlan
) -> tuple[LevelAdvice, ...]:
    """The levels in the order to try them, each with its memory and the batch it allows."""
    weights = int((run.meta.get("model") or {}).get("parameters") or 0)
    stored = activations_per_step(run, evidence)
    if weights == 0:
        return ()
    states = sum(
        STATES.get(str(o.get("type")), DEFAULT_STATES) for o in run.meta.get("optimizers") or []
    )
    states = states and _momentum(run, states)

    def fixed(level: str) -> int:
        width = 2 if level == "O3" else 4
        return weights * (sum(_WEIGHTS[level]) + width * states)

    whole = fixed("O0") + stored * _ACTIVATION["O0"]
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
            "an upper bound on speed: weights in FP16 would take the updates, but the optimizer's own "
            "state would be FP16, too, which this recording does not judge"
        )
    advice = []
    for level in ("O0", "O1", "O2", "O3"):
        activations = stored * _ACTIVATION[level]
        factor = (whole - fixed(level)) / activations if activations else 1.0
        advice.append(
            LevelAdvice(
                level,
                fixed(level) + activations,
                round(max(0.0, factor), 2),
                possible=level != "O3" or not (masters.needed or states),
                reason=reasons[level],
            )
        )
    return tuple(advice)


def activations_per_step(run: Run, evidence: RunStatistics) -> int:
    """Number of values that modules without children output in one step of one rank.

    This is about what autograd keeps on a device; with accumulation, it covers all micro-batches.
    """
    modules = {str(m["name"]): m for m in run.modules() if m["what"] == "module"}
    parents = {name.rpartition(".")[0] for name in modules if name}
    leaves = {name for name, m in modules.items() if m.get("type") not in KEEP_NOTHING_MORE}
    numel, steps = evidence.activations(leaves - parents)
    return numel // steps if steps else 0


def _momentum(run: Run, states: int) -> int:
    """The number of states without those of SGD without momentum, which keeps none."""
    for optimizer in run.meta.get("optimizers") or []:
        if optimizer.get("type") == "SGD" and not optimizer.get("momentum"):
            states -= 1
    return states
