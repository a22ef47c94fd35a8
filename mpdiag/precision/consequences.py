"""What the precision of a training does: proved by arithmetic, or counted in the recording."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpdiag.analysis.findings import Finding
from mpdiag.display.wording import counted, percent
from mpdiag.numerics.decay import NARROW, decay
from mpdiag.precision.moments import moments
from mpdiag.precision.movement import standstill
from mpdiag.runs.precision import HALF, LABELS, ParameterPrecision, PrecisionFacts, Shadow
from mpdiag.runs.run import Run

STILL = 0.01
"""Share of elements that stand still in a step, above which it is said."""
EARLY = 100
"""Steps below which a moving average with a factor of 0.999 has hardly begun."""


def consequences(
    facts: PrecisionFacts,
    parameters: Sequence[ParameterPrecision],
    autocast: Sequence[str],
    run: Run | None,
) -> Iterator[Finding]:
    """What to know of a training's precision."""
    del autocast
    yield from _unheld(parameters)
    for holder, held in _by_optimizer(parameters).items():
        groups = _settings_of(facts, holder)
        yield from _stuck_states(holder, held, groups, facts.shadows)
        yield from _narrow_states(holder, held)
        yield from _stuck_decay(holder, held, groups)
    if run is not None:
        yield from _standing_still(parameters, run)
    if facts.accumulating:
        yield from _narrow_sums(parameters)
    yield from _narrow_reductions(parameters)


def _by_optimizer(
    parameters: Iterable[ParameterPrecision],
) -> Mapping[str, list[ParameterPrecision]]:
    found: dict[str, list[ParameterPrecision]] = defaultdict(list)
    for p in parameters:
        if p.optimizer is not None:
            found[p.optimizer].append(p)
    return found


def _settings_of(facts: PrecisionFacts, holder: str) -> list[Mapping[str, Any]]:
    return [
        group
        for settings in facts.settings
        if settings.get("optimizer") == holder
        for group in settings.get("groups", ())
    ]


def _named(parameters: Sequence[ParameterPrecision]) -> dict[str, Any]:
    return {
        "parameters": [p.name for p in parameters][:20],
        "parameter_count": len(parameters),
        "numel": sum(p.numel for p in parameters),
    }


def _unheld(parameters: Sequence[ParameterPrecision]) -> Iterator[Finding]:
    if all(p.optimizer is None for p in parameters):
        return  # no optimizer is known at all
    unheld = [p for p in parameters if p.trainable and p.optimizer is None]
    if unheld:
        yield Finding(
            severity="warning",
            code="precision-unheld",
            message=f"no optimizer holds {_some(unheld)}, which require a gradient; they do not train",
            evidence=_named(unheld),
            fix="give them to the optimizer, or set requires_grad=False",
        )


def _stuck_states(
    holder: str,
    held: Sequence[ParameterPrecision],
    groups: Sequence[Mapping[str, Any]],
    shadows: Sequence[Shadow],
) -> Iterator[Finding]:
    """Moving averages that cannot fall: rounding gives the decayed value back."""
    for state, factors in moments(holder, groups).items():
        for factor in sorted(factors):
            for dtype in NARROW:
                those = [p for p in held if p.states.get(state) == dtype]
                found = decay(dtype, factor)
                if not those or not found.stuck:
                    continue
                whole = found.stuck == found.values
                share = f"all {found.values:,}" if whole else f"{found.stuck:,} of {found.values:,}"
                label = LABELS[dtype]
                seen = next((s for s in shadows if (s.optimizer, s.state) == (holder, state)), None)
                yield Finding(
                    severity="warning",
                    code="precision-stuck-state",
                    message=f"{holder}'s {state} in {label} {'cannot' if whole else 'can hardly'} fall "
                    f"by its factor {factor:g}; rounding gives back {share} normal values of {label}"
                    f"{_beside_fp32(seen)}",
                    evidence={
                        **_named(those),
                        "state": state,
                        "dtype": dtype,
                        "factor": factor,
                        "stuck": found.stuck,
                        "values": found.values,
                        "measured": None if seen is None else vars(seen),
                    },
                    fix=f"keep {state} in FP32: FP32 masters, or an optimizer with FP32 states",
                )


def _beside_fp32(seen: Shadow | None) -> str:
    """How far a state is from FP32's, and what that does to Adam's steps, as it was measured."""
    if seen is None:
        return "; how far it is from FP32's was not measured"
    if seen.steps < EARLY:
        return f"; {counted(seen.steps, 'step')} are too few to measure how far it is from FP32's"
    factor = seen.median**-0.5
    size = "about as large" if 0.95 < factor < 1.05 else f"{factor:.2g} times as large"
    return (
        f"; after {counted(seen.steps, 'step')} it is {seen.median:.2g} times FP32's (median of "
        f"{seen.elements:,} elements), so that steps are {size}"
    )


def _narrow_states(holder: str, held: Sequence[ParameterPrecision]) -> Iterator[Finding]:
    """FP32 weights whose optimizer keeps statistics in half precision."""
    those = [
        p
        for p in held
        if (p.master or p.stored) == "float32" and HALF.intersection(p.states.values())
    ]
    if those:
        states = sorted({n for p in those for n, d in p.states.items() if d in HALF})
        yield Finding(
            severity="info",
            code="precision-narrow-state",
            message=f"{holder} keeps {', '.join(states)} of {_some(those)} in half precision, "
            "though the weights are FP32",
            evidence={**_named(those), "states": states},
            fix="check that this was asked for; otherwise use FP32 states",
        )


def _stuck_decay(
    holder: str, held: Sequence[ParameterPrecision], groups: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Weight decay that rounding undoes, where it is applied as a factor (AdamW, decoupled SGD)."""
    if not holder.endswith("W") and holder not in ("Lion", "Muon"):
        return
    for group in groups:
        rate, strength = group.get("lr"), group.get("weight_decay")
        if not isinstance(rate, float) or not isinstance(strength, (int, float)) or not strength:
            continue
        factor = 1.0 - rate * float(strength)
        for dtype in NARROW:
            those = [p for p in held if p.stored == dtype and p.master is None]
            found = decay(dtype, factor)
            if those and found.stuck == found.values:
                label = LABELS[dtype]
                yield Finding(
                    severity="warning",
                    code="precision-decay-without-effect",
                    message=f"weight decay of {strength:g} at a learning rate of {rate:g} has no effect "
                    f"on {label} weights; 1 - {rate * strength:.2g} times any of {label}'s "
                    f"{found.values:,} normal values rounds back to it",
                    evidence={**_named(those), "factor": factor, "values": found.values},
                    fix="keep FP32 masters, or set weight_decay=0",
                )


def _standing_still(parameters: Sequence[ParameterPrecision], run: Run) -> Iterator[Finding]:
    """Half-precision weights that did not move although they had a gradient."""
    those = [p for p in parameters if p.stored in HALF and p.master is None and p.optimizer]
    if not those:
        return
    seen = standstill(run, {p.name for p in those})
    if seen.share > STILL:
        label = "/".join(sorted({LABELS[p.stored] for p in those}))
        yield Finding(
            severity="warning",
            code="precision-updates-rounded-away",
            message=f"at least {percent(seen.share)} of the {label} weights with a gradient did not "
            f"move in a step; their updates round to nothing ({counted(seen.steps, 'step')} recorded)",
            evidence={**_named(those), **vars(seen)},
            fix="keep FP32 masters, or round updates stochastically",
        )


def _narrow_sums(parameters: Sequence[ParameterPrecision]) -> Iterator[Finding]:
    those = [p for p in parameters if p.accumulated in HALF]
    if those:
        label = "/".join(sorted({LABELS[str(p.accumulated)] for p in those}))
        yield Finding(
            severity="info",
            code="precision-narrow-sum",
            message=f"gradients of {_some(those)} add up in {label} over micro-batches",
            evidence=_named(those),
            fix="with many micro-batches, accumulate in FP32",
        )


def _narrow_reductions(parameters: Sequence[ParameterPrecision]) -> Iterator[Finding]:
    those = [p for p in parameters if p.reduced in HALF]
    if those:
        label = "/".join(sorted({LABELS[str(p.reduced)] for p in those}))
        yield Finding(
            severity="info",
            code="precision-narrow-reduction",
            message=f"gradients of {_some(those)} are added over ranks in {label}",
            evidence=_named(those),
            fix="reduce in FP32: reduce_dtype=torch.float32",
        )


def _some(parameters: Sequence[ParameterPrecision]) -> str:
    if len(parameters) == 1:
        return parameters[0].name
    return f"{counted(len(parameters), 'parameter')} ({parameters[0].name} …)"
