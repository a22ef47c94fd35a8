"""Parts that need FP32, where a training computes them in half precision.

Rounding moves most results by as little as it moves the input. It moves an exponential by a factor, an
angle by radians, and makes different positions or probabilities the same. What is said follows from the
format's spacing at the recorded values, or was counted when the operation ran.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from mpdiag.analysis.findings import Finding
from mpdiag.display.wording import percent
from mpdiag.numerics.formats import STORED_IN
from mpdiag.precision.products import PASSES_ON, origins
from mpdiag.runs.operations import Operation, TensorRecord
from mpdiag.runs.precision import HALF, LABELS

EXPONENTIALS = frozenset("exp exp_ exp2 expm1 softplus".split())
ANGLES = frozenset("cos cos_ sin sin_".split())
LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss nll_loss_forward nll_loss2d_forward _log_softmax "
    "binary_cross_entropy binary_cross_entropy_with_logits kl_div".split()
)
COARSE = 2.0**-8
"""Error of an exponent above which the result is further off than rounding it to BF16 would make it."""
TURN = 0.1
"""Error of an angle, in radians, above which it is said."""
_NAMES = {"_to_copy": "a cast", "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss2d"}
_SUMS = PASSES_ON | frozenset(("add", "sub", "neg"))
_LINEAR = _SUMS | frozenset(("mul", "mm", "bmm"))


def spacing(dtype: str, magnitude: float) -> float:
    """The distance between neighbouring values of a half-precision format at a magnitude."""
    fmt = STORED_IN[dtype]
    exponent = math.frexp(magnitude)[1] - 1 if magnitude else fmt.min_exponent
    return math.ldexp(1.0, max(exponent, fmt.min_exponent) - fmt.mantissa_bits)


def narrow_parts(operations: Iterable[Operation]) -> Iterator[Finding]:
    """What half precision does to exponentials, angles, positions, choices and losses.

    Args:
        operations: Of a recording. A line of the script is named once, by its first layer and step.
    """
    forward = (o for o in operations if o.phase == "forward")
    said = set()
    for _, step in groupby(forward, key=lambda o: (o.rank, o.step)):
        for operation, what, does, largest in _in_step(list(step)):
            place = (operation.where, "" if operation.op in LOSSES else operation.op)
            if operation.op in ANGLES:
                place = (operation.file, "")  # the cosine and the sine of the same angles
            if place not in said:
                said.add(place)
                at = f" ({operation.where})" if operation.where else ""
                yield Finding(
                    severity="info" if operation.op in LOSSES else "warning",
                    code="precision-narrow-part",
                    message=f"{_NAMES.get(operation.op, operation.op.strip('_'))} {what}{at}; {does}",
                    evidence={"op": operation.op, "line": operation.where, "largest": largest},
                    fix="compute it in FP32 from FP32 values, and cast the result",
                )


def _in_step(step: Sequence[Operation]) -> Iterator[tuple[Operation, str, str, float]]:
    """Each operation that half precision harms: what it reads, what that does, the largest value."""
    stored = {t.parameter: t for o in step for t in o.inputs if t.parameter and t.dtype in HALF}
    added, multiplied = origins(step, _SUMS), origins(step, _LINEAR)
    for o in step:
        read = o.inputs[0] if o.inputs else None
        made = o.outputs[0] if o.outputs else None
        if read is not None and o.op in EXPONENTIALS:
            yield from _exponent(o, read, stored.get(added.get(read.tensor, "")))
        elif read is not None and o.op in ANGLES:
            source = stored.get(multiplied.get(read.tensor, ""))
            dtype = read.dtype if read.dtype in HALF or source is None else source.dtype
            error = spacing(dtype, read.absmax) / 2 if dtype in HALF else 0.0
            if error > TURN:
                what = f"reads angles up to {read.absmax:.4g} that {LABELS[dtype]} has rounded"
                yield o, what, f"they can be off by up to {error:.2g} radians", read.absmax
        elif made is not None and o.op in LOSSES and made.dtype in HALF:
            label, apart = LABELS[made.dtype], spacing(made.dtype, made.absmax)
            does = f"near {made.absmax:.3g} {label}'s values are {apart:.2g} apart"
            yield o, f"computes a loss in {label}", does, made.absmax
        if made is not None:
            yield from _merged(o, made)


def _exponent(
    o: Operation, read: TensorRecord, stored: TensorRecord | None
) -> Iterator[tuple[Operation, str, str, float]]:
    if stored is not None:
        dtype, largest = stored.dtype, stored.absmax
        what = f"reads {stored.parameter}, which is stored in {LABELS[dtype]}"
    elif read.dtype in HALF:
        dtype, largest = read.dtype, max(0.0, o.facts.get("highest", 0.0))
        what = f"reads {LABELS[dtype]} values up to {largest:.3g}"
    else:
        return
    error = spacing(dtype, largest) / 2
    if COARSE < error <= 1.0:  # beyond, there is no result to speak of
        moved = percent(math.expm1(error))
        yield o, what, f"rounding to {LABELS[dtype]} moves its result by up to {moved}", largest


def _merged(o: Operation, made: TensorRecord) -> Iterator[tuple[Operation, str, str, float]]:
    """Different values that half precision has made the same, where they number or choose something."""
    before, after = int(o.facts.get("distinct", 0)), int(o.facts.get("distinct_half", 0))
    if o.op == "arange" and made.dtype in HALF:
        most = 1 << STORED_IN[made.dtype].mantissa_bits  # in (2^e, 2^(e+1)]
        before, after = made.numel, made.numel - sum(max(0, n - most) for n in made.counts)
    if after < before:
        what = f"makes {after:,} {LABELS[made.dtype]} numbers of {before:,} different ones"
        limit = 2 << STORED_IN[made.dtype].mantissa_bits
        yield o, what, f"whole numbers above {limit:,} collide", made.absmax
    if o.facts.get("tied"):
        tied, rows = int(o.facts["tied"]), int(o.facts["rows"])
        does = f"{tied:,} of {rows:,} rows ({percent(tied / rows)}) tie at the choice"
        yield o, f"chooses by {LABELS[o.inputs[0].dtype]} values", does, made.absmax
