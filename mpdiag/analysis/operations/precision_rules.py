"""Rules of precision: what stays inside the format's range and is still destroyed by rounding.

They rest on measured effects (``emulation/rounding_effect.py``): in the recorded steps each operation
ran again with one input rounded. A rule joins such a figure with the graph: is that input stored in
the format, and which operations made it so?

* ``imprecise``: rounding an input changes the result by a tenth and more: the cosine of a large angle,
  ``acosh`` close to 1, an index computed in floating point.
* ``indistinct``: data that a product or a loss reads differ by no more than their rounding:
  coordinates of 48.85 ± 0.005, time stamps, targets far from 0.
* ``diverging``: rounding an input makes a finite result infinite, or its slope: ``logit`` of 1 − 1e-6.
* ``vanishing``: results become 0 where their inputs are rounded, and are divided by, or their
  logarithm is taken, in FP32 or not: ``log(1 - p)``, the root of a sum of squares.
* ``underflow``: the factors of a product are so small that the format makes them 0: a conductance of
  1e-9.
* ``no-half-kernel``: PyTorch has no kernel for the format on CUDA; emulation computes it all the same.
"""

from collections.abc import Iterator, Mapping

from mpdiag.analysis.operations import rules
from mpdiag.analysis.operations.consequences import fate
from mpdiag.analysis.operations.graph import StepGraph, StoredStep, low_composite
from mpdiag.analysis.operations.sources import is_product
from mpdiag.display.wording import counted, percent
from mpdiag.numerics.autocast_lists import (
    FFT,
    LISTS,
    NO_BF16,
    NO_HALF,
    NO_HALF_FUNCTIONS,
    ONE_DTYPE,
    policy_name,
)
from mpdiag.numerics.formats import FloatFormat
from mpdiag.runs.operations import Operation, TensorRecord

NOISE = 0.05
"""Rounding error beside a feature's spread from which the feature counts as destroyed."""
FAINT = 0.25
"""Share of Σ|x| of a factor that becomes 0 from which a product counts as lost."""
CHANGED = 0.01
"""Share of integers and truth values that rounding changes from which they count as wrong."""
_DEPTH = 8
_SATURATING = frozenset("sigmoid tanh softmax log_softmax exp erf hardtanh sigmoid_ tanh_".split())
_PASSING_ZEROS = frozenset(
    """
    sum mean mul mul_ clone cat stack sqrt sqrt_ neg linalg_vector_norm _to_copy index select
    expand abs prod pow square where _unsafe_view
    """.split()
)
_SINGULAR_AT_ONE = frozenset("logit special_logit atanh erfinv acos asin acosh".split())
_STEEP_AT_ONE = frozenset({"acos", "asin", "acosh"})
_DIFFERENCES = frozenset({"sub", "rsub", "sub_"})
_COMPARISONS = frozenset({"gt", "lt", "ge", "le", "eq", "ne", "argmax", "argmin"})


def imprecise(step: StoredStep) -> Iterator[rules.OperationFinding]:
    """Find operations whose result the rounding of an input makes wrong."""
    low, target = step.low, step.target
    for op in step.forward:
        if op.op in _DIFFERENCES or op.op in _COMPARISONS:
            continue
        for t in op.inputs:
            error = _effect(op, "error", t, target)
            changed = _effect(op, "changed", t, target)
            if not low[t.tensor] or (error < rules.WRONG and changed < CHANGED):
                continue
            told = (
                f"{percent(changed, 0)} of the resulting integers"
                if changed >= CHANGED
                else f"the result by {percent(min(1.0, error), 0)}"
            )
            yield from _blamed(
                step,
                t,
                op,
                "imprecise",
                f"{op.op} reads its values (up to {t.absmax:.3g}), and rounding them to "
                f"{target.label} changes {told}",
                f"{op.op} computes from rounding errors",
                {"error": error, "changed": changed, "absmax": t.absmax},
            )


def indistinct(step: StoredStep) -> Iterator[rules.OperationFinding]:
    """Find data whose differences are no larger than their rounding, into a product or a loss."""
    low, target = step.low, step.target
    for op in step.forward:
        product = is_product(op)
        for t in op.inputs:
            noise = _effect(op, "noise", t, target)
            if noise < NOISE:
                continue
            evidence = {"noise": noise, "absmax": t.absmax}
            told = (
                f"values up to {t.absmax:.3g} with a rounding error in {target.label} of "
                f"{noise:.2g} times their spread"
            )
            without = "samples become equal"
            if product and (step.policy or low[t.tensor]):
                yield rules.finding_of(
                    op,
                    "indistinct",
                    f"it reads {told}",
                    "subtract the mean and divide by the spread first",
                    without,
                    evidence,
                )
            elif not product:
                for other in op.inputs:
                    if other is not t and low[other.tensor]:
                        yield from _blamed(
                            step,
                            other,
                            op,
                            "indistinct",
                            f"{op.op} compares its values with {told}",
                            without,
                            evidence,
                        )


def diverging(step: StoredStep) -> Iterator[rules.OperationFinding]:
    """Find inputs that rounding moves to where a function, or its slope, is infinite."""
    graph, low, target = step.graph, step.low, step.target
    for op in step.forward:
        for t in op.inputs:
            if not low[t.tensor] or (rules.singular_argument(op) and graph.lost(t, target)):
                continue
            count = int(_effect(op, "diverged", t, target))
            steep = op.op.rstrip("_") in _STEEP_AT_ONE and bool(graph.backward.get(op.index))
            reached = steep and _rounded(t.absmax, target) == 1.0 != t.absmax
            bound = _bound_that_becomes_one(graph, t, target)
            at_bound = bound is not None and op.op.rstrip("_") in _SINGULAR_AT_ONE
            if not (count or reached or at_bound):
                continue
            told = (
                f"the bound {bound:.9g} is 1 in {target.label}"
                if bound is not None
                else f"{max(1, count):,} of its {t.numel:,} values round to a point at which {op.op} is "
                f"{'infinitely steep' if reached and not count else 'not finite'}"
            )
            yield from _blamed(
                step,
                t,
                op,
                "diverging",
                f"{told}, and {op.op} follows",
                fate(step, op, read=True).of_values(f"{op.op} gives Inf or NaN"),
                {"diverged": count, "of": t.numel, "absmax": t.absmax, "bound": bound},
            )


def hollow(step: StoredStep) -> Iterator[rules.OperationFinding]:
    """Find results that are 0 because their inputs were rounded, and that something divides by."""
    low, target = step.low, step.target
    for op in step.forward:
        for t in op.inputs:
            count = int(_effect(op, "zeroed", t, target))
            if not low[t.tensor] or not count:
                continue
            consumer, epsilon = _singular_reader(step, op)
            if consumer is None:
                continue
            become = "becomes" if count == 1 else "become"
            follows = f"{counted(count, 'result')} of {op.op} {become} 0, and {consumer.op} follows"
            yield from _blamed(
                step,
                t,
                op,
                "vanishing",
                f"if its values are rounded to {target.label}, {follows}",
                rules.of_zero(step, consumer)
                if epsilon is None
                else f"{consumer.op} reads {epsilon:g} instead, and its result and slope are wrong",
                {
                    "lost": count,
                    "of": op.outputs[0].numel if op.outputs else 0,
                    "absmin": t.absmin,
                    "consumer": consumer.op,
                    "consumer_line": consumer.where,
                    # Without underflow it is a difference from a limit that a function reaches, too.
                    "suspected": epsilon is not None and not step.graph.lost(t, target),
                },
                itself=op,
                own=f"if its inputs are rounded to {target.label}, {follows}",
            )


def underflow(step: StoredStep) -> Iterator[rules.OperationFinding]:
    """Find products of factors that the format makes 0."""
    low, target = step.low, step.target
    for op in step.forward:
        if not is_product(op):
            continue
        for t in op.inputs:
            added = t.argument == "self" and op.op in ("addmm", "baddbmm")
            if added or not t.counted or not (step.policy or low[t.tensor]):
                continue
            lost = rules.share_lost(t, target.zero_exponent)
            if lost < FAINT:
                continue
            loses = f"{target.label} rounds {percent(lost, 0)} of their sum to 0"
            told = f"it reads tiny values, and {loses}"
            made = f"{op.op} reads its values, and {loses}"
            evidence = {"lost_sum": lost, "absmax": t.absmax}
            without = "the model loses their contribution in every step"
            instead = "change the unit of these values"
            yield rules.finding_of(op, "underflow", told, instead, without, evidence)
            if low[t.tensor]:
                yield from _blamed(step, t, op, "underflow", made, without, evidence)


def without_kernel(step: StoredStep) -> Iterator[rules.OperationFinding]:
    """Find operations that raise on a GPU because there is no kernel for what they read."""
    low, target = step.low, step.target
    for op in step.forward:
        if not any(low[t.tensor] for t in op.inputs):
            continue
        missing = _missing_kernel(op, target) or _other_dtype(op, low)
        if not missing:
            continue
        yield rules.finding_of(
            op,
            "no-half-kernel",
            missing,
            "call .float() on its input",
            f"the training raises an error{'' if op.op in ONE_DTYPE else ' on a GPU'}",
            {"absmax": max((t.absmax for t in op.inputs), default=0.0)},
        )


def _missing_kernel(op: Operation, target: FloatFormat) -> str:
    """Why an operation raises on a GPU where its input is in the format, as a clause; empty if not."""
    uncast = "on CUDA, and autocast does not cast it (CPU emulation hides this)"
    if op.function in NO_HALF_FUNCTIONS:
        return f"torch.{op.function} refuses {target.label} {uncast}"
    if op.op in NO_HALF or (target.name == "bf16" and op.op in NO_BF16):
        return f"PyTorch has no {target.label} kernel for {op.op} {uncast}"
    if op.op in FFT and target.name == "fp16":
        odd = [n for n in _transformed(op) if n & (n - 1)]
        if odd:
            lengths = f"only lengths that are powers of two, not {odd[0]},"
            return f"{op.op} in FP16 takes {lengths} {uncast}"
    return ""


def _other_dtype(op: Operation, low: Mapping[int, bool]) -> str:
    """Why a product of a sparse matrix raises where the dense factor is narrow; empty if not."""
    dense = [t for t in op.inputs[-2:] if t.counted]
    if op.op not in ONE_DTYPE or not any(low[t.tensor] for t in dense):
        return ""
    return f"{op.op} needs operands of one dtype, and autocast casts neither"


def _transformed(op: Operation) -> Iterator[int]:
    """The lengths that a Fourier transform works on."""
    dims: list[int] = list(op.scalars.get("dim") or ())
    shape = op.inputs[0].shape if op.inputs else ()
    lengths = {d: shape[d] for d in dims if -len(shape) <= d < len(shape)}
    last = op.scalars.get("last_dim_size")
    if lengths and isinstance(last, int):  # of the result, where it is real
        lengths[dims[-1]] = last
    return iter(lengths.values())


def _effect(op: Operation, figure: str, t: TensorRecord, target: FloatFormat) -> float:
    return float(op.facts.get(f"{figure}_of_{t.argument}_{target.name}", 0.0))


def _rounded(value: float, target: FloatFormat) -> float:
    return float(target.round(value))


def _bound_that_becomes_one(graph: StepGraph, t: TensorRecord, target: FloatFormat) -> float | None:
    """The upper bound below 1 of a clamp that made a tensor, if rounding makes it 1 and it is near."""
    made = graph.producer(t)
    if made is None or made.op.rstrip("_") not in ("clamp", "clamp_max", "hardtanh"):
        return None
    bound = made.scalars.get("max", made.scalars.get("max_val"))
    if not isinstance(bound, (int, float)) or not 0.9 < bound < 1.0:
        return None
    near = t.absmax >= 1.0 - 2 * 2.0**-target.mantissa_bits
    return float(bound) if near and _rounded(float(bound), target) == 1.0 else None


def _singular_reader(step: StoredStep, op: Operation) -> tuple[Operation | None, float | None]:
    """The operation that diverges where a result of this one is 0, past what keeps zeros.

    With it an epsilon that it reads in place of 0. Where no gradient goes through it, that one gives a
    finite number, and is no such operation.
    """
    seen: set[int] = {op.index}
    waiting: list[tuple[Operation, float | None]] = [(op, None)]
    while waiting and len(seen) < 4 * _DEPTH:
        made, epsilon = waiting.pop(0)
        for reader in step.graph.readers.get(made.index, []):
            if reader.index in seen:
                continue
            seen.add(reader.index)
            name = rules.singular_argument(reader)
            t = reader.input(name) if name else None
            if t is not None and t.producer == made.index:
                finite = reader.op.startswith("sqrt") or epsilon is not None
                if not finite or step.graph.backward.get(reader.index):
                    return reader, epsilon
            if reader.op in _PASSING_ZEROS:
                waiting.append((reader, epsilon))
            elif (added := _small_epsilon(step, reader)) is not None:
                waiting.append((reader, added or epsilon))
    return None, None


def _small_epsilon(step: StoredStep, op: Operation) -> float | None:
    """A constant added, or a lower bound, that is too small to stand in for what was lost.

    0 where the format loses it; None where there is none.
    """
    value = op.scalars.get("other", op.scalars.get("min"))
    if op.op.rstrip("_") not in ("add", "clamp", "clamp_min") or not isinstance(value, float):
        return None
    out = op.outputs[0] if op.outputs else None
    if out is None or value < 0:
        return None
    if step.low[out.tensor] and value <= 2.0**step.target.zero_exponent:
        return 0.0
    return value if value * 8 <= out.absmin else None


def _blamed(
    step: StoredStep,
    tensor: TensorRecord,
    reader: Operation,
    code: rules.Code,
    reason: str,
    without: str,
    evidence: Mapping[str, object],
    itself: Operation | None = None,
    own: str = "",
) -> Iterator[rules.OperationFinding]:
    """A finding for each operation that stores a tensor's values in the format, back to a product.

    A function that saturates ends the way back: what it reads may be rounded. ``itself`` is kept, too,
    where it is one of them, for the reason ``own``.
    """
    found: dict[int, Operation] = {} if itself is None else {itself.index: itself}
    waiting = [tensor]
    while waiting and len(found) < _DEPTH:
        t = waiting.pop(0)
        made = step.graph.producer(t)
        if made is None or made.node or made.index in found or not step.low[t.tensor]:
            continue
        found[made.index] = made
        ends = LISTS.get(policy_name(made.op)) == "low" or low_composite(made)
        if not ends and policy_name(made.op) not in _SATURATING:
            waiting += [i for i in made.inputs if i.counted]
    for op in found.values() or [reader]:
        yield rules.finding_of(
            op,
            code,
            own if op is itself else reason,
            "",
            without,
            {**evidence, "consumer": reader.op, "consumer_line": reader.where},
            None if op is itself else step.graph.computing(tensor),
        )


RULES = (imprecise, indistinct, diverging, hollow, underflow, without_kernel)
"""The rules of precision; they do not depend on the loss scale."""
PERSISTENT = frozenset({"imprecise", "indistinct", "underflow"})
"""Rules whose findings count only where every recorded step shows them: what a training grows out of, or
what becomes exact as it converges, needs no FP32."""
