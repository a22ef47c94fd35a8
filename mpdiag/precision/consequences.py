"""What the precision of a training does: proved by arithmetic, or counted in the recording."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpdiag.analysis.findings import Finding, info, warning
from mpdiag.display.wording import counted, percent, spoken_parameters
from mpdiag.numerics.decay import NARROW, decay
from mpdiag.numerics.sums import growing, sum_bound
from mpdiag.precision.between import between
from mpdiag.precision.copies import copies_over_ranks, still_averages
from mpdiag.precision.moments import moments, slowing, stops_falling
from mpdiag.precision.movement import Recorded, not_finite, standstill
from mpdiag.precision.parts import narrow_parts
from mpdiag.precision.policies import policy_findings
from mpdiag.runs.operations import Operation
from mpdiag.runs.precision import (
    BYTES,
    HALF,
    LABELS,
    Observed,
    ParameterPrecision,
    PrecisionFacts,
    Shadow,
)

MOST_STILL = 0.5
"""Share of a state's elements that stay in a step, above which it is said without a formula."""
STILL = 0.01
"""Share of elements that stand still in a step, above which it is said."""
EARLY = 100
"""Steps below which a moving average with a factor of 0.999 has hardly begun."""


def consequences(
    facts: PrecisionFacts,
    parameters: Sequence[ParameterPrecision],
    autocast: Sequence[str],
    run: Recorded | None,
    operations: Sequence[Operation] = (),
) -> Iterator[Finding]:
    """What to know of a training's precision."""
    yield from _unheld(parameters)
    yield from _freed(facts)
    yield from _narrow_counters(facts)
    yield from policy_findings(facts, parameters)
    yield from still_averages(facts.observed)
    yield from _observed(facts)
    if run is not None:
        yield from _without_scale(autocast, run, operations)
        yield from _not_finite(parameters, run)
    told = {(one.kind, one.names[:1]) for one in facts.observed}
    for holder in dict.fromkeys(name for p in parameters for name in p.holders):
        held = [p for p in parameters if holder in p.holders]
        kept = [p for p in held if p.holders[-1] == holder]  # shown are the last optimizer's states
        torchs = _is_torchs(facts, holder)
        yield from _stuck_states(holder, kept, facts, proved=torchs)
        yield from _narrow_states(holder, kept)
        # A factor without effect that was seen in the optimizer's step says it already.
        if torchs and ("factor-without-effect", (holder,)) not in told:
            yield from _stuck_decay(holder, held, _settings_of(facts, holder))
    if run is not None:
        yield from _standing_still(parameters, run, facts)
    if facts.accumulating:
        yield from _narrow_sums(parameters, facts)
    yield from _narrow_reductions(parameters, 1 if run is None else run.meta.get("world_size", 1))
    yield from between(operations)
    yield from narrow_parts(operations)
    yield from copies_over_ranks(operations, parameters)


def _settings_of(facts: PrecisionFacts, holder: str) -> list[Mapping[str, Any]]:
    return [
        group
        for settings in facts.settings
        if settings.get("optimizer") == holder
        for group in settings.get("groups", ())
    ]


def _is_torchs(facts: PrecisionFacts, holder: str) -> bool:
    """Whether the optimizers of a name step by torch's own code, whose formula is known."""
    steps = [s.get("step") for s in facts.settings if s.get("optimizer") == holder]
    return bool(steps) and all(str(step).startswith("torch.optim.") for step in steps)


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
        yield warning(
            code="precision-unheld",
            message=f"no optimizer holds {_some(unheld)}, which require a gradient; they do not train",
            evidence=_named(unheld),
            fix="give them to the optimizer, or set requires_grad=False",
        )


def _freed(facts: PrecisionFacts) -> Iterator[Finding]:
    for settings in facts.settings:
        if settings.get("freed"):
            holder, freed = settings["optimizer"], settings["freed"]
            yield warning(
                code="precision-unheld",
                message=f"{holder} holds {counted(freed, 'parameter')} without memory, as fully_shard "
                "leaves them after a forward pass; its steps do not reach the model",
                evidence={"optimizer": holder, "parameter_count": freed},
                fix="make the optimizer before the first forward pass",
            )


def _narrow_counters(facts: PrecisionFacts) -> Iterator[Finding]:
    """Counts of steps in half precision: from some number on, one more is rounded away."""
    for settings in facts.settings:
        for name, (dtype, value) in settings.get("counters", {}).items():
            limit, label = growing(dtype)[0], LABELS[dtype]
            betas = {b for g in settings["groups"] for b in g.get("betas") or () if 0.0 < b < 1.0}
            stays = f"; bias correction stays at 1 - {max(betas):g}^{limit} = " if betas else ""
            stays += f"{1.0 - max(betas) ** limit:.2g}" if betas else ""
            yield warning(
                code="precision-narrow-counter",
                message=f"{settings['optimizer']} counts its steps in {label} ({name}), which stops at "
                f"{limit:,}; it stands at {value:,.0f}{stays}",
                evidence={"state": name, "dtype": dtype, "value": value, "limit": limit},
                fix="make the counter in FP32: torch.tensor(0.0, dtype=torch.float32)",
            )


def _not_finite(parameters: Sequence[ParameterPrecision], run: Recorded) -> Iterator[Finding]:
    """Weights that are infinite or NaN from the first recorded step on: no update changes them."""
    found = not_finite(run, {p.name for p in parameters if p.trainable})
    if found:
        most = max(found, key=lambda name: found[name])
        yield warning(
            code="precision-weights-not-finite",
            message=f"{spoken_parameters(list(found))} held infinite or NaN elements in the first "
            f"recorded step; {most} has {found[most]:,}, and no update changes them",
            evidence={"parameters": list(found)[:20], "elements": sum(found.values())},
            fix="initialize in FP32, and check torch.isfinite before the first step",
        )


def _stuck_states(
    holder: str, held: Sequence[ParameterPrecision], facts: PrecisionFacts, *, proved: bool
) -> Iterator[Finding]:
    """States that cannot fall or grow: rounding gives the old value back.

    Of an optimizer that is not torch's, whose formula is not known, only what was measured is said.
    """
    groups = _settings_of(facts, holder)
    factors = moments(holder, groups)
    # On a CPU torch rounds this one's factor to the state's dtype; where all values stay, they stay.
    foreach = any(group.get("foreach") for group in groups)
    for state, dtype in sorted({item for p in held for item in p.states.items()}):
        if dtype not in NARROW:
            continue
        seen = next((s for s in facts.shadows if (s.optimizer, s.state) == (holder, state)), None)
        kind = "still-state", (holder, state)
        stayed = next((one for one in facts.observed if (one.kind, one.names) == kind), None)
        # From which step on, and the evidence.
        told: list[tuple[str, float, Mapping[str, Any]]] = []
        for factor in sorted(factors.get(state, ())):
            found = decay(dtype, factor)
            whole = found.stuck == found.values
            if found.stuck and (whole or not foreach) and (proved or _is_off(seen)):
                share = f"all {found.values:,}" if whole else f"{found.stuck:,} of {found.values:,}"
                words = (
                    f"{'cannot' if whole else 'can hardly'} fall by its factor {factor:g}; rounding "
                    f"gives back {share} normal values of {LABELS[dtype]}"
                )
                told.append((words, 0, {"factor": factor, **vars(found)}))
        if proved and (holder, state) == ("Adagrad", "sum"):
            few, many = growing(dtype)
            told.append((f"stops growing after {few:,} to {many:,} equal squares", few, {}))
        for power in slowing(holder, groups).get(state, ()) if proved else ():
            step = stops_falling(dtype, power)
            told.append((f"cannot fall from step {step:,} on", step, {"from_step": step}))
        if not proved and not told and stayed is not None and stayed.size > MOST_STILL:
            told.append(("hardly changes", float("inf"), {}))
        for words, begins, evidence in told:
            measured = {"measured": None if seen is None else vars(seen)}
            harms = _is_off(seen) or seen is None or seen.steps < EARLY
            yield Finding(
                severity="warning" if harms and facts.step >= begins else "info",
                code="precision-stuck-state",
                message=f"{holder}'s {state} in {LABELS[dtype]} {words}{_measured(seen, stayed)}",
                evidence={
                    **_named([p for p in held if p.states.get(state) == dtype]),
                    "state": state,
                    "dtype": dtype,
                    **evidence,
                    **measured,
                },
                fix=f"keep {state} in FP32: FP32 masters, or an optimizer with FP32 states",
            )


def _is_off(seen: Shadow | None) -> bool:
    """Whether a state was measured to be far from FP32's."""
    return seen is not None and seen.steps >= EARLY and not 0.9 < seen.median < 1.1


def _measured(seen: Shadow | None, stayed: Observed | None) -> str:
    """How far a state is from FP32's, and what that does to Adam's steps, as it was measured."""
    if seen is None and stayed is not None:
        return f"; {percent(stayed.size)} of its elements did not change in step {stayed.last:,}"
    if seen is None:
        return "; how far it is from FP32's was not measured"
    if seen.steps < EARLY:
        return f"; {counted(seen.steps, 'step')} are too few to measure how far it is from FP32's"
    factor = seen.median**-0.5
    after = f"; after {counted(seen.steps, 'step')} it is"
    median = f"(median of {seen.elements:,} elements)"
    if 0.95 < factor < 1.05:
        return f"{after} about as large as FP32's so far {median}"
    return (
        f"{after} {seen.median:.2g} times FP32's {median}, "
        f"so that steps are {factor:.2g} times as large"
    )


def _narrow_states(holder: str, held: Sequence[ParameterPrecision]) -> Iterator[Finding]:
    """FP32 weights whose optimizer keeps statistics in half precision, or in bytes."""
    narrow = HALF | BYTES
    those = [
        p
        for p in held
        if (p.master or p.stored) == "float32" and narrow.intersection(p.states.values())
    ]
    if those:
        kept = {(n, d) for p in those for n, d in p.states.items() if d in narrow}
        states, dtypes = (sorted(set(one)) for one in zip(*kept, strict=True))
        yield info(
            code="precision-narrow-state",
            message=f"{holder} keeps {', '.join(states)} of {_some(those)} in "
            f"{'/'.join(LABELS.get(d, d) for d in dtypes)}, though the weights are FP32",
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
                yield warning(
                    code="precision-decay-without-effect",
                    message=f"weight decay of {strength:g} at a learning rate of {rate:g} has no effect "
                    f"on {label} weights; 1 - {rate * strength:.2g} times any of {label}'s "
                    f"{found.values:,} normal values rounds back to it",
                    evidence={**_named(those), "factor": factor, "values": found.values},
                    fix="keep FP32 masters, or set weight_decay=0",
                )


def _standing_still(
    parameters: Sequence[ParameterPrecision], run: Recorded, facts: PrecisionFacts
) -> Iterator[Finding]:
    """Half-precision weights that did not move although they had a gradient.

    Torch's optimizers round to nearest. One of the script's own may round stochastically, and then an
    element that stood still has lost nothing.
    """
    those = [p for p in parameters if p.stored in HALF and p.master is None and p.optimizer]
    if not those:
        return
    seen = standstill(run, {p.name for p in those})
    if seen.share > STILL:
        label = "/".join(sorted({LABELS[p.stored] for p in those}))
        torchs = all(_is_torchs(facts, name) for p in those for name in p.holders)
        rates = {
            one.names[1]: one.size
            for one in facts.observed
            if one.kind == "moving-rate"
            and one.names[0] in {name for p in those for name in p.holders}
        }
        why = (
            "their updates round to nothing"
            if torchs
            else "rounding to nearest loses these updates, "
            "stochastic rounding keeps them on average"
        )
        never = f"; {spoken_parameters(seen.unmoved)} never moved" if seen.unmoved else ""
        yield Finding(
            severity="warning" if torchs else "info",
            code="precision-updates-rounded-away",
            message=f"at least {percent(seen.share)} of the {label} weights with a gradient did not "
            f"move in a step; {why}{never} ({counted(seen.steps, 'step')} recorded){_from_rate(rates)}",
            evidence={**_named(those), **vars(seen), "rates": rates},
            fix="keep FP32 masters, or round updates stochastically",
        )


def _from_rate(rates: Mapping[str, float]) -> str:
    """Name the learning rates below which 1 % and half of the weights do not move."""
    if not {"0.5", "0.99"} <= rates.keys():
        return ""
    return (
        f"; 1 % of the weights do not move below a learning rate of about {rates['0.99']:.2g}, half "
        f"below {rates['0.5']:.2g}"
    )


def _observed(facts: PrecisionFacts) -> Iterator[Finding]:
    """What values showed and dtypes do not."""
    by_kind: dict[str, list[Observed]] = defaultdict(list)
    for one in facts.observed:
        by_kind[one.kind].append(one)
    if moved := by_kind["frozen-moved"]:
        largest = max(moved, key=lambda one: one.size)
        yield warning(
            code="precision-frozen-moved",
            message=f"{spoken_parameters([one.names[0] for one in moved])} changed, though frozen "
            f"(requires_grad is False); {largest.names[0]} moved by {percent(largest.size)} of its "
            f"size by step {largest.last}",
            evidence={"parameters": [one.names[0] for one in moved][:20], "size": largest.size},
            fix="leave frozen parameters out of the optimizer",
        )
    for one in by_kind["no-orthogonalization"]:
        yield warning(
            code="precision-no-orthogonalization",
            message=f"{one.names[0]} moves {one.names[1]} by a multiple of its gradient; without "
            "orthogonalization this step is SGD's",
            evidence={"optimizer": one.names[0], "parameters": [one.names[1]]},
            fix="orthogonalize the gradient in step(), or in the engine before it",
        )
    for one in by_kind["parted"]:
        yield warning(
            code="precision-equal-parted",
            message=f"{one.names[0]} and {one.names[1]} were equal before the first step and differ "
            f"after step {one.first}; if they were tied, the tie is broken",
            evidence={"parameters": list(one.names), "step": one.first},
            fix=f"tie them again: {one.names[1]} = {one.names[0]}",
        )
    if narrow := [one for one in by_kind["narrow-values"] if one.last > one.first]:
        states = sorted({one.names[0] for one in narrow})
        names = list(dict.fromkeys(one.names[1] for one in narrow))
        yield warning(
            code="precision-narrow-values",
            message=f"{', '.join(states)}: stored in FP32, but each value looked at is a BF16 number; "
            f"something rounds it in each step ({spoken_parameters(names)})"
            f"{_cannot_fall(facts, states)}",
            evidence={"parameters": names[:20], "states": states},
            fix="look for a cast to BF16 in the optimizer, or in the kernel that it calls",
        )
    without: dict[tuple[str, float], list[str]] = defaultdict(list)
    for one in by_kind["factor-without-effect"]:
        without[one.names[0], one.size].append(one.names[1])
    for (holder, factor), names in without.items():
        yield warning(
            code="precision-decay-without-effect",
            message=f"{holder} multiplies {spoken_parameters(names)} by {factor:.6g}, and no element "
            "changes; rounding gives each value back, so weight decay has no effect",
            evidence={"parameters": names[:20], "factor": factor},
            fix="keep FP32 masters, or set weight_decay=0",
        )
    for one in by_kind["optimizer-products"]:
        holder, dtype = one.names
        if dtype in HALF:
            yield info(
                code="precision-optimizer-products",
                message=f"{holder} multiplies in {LABELS[dtype]} inside its step",
                evidence={"optimizer": holder, "dtype": dtype, "products": int(one.size)},
                fix="compare with FP32 products if the updates look noisy",
            )


def _cannot_fall(facts: PrecisionFacts, states: Sequence[str]) -> str:
    """That a state which is rounded to BF16 cannot fall by its factor, and how far that has led."""
    for named in states:
        holder, _, state = named.rpartition(".")
        for factor in moments(holder, _settings_of(facts, holder)).get(state, ()):
            found = decay("bfloat16", factor)
            if found.stuck == found.values:
                own = [s for s in facts.shadows if (s.optimizer, s.state) == (holder, state)]
                return (
                    f"; rounding to nearest, {state} cannot fall by its factor {factor:g}"
                    f"{_measured(own[0] if own else None, None)}"
                )
    return ""


def _without_scale(
    autocast: Sequence[str], run: Recorded, operations: Sequence[Operation]
) -> Iterator[Finding]:
    """FP16 autocast without a loss scale."""
    if "float16" not in autocast:
        return
    scales = np.concatenate([rows.scale for rows in run.pieces(histograms=False)])
    if (np.isnan(scales) | (scales == 1.0)).all():
        yield warning(
            code="precision-no-loss-scale",
            message="autocast computes in FP16, and no loss scale was seen; "
            f"{_lost_gradients(operations)}",
            evidence={"autocast": list(autocast)},
            fix="use torch.amp.GradScaler, or train in BF16",
        )


def _lost_gradients(operations: Sequence[Operation]) -> str:
    """What became 0 where recorded backward passes cast gradients from FP32 to FP16."""
    worst, at = 0.0, ""
    for o in operations:
        if o.op == "_to_copy" and o.phase == "backward" and o.outputs[0].dtype == "float16":
            read, made = o.inputs[0], o.outputs[0]
            values = read.numel - read.zeros
            if read.dtype == "float32" and read.counted and values:
                share = (made.zeros - read.zeros) / values
                worst, at = max((worst, at), (share, o.where))
    if worst == 0.0:
        return "small gradients become 0"
    return f"{percent(worst)} of the gradients that are cast to FP16{f' at {at}' if at else ''} become 0"


def _narrow_sums(
    parameters: Sequence[ParameterPrecision], facts: PrecisionFacts
) -> Iterator[Finding]:
    those = [p for p in parameters if p.accumulated in HALF]
    sums = {one.count: one for one in facts.observed if one.kind == "gradient-sum"}
    # Where every sum took one gradient, the script adds elsewhere.
    if those and (not sums or max(sums) > 1):
        told = ""
        if sums:
            most, few = max(sums), min(sums.keys() - {1})
            told = f" over {most} micro-batches; the sum is {percent(sums[most].size)} off FP32's"
            told += "" if few == most else f", and {percent(sums[few].size)} after {few}"
        label = "/".join(sorted({LABELS[str(p.accumulated)] for p in those}))
        yield info(
            code="precision-narrow-sum",
            message=f"gradients of {_some(those)} add up in {label}{told or ' over micro-batches'}",
            evidence={
                **_named(those),
                "off": {str(n): one.size for n, one in sums.items()},
                "stops_growing": min(growing(str(p.accumulated))[0] for p in those),
            },
            fix="with many micro-batches, accumulate in FP32",
        )


def _narrow_reductions(parameters: Sequence[ParameterPrecision], ranks: int) -> Iterator[Finding]:
    those = [p for p in parameters if p.reduced in HALF]
    if those:
        dtype = max((str(p.reduced) for p in those), key=lambda d: sum_bound(d, 1))
        # Each rank's gradient is rounded, n - 1 sums are, and a mean over no power of two is.
        own, eightfold = (sum_bound(dtype, n + bool(n & (n - 1))) for n in (ranks, 8 * ranks))
        told = ""
        if ranks > 1 and own < 1.0:  # else nothing is known
            told = (
                f"; rounding moves a sum over {ranks:,} ranks by up to {percent(own)} of its terms"
            )
            told += f" ({percent(eightfold)} over {8 * ranks:,})" if eightfold < 1.0 else ""
        label = "/".join(sorted({LABELS[str(p.reduced)] for p in those}))
        yield info(
            code="precision-narrow-reduction",
            message=f"gradients of {_some(those)} are added over ranks in {label}{told}",
            evidence={**_named(those), "ranks": ranks, "bound": own},
            fix="reduce in FP32: FSDP's reduce_dtype=torch.float32, or DDP without its hook",
        )


def _some(parameters: Sequence[ParameterPrecision]) -> str:
    return spoken_parameters([p.name for p in parameters])
