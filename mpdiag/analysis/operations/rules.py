"""Rules over operation records: which operations must stay in FP32, each with its numbers.

A rule uses the values that a tensor *held* in the FP32 recording and the precision it *would be stored
in* (see ``graph``). Only storage counts: Tensor Cores, and PyTorch's reductions on every device,
accumulate in FP32 whatever they read, so a long sum is not a problem in itself; its stored result may
be.

* ``overflow``: a result leaves the format's range (products, powers, sums, exponentials, norms).
* ``mask-fill``: a number the format cannot hold is filled in.
* ``vanishing``: values become 0 that are divided by, or whose logarithm or root is taken: an
  epsilon of 1e-8, a variance of 1e-9.
* ``cancellation``: a difference of nearly equal numbers is mostly rounding error.
* ``swallowed``: small numbers are added to one so large that it does not change: in a running sum,
  before a logarithm, or in ``1 - p`` before a product of many or a logarithm.
* ``imprecise``: a running value, carried from step to step, is moved by less than the spacing.
* ``gradient-overflow``: a backward operation leaves the range at the plan's loss scale.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mpdiag.analysis.operations.consequences import SINGULAR, Fate, fate
from mpdiag.analysis.operations.graph import (
    FP32_LIMIT,
    StepGraph,
    StoredStep,
    low_composite,
    stored_itself,
)
from mpdiag.analysis.operations.sources import before_difference
from mpdiag.analysis.scaling.necessity import MATTERS, NEEDED
from mpdiag.display.wording import percent, scale_text
from mpdiag.numerics.autocast_lists import LISTS, NO_HALF_FUNCTIONS, OPERATIONS, policy_name
from mpdiag.numerics.formats import FloatFormat
from mpdiag.runs.operations import NONE, Operation, TensorRecord

Code = Literal[
    "overflow", "mask-fill", "vanishing", "cancellation", "swallowed", "gradient-overflow",
    "imprecise", "indistinct", "diverging", "underflow", "no-half-kernel", "gradient-error",
]  # fmt: skip
CoveredBy = Literal["", "lists", "neighbours"]

WRONG = 0.05
"""Share of its norm by which rounding may change a result, from which the result counts as wrong.

Trainings in FP16, each against its FP32 twin (``studies/cases``): a kernel on distances that are 7 %
off failed. Of those that took no harm two are off by more, a slope by 10 % and rotary angles by 16 %,
and none by 2 to 7 %.
"""
FELT = 1.0
"""How far errors must move the loss, beside a step and beside what is left of the loss, to count.

It is where theory puts it: errors that move the loss less than a step does are one more noise below the
noise of batches, and such below what is left of the loss are below each sample's own residual. Trainings
agree (``studies/cases``, both open sets): of differences whose FP16 error moves it by 0.6 or less none
did harm, of those from 2.6 all did, and at 1.5 one stayed within its margin; in BF16 0.5 and 1.9 are the
nearest.
"""
PART_FELT = 0.5
"""The same of one operation among several: the errors of four that do half make a whole."""
SWALLOWED = 0.5
"""Share of additions without effect from which a running sum counts as stuck."""
COARSE = 0.25
"""Rounding error of ``1 - p`` beside p from which the product of many, or a logarithm, is wrong.

That of a p as large as the format's spacing there is 0.29; from half of it down all of p is lost.
"""
RUNNING = 8
"""Number of consecutive additions that make a running sum."""
_DEPTH = 8

_SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub"})
_LOGARITHMS = frozenset({"log", "log2", "log10"})
_PRODUCTS = frozenset({"cumprod", "prod"})
_FILLS = frozenset({"masked_fill", "masked_fill_", "fill", "fill_"})


@dataclass(frozen=True)
class OperationFinding:
    """An operation that must stay in FP32 or be rewritten.

    Attributes:
        code: The rule.
        op: The operation's name, as ``fp32_operations`` takes it.
        aten: ATen's own name.
        module: Name of the module it is called in, None outside the models.
        where, text: The user's line.
        reason: One sentence with the recorded numbers, about the operation's values or ``about``'s.
        without: What happens without it.
        about: The operation whose values the reason is about, where keeping ``op`` in FP32 makes them
            FP32; None where these are its own.
        instead: What to do in place of keeping it in FP32, as an imperative; empty if nothing is known.
        covered: It is harmless under the operation policy, and harmful only if everything is low.
        covered_by: ``lists``: the policy computes it, or what it reads, in FP32; ``neighbours``: it
            is on no list, but what it reads comes from outside in FP32, or what reads it is FP32;
            empty where it is not covered.
        flops_share, bytes_share: Its share of the step's operations, backward included.
        evidence: The numbers.
        index: The operation's place in its step.
    """

    code: Code
    op: str
    aten: str
    module: str | None
    where: str
    text: str
    reason: str
    without: str
    about: Operation | None = None
    instead: str = ""
    covered: bool = False
    covered_by: CoveredBy = ""
    flops_share: float = 0.0
    bytes_share: float = 0.0
    evidence: Mapping[str, Any] = field(default_factory=dict)
    index: int = -1

    @property
    def place(self) -> str:
        """The module, or the line if there is none."""
        return self.module or self.where or "(the training loop)"

    @property
    def subject(self) -> str:
        """What the reason is about: ``mul in head at model.py:12``."""
        op = self.about
        return (
            located(self.op, self.module, self.where)
            if op is None
            else located(called(op), op.module, op.where)
        )

    @property
    def told(self) -> str:
        """The reason, beside the operation's own name."""
        return (
            self.reason if self.about is None else f"to keep {self.subject} in FP32: {self.reason}"
        )

    @property
    def fix(self) -> str:
        """What to do, as an imperative."""
        return fix_of([self])


def located(op: str, module: str | None, where: str) -> str:
    """An operation's name and place, as a sentence has them."""
    name = "the conversion" if op == "_to_copy" else op
    inside = f" in {module}" if module else ""
    return f"{name}{inside}{f' at {where}' if where and where != module else ''}"


def fix_of(findings: Sequence[OperationFinding]) -> str:
    """What to do about findings that share a reason, as an imperative."""
    first = findings[0]
    if first.op == "_to_copy":
        return f"convert to FP32 there{f', or {first.instead}' if first.instead else ''}"
    kept: dict[str, list[str]] = {}
    for f in findings:
        kept.setdefault((f.module or "") if f.about else "", []).append(f.op)
    names = [
        " and ".join(dict.fromkeys(ops)) + (f" of {module}" if module else "")
        for module, ops in kept.items()
    ]
    told = f"keep {', '.join(names)} in FP32"
    if first.about is not None:
        told += f" to keep {located(called(first.about), None, '')} in FP32"
    return f"{told}, or {first.instead}" if first.instead else told


def overflows(step: StoredStep) -> Iterator[OperationFinding]:
    """Find results and fill values that leave the format's range."""
    graph, low, target = step.graph, step.low, step.target
    for op in step.forward:
        fill = _fill(op, target)
        if fill is not None and any(low[t.tensor] for t in op.outputs):
            yield finding_of(
                op,
                "mask-fill",
                f"it writes {fill:g}, which {target.label} cannot hold (±{target.max:g})",
                "fill with torch.finfo(x.dtype).min",
                "PyTorch refuses to convert the number, or a masked row becomes NaN",
                {"value": fill},
            )
            continue
        product = LISTS.get(policy_name(op.op)) == "low" and step.policy
        read = [t for t in op.inputs if product and not low[t.tensor] and graph.overflow(t, target)]
        wrote = [t for t in op.outputs if low[t.tensor] and graph.overflow(t, target)]
        if wrote and all(graph.masked_softmax(t) for t in wrote):
            continue
        if read or wrote:
            leads_to = fate(step, op, read=not wrote)
            if not wrote or leads_to.reaches != "alike":
                t = (wrote or read)[0]
                yield _overflow(graph, op, t, target, leads_to, read_only=not wrote)


def _fill(op: Operation, target: FloatFormat) -> float | None:
    """A fill value that the format cannot hold; a dtype's own limit adapts to the dtype and is fine."""
    value = op.scalars.get("value")
    if op.op not in _FILLS or not isinstance(value, (int, float)):
        return None
    follows = abs(value) >= FP32_LIMIT and ".dtype" in op.code
    return float(value) if target.overflows(abs(value)) and not follows else None


def _instead_of_product(op: Operation, target: FloatFormat) -> str:
    """What to do about a product or a power that leaves the range."""
    factors = [v for v in op.scalars.values() if type(v) in (int, float)]
    if "mul" in op.op and any(abs(v) > target.max for v in factors):
        # Not -inf: a row that is masked everywhere, as here, is then NaN in FP32, too.
        return "use masked_fill(mask, torch.finfo(x.dtype).min) if it is a mask"
    if "mul" in op.op and len({t.tensor for t in op.inputs}) > 1:
        return "divide a factor first"
    return "divide before it is squared"


def _overflow(
    graph: StepGraph,
    op: Operation,
    t: TensorRecord,
    target: FloatFormat,
    leads_to: Fate,
    *,
    read_only: bool,
) -> OperationFinding:
    """The finding for an operation of which some result or input values leave the range."""
    count, largest = graph.overflow(t, target), graph.largest(t)
    evidence: dict[str, Any] = {
        "absmax": largest,
        "overflow": count,
        "of": t.numel,
        "largest": target.max,
    }
    told = f"its {'input' if read_only else 'result'} reaches {largest:.3g}"
    instead = ""
    growth = graph.growth.get(t.tensor)
    if growth is not None:
        evidence |= {"grown": growth.name, "growth": growth.factor, "grown_step": growth.step}
        told += f" by step {growth.step} (estimated from how {growth.name or 'the model'} grows)"
    elif "highest" in op.facts and op.op.startswith("exp"):
        evidence["highest"] = op.facts["highest"]
        told = f"its exponent reaches {op.facts['highest']:.3g} and its result {largest:.3g}"
        instead = "subtract the maximum before exp (torch.softmax, torch.logsumexp do)"
    elif op.reduction > 1:
        source = op.inputs[0]
        mean = float(source.histogram.abs_sum().value) / max(1, source.numel)
        evidence |= {"reduction": op.reduction, "mean_magnitude": mean}
        if op.op == "sum":
            told = f"a sum of {op.reduction} values of about {mean:.3g} reaches {largest:.3g}"
            instead = "take the mean"
    elif op.op in ("pow", "mul", "square", "pow_", "mul_"):
        instead = _instead_of_product(op, target)
    return finding_of(
        op,
        "overflow",
        f"{told}, beyond {target.label}'s largest value {target.max:g}",
        instead,
        leads_to.of_values(f"{count:,} of {t.numel:,} values become infinite"),
        evidence,
    )


def vanishing(step: StoredStep) -> Iterator[OperationFinding]:
    """Find values that become 0 and are divided by, or whose logarithm or root is taken."""
    graph, low, target = step.graph, step.low, step.target
    for op in graph.operations:
        name = singular_argument(op)
        t = op.input(name) if name else None
        if op.node or t is None or not low[t.tensor] or not graph.lost(t, target):
            continue
        if op.op.startswith("sqrt") and not graph.backward.get(op.index):
            continue  # the root of 0 is 0; only its slope is infinite
        at = graph.producer(t)
        origin = op if at is None else at
        epsilon = _epsilon(origin, target)
        told = (
            f"the epsilon {epsilon:g} is 0 in {target.label}"
            if epsilon is not None
            else f"{graph.lost(t, target):,} of its {t.numel:,} values (smallest {t.absmin:.3g}) are 0 "
            f"in {target.label}"
        )
        evidence = {
            "absmin": t.absmin,
            "lost": graph.lost(t, target),
            "of": t.numel,
            "consumer": op.op,
            "consumer_line": op.where,
        }
        if epsilon is not None:
            evidence["eps"] = epsilon
        smallest = target.smallest_normal
        for one in _low_sources(step, origin):
            yield finding_of(
                one,
                "vanishing",
                f"{told}, and {op.op} follows",
                f"use an epsilon of at least {smallest:.2g}",
                of_zero(step, op),
                evidence,
                origin,
            )


def of_zero(step: StoredStep, op: Operation) -> str:
    """What follows where an operation reads 0 and must not, as a clause."""
    if op.op.startswith("sqrt"):
        return "sqrt has an infinite slope at 0, and the gradients become NaN or Inf"
    return fate(step, op, read=True).of_values(f"{op.op} of 0 gives Inf or NaN")


def singular_argument(op: Operation) -> str | None:
    """The argument of an operation that must not be 0; None if 0 is harmless."""
    if op.op in ("pow", "pow_"):
        exponent = op.scalars.get("exponent")
        return "self" if isinstance(exponent, (int, float)) and exponent < 0 else None
    return SINGULAR.get(op.op)


def _epsilon(op: Operation, target: FloatFormat) -> float | None:
    """A constant, added or used as a lower bound, that the format turns into 0."""
    for name in ("other", "min"):
        value = op.scalars.get(name)
        if isinstance(value, float) and 0 < value <= 2.0**target.zero_exponent:
            return value
    return None


def _low_sources(step: StoredStep, op: Operation) -> list[Operation]:
    """An operation and those before it that would themselves store the vanished values."""
    found, waiting = {op.index: op}, [op]
    while waiting and len(found) < _DEPTH:
        for t in waiting.pop().inputs:
            before = step.graph.producer(t)
            if before is None or before.node or before.index in found:
                continue
            if step.low[t.tensor] and step.graph.lost(t, step.target):
                found[before.index] = before
                waiting.append(before)
    return list(found.values())


def differences(step: StoredStep) -> Iterator[OperationFinding]:
    """Find differences of nearly equal numbers, which are mostly rounding error that the loss feels."""
    graph, low, target = step.graph, step.low, step.target
    wrong = [op for op in graph.operations if _mostly_error(step, op)]
    felt = _felt(graph, wrong, target)
    for op in wrong:
        change = felt.get((op.module, op.where))
        if change is not None and change < FELT:
            continue
        error, ratio = op.facts[f"error_{target.name}"], op.facts.get("result_over_operand", 1.0)
        operands = [t for t in op.inputs if low[t.tensor] and t.counted]
        evidence = {"error": error, "result_over_operand": ratio, "absmax": operands[0].absmax}
        if change is not None:
            evidence["loss_change"] = change
        reason = (
            f"it subtracts nearly equal numbers (the result is {ratio:.2g} times as large): in "
            f"{target.label}, {percent(min(1.0, error), 0)} of the result is rounding error"
        )
        makers = before_difference(
            step, operands, error, WRONG, lambda made: _is_felt(graph, made, target)
        )
        if not makers and all(graph.producer(t) for t in operands):
            continue  # no operation's own rounding is felt
        for one in (op, *makers):
            yield finding_of(
                one,
                "cancellation",
                reason,
                "use a form without the subtraction (torch.var, centre first)",
                "the result is noise; a variance computed this way may be 0 or negative",
                {**evidence, "subtraction": op.where},
                op,
            )


def _mostly_error(step: StoredStep, op: Operation) -> bool:
    """Whether an operation is a difference whose result is far off if its operands are stored."""
    error = op.facts.get(f"error_{step.target.name}", 0.0)
    wrong = not op.node and cancels(op) and error >= WRONG
    return wrong and any(step.low[t.tensor] and t.counted for t in op.inputs)


def cancels(op: Operation) -> bool:
    """Whether an operation is a difference that leaves less than half of what it reads."""
    return op.op in _SUMS and op.facts.get("result_over_operand", 1.0) <= 0.5


def _is_felt(graph: StepGraph, op: Operation, target: FloatFormat) -> bool | None:
    """Whether the loss feels the rounding of a result; None where that is not known."""
    changes = graph.loss_change.of_rounding(op, target)
    return None if changes is None else min(changes) >= PART_FELT


def _felt(
    graph: StepGraph, differences: Sequence[Operation], target: FloatFormat
) -> dict[tuple[str | None, str], float]:
    """How much of a loss the errors of differences change, by place, where that is known.

    It is the smaller of the two figures of ``LossChange``, and the largest of a place's calls.
    """
    found: dict[tuple[str | None, str], float] = {}
    for op in differences:
        size = op.facts[f"error_{target.name}"] * rms(op.outputs[0])
        changes = graph.loss_change.of_error(op, size)
        if changes is not None:
            place = op.module, op.where
            found[place] = max(found.get(place, 0.0), min(changes))
    return found


def running_sums(step: StoredStep) -> Iterator[OperationFinding]:
    """Find running sums, and sums before a logarithm, that small addends do not change."""
    graph, low, target = step.graph, step.low, step.target
    length: dict[int, int] = {}
    for op in step.forward:
        if op.op not in _SUMS:
            continue
        chain = [length.get(t.producer, 0) for t in op.inputs if _same_line(graph, t, op)]
        length[op.index] = 1 + max(chain, default=0)
        share = op.facts.get(f"swallowed_{target.name}", 0.0)
        stored = any(low[t.tensor] for t in op.outputs)
        if not stored or share < SWALLOWED:
            continue
        readers = graph.readers.get(op.index, [])
        logarithm = next((r for r in readers if r.op in _LOGARITHMS), None)
        lost = 0.0 if logarithm is None else _share_of_logarithm(op, logarithm)
        if lost >= WRONG:
            told = (
                f"{percent(share, 0)} of the small addends are rounded away, and with them "
                f"{percent(min(1.0, lost), 0)} of the logarithm that follows"
            )
            instead = "write torch.log1p(x) for log(1 + x)"
            without = "the logarithm is 0 for small x"
        elif length[op.index] >= RUNNING:
            told = (
                f"the running sum stops changing in {percent(share, 0)} of its elements (addition "
                f"{length[op.index]} in a row)"
            )
            instead = "add in pairs"
            without = "the sum stops growing"
        else:
            continue
        large, small = op.outputs[0].absmax, min(t.absmax for t in op.inputs)
        yield finding_of(
            op,
            "swallowed",
            f"{told}; the sum reaches {large:.3g}, and {target.label} has "
            f"{target.mantissa_bits + 1} bits",
            instead,
            without,
            {
                "swallowed": share,
                "absmax": large,
                "added": small,
                "length": length[op.index],
                **({"share_of_logarithm": lost} if logarithm is not None else {}),
            },
        )


def carried(step: StoredStep) -> Iterator[OperationFinding]:
    """Find running values that a step moves by less than half of the spacing, so that they stand still.

    Such a value was there before the step, has no gradient and the shape of what it becomes: a running
    mean that is kept in another tensor's dtype. How far a step moves it is told by its largest element.
    """
    graph, target = step.graph, step.target
    for op in step.forward:
        share = op.facts.get(f"swallowed_{target.name}", 0.0)
        if op.op not in _SUMS or share < SWALLOWED or graph.backward.get(op.index):
            continue
        known = [_before_the_step(graph, op, t) for t in op.inputs]
        before = [pair for pair in known if pair is not None and pair[0].tensor not in graph.data]
        conversions = [*(c for _, made in before for c in made), *graph.readers.get(op.index, [])]
        stored = [
            c
            for c in conversions
            if c.index in graph.followed and any(step.low[t.tensor] for t in c.outputs)
        ]
        if not before or not stored:
            continue
        large = max(before[0][0].absmax, target.smallest_normal)
        moved = abs(op.outputs[0].absmax - before[0][0].absmax)
        spacing = 2.0 ** (math.floor(math.log2(large)) - target.mantissa_bits)
        if moved < spacing / 2:
            yield finding_of(
                stored[-1],
                "imprecise",
                f"it stores a running value of {large:.3g} in {target.label}; a step changes it by "
                f"{moved:.2g}, which {target.label} rounds away (under {spacing / 2:.2g})",
                "keep the running value in FP32",
                "the running value never changes",
                {"swallowed": share, "absmax": large, "moved": moved, "running": True},
            )


def _before_the_step(
    graph: StepGraph, op: Operation, t: TensorRecord
) -> tuple[TensorRecord, list[Operation]] | None:
    """The value from before the step that one of the result's shape is, times a number; or None.

    With it its conversions on the way.
    """
    conversions: list[Operation] = []
    for _ in range(_DEPTH):
        made = graph.producer(t)
        if t.shape != op.outputs[0].shape or not t.counted:
            return None
        if made is None:
            return t, conversions
        if (
            made.node
            or made.op not in ("mul", "clone", "_to_copy")
            or graph.backward.get(made.index)
        ):
            return None
        conversions += [made] if made.op == "_to_copy" else []
        t = made.inputs[0]
    return None


def complements(step: StoredStep) -> Iterator[OperationFinding]:
    """Find ``1 - p`` of a p that the format's spacing at 1 rounds away, where all that counts is p.

    The product of many and a logarithm go by how far a factor is from 1: a chance of 2e-4 a day. What is
    only multiplied by ``1 - p`` is right to the format's digits.
    """
    graph, target = step.graph, step.target
    for op in step.forward:
        small = _beside_one(op)
        if small is None or not any(step.low[t.tensor] for t in op.outputs):
            continue
        error = op.facts.get(f"error_{target.name}", 0.0) * rms(op.outputs[0])
        share, half = min(1.0, error / rms(small)), 2.0 ** (-target.mantissa_bits - 2)
        h = small.histogram
        gone = float(h.counts[h.exponents < math.log2(half)].sum()) / small.numel
        if share < COARSE and gone < WRONG:
            continue
        reader = _by_distance_from_one(graph, op)
        felt = None if reader is None else graph.loss_change.of_error(op, error)
        if reader is None or (felt is not None and min(felt) < FELT):
            continue
        told = f"loses {percent(share, 0)} of values of about {rms(small):.2g} next to 1"
        # What is lost is small beside the rest, but in some rows it is all there is.
        if share < COARSE:
            if reader.op not in _PRODUCTS:
                continue
            told = (
                f"rounds {percent(gone, 0)} of its results to 1 (values up to {half:.2g} next to 1)"
            )
        yield finding_of(
            op,
            "swallowed",
            f"{target.label} {told}, and {reader.op} follows",
            f"{'write' if reader.op in _LOGARITHMS else 'sum'} torch.log1p(-p)",
            f"{reader.op} reads 1, or 1 minus a multiple of {2.0 ** (-target.mantissa_bits - 1):.2g}",
            {"swallowed": share, "added": small.absmax, "consumer": reader.op},
        )


def _beside_one(op: Operation) -> TensorRecord | None:
    """What an operation adds to 1 or subtracts from it; None where it does not."""
    if op.op not in _SUMS or op.scalars.get("alpha", 1) != 1:
        return None
    terms = [t for t in op.inputs if t.counted]
    ones = [t for t in terms if t.absmin == t.absmax == 1.0 and not t.zeros]
    rest = [t for t in terms if t not in ones]
    one = len(ones) == 1 or (not ones and op.scalars.get("other") == 1)
    return rest[0] if one and len(rest) == 1 and rms(rest[0]) > 0 else None


def _by_distance_from_one(graph: StepGraph, op: Operation) -> Operation | None:
    """A logarithm, or a product of many, that goes by how far a result is from 1; None without one.

    Of a product that holds where a logarithm or a difference of nearly equal numbers follows: what is
    multiplied by it is right all the same.
    """
    seen = {op.index}
    waiting: list[tuple[Operation, Operation | None]] = [(op, None)]
    while waiting and len(seen) < 4 * _DEPTH:
        made, product = waiting.pop(0)
        for reader in graph.readers.get(made.index, []):
            if reader.index in seen:
                continue
            seen.add(reader.index)
            if reader.op in _LOGARITHMS or (cancels(reader) and product is not None):
                return product or reader
            if reader.op in _PRODUCTS:
                waiting.append((reader, product or reader))
            elif reader.op.rstrip("_") in OPERATIONS["near_one"]:
                waiting.append((reader, product))
    return None


def _share_of_logarithm(op: Operation, logarithm: Operation) -> float:
    """The smaller operand's share of a sum, relative to the logarithm of that sum.

    log(s + b) − log(s) is about b / s: all of log(1 + x) at small x, almost nothing of log(20).
    """
    sizes = [rms(t) for t in op.inputs if t.counted]
    numbers = (op.scalars.get("other"), op.scalars.get("self"))
    sizes += [abs(float(n)) for n in numbers if isinstance(n, (int, float))]
    total, result = rms(op.outputs[0]), rms(logarithm.outputs[0])
    return min(sizes, default=0.0) / total / result if total and result else 0.0


def rms(t: TensorRecord) -> float:
    """Root mean square of a tensor's values, by its histogram."""
    return float(np.sqrt(float(t.histogram.energy().value) / max(1, t.numel)))


def share_lost(t: TensorRecord, zero: int) -> float:
    """The share of a tensor's Σ|x| that lies at 2^``zero`` or below."""
    whole = float(t.histogram.abs_sum().value)
    return float(t.histogram.abs_sum(zero).value) / whole if whole else 0.0


def _same_line(graph: StepGraph, t: TensorRecord, op: Operation) -> bool:
    before = graph.producer(t)
    return before is not None and (before.file, before.line) == (op.file, op.line)


def gradients(step: StoredStep, scale: float) -> Iterator[OperationFinding]:
    """Find backward intermediates beyond the range; the loss scale considers only final gradients."""
    graph, low, target = step.graph, step.low, step.target
    for op in graph.operations:
        if not op.node or op.forward < 0:
            continue
        forward = graph.operations[op.forward]
        for t in op.outputs:
            factor = scale if t.tensor in graph.gradients else 1.0
            beyond = t.counted and target.overflows(t.absmax * factor)
            if not beyond or t.absmax >= FP32_LIMIT:  # a format's lowest number, as a filling
                continue
            if graph.is_masked(t, target.max / factor):
                continue
            reaches = f"reaches {t.absmax:.3g}"
            reaches += f" times the loss scale {factor:g}" if factor != 1 else ""
            evidence = {"absmax": t.absmax, "scale": factor, "backward": op.op}
            without = fate(step, op, factor).of_gradient(factor)
            if low[t.tensor]:
                blamed = [forward]
                reason = f"its backward pass ({op.op}) {reaches}"
            else:  # computed in FP32, and cast for a result that is narrow
                if stored_itself(step, forward):  # if nothing is kept in FP32, it is not this large
                    without = Fate("unknown").of_gradient(factor)
                given = graph.differentiated(t, op.forward)
                blamed = [g for g in given if any(low[o.tensor] for o in g.outputs)]
                reason = f"the gradient from {forward.op} {reaches}"
            for one in blamed:
                yield finding_of(one, "gradient-overflow", reason, "", without, evidence)
            if blamed:
                break
    yield from _lost_gradients(step, scale)


def _lost_gradients(step: StoredStep, scale: float) -> Iterator[OperationFinding]:
    """Find operations with a factor so large that the format loses their results' gradients.

    What their backward pass makes of it for an input is in range: the loss scale sees that alone.
    """
    lost = functools.partial(share_lost, zero=step.target.zero_exponent - int(math.log2(scale)))
    for op in (o for o in step.graph.operations if o.node and o.forward >= 0 and o.outputs):
        forward, made = step.graph.operations[op.forward], op.outputs[0]
        computed = any(t.producer != NONE and t.numel == made.numel for t in forward.inputs)
        if computed and any(step.low[t.tensor] for t in forward.outputs):
            given = [t for t in op.inputs if t.tensor in step.graph.gradients]
            share = max(map(lost, given), default=0.0)
            if share >= NEEDED and lost(made) < MATTERS:
                at = f"at a loss scale of {scale_text(scale)}"
                reason = f"{step.target.label} loses {percent(share)} of its result's gradient {at}"
                without = "the layers before it learn from what is left"
                evidence = {"lost": share, "scale": scale, "backward": op.op}
                yield finding_of(forward, "gradient-error", reason, "", without, evidence)


def called(op: Operation) -> str:
    """An operation's name as ``fp32_operations`` takes it; one in place keeps its own.

    A part of ``einsum`` is called ``einsum``: that is where autocast casts.
    """
    composite = op.function if op.function in NO_HALF_FUNCTIONS else low_composite(op)
    if composite:
        return composite
    return policy_name(op.op) if not op.op.endswith("_") else op.op


def finding_of(
    op: Operation,
    code: Code,
    reason: str,
    instead: str,
    without: str,
    evidence: Mapping[str, Any],
    about: Operation | None = None,
) -> OperationFinding:
    """A finding about an operation, with its place in the code."""
    return OperationFinding(
        code=code,
        op=called(op),
        aten=op.op,
        module=op.module,
        where=op.where,
        text=op.code,
        reason=reason,
        without=without,
        about=None if about is op else about,
        instead=instead,
        evidence={"step": op.step, **evidence},
        index=op.index,
    )


RULES = (overflows, vanishing, differences, running_sums, complements, carried)
"""The rules of the forward pass, which do not depend on the loss scale; ``gradients`` does."""
