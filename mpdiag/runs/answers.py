"""Which questions a recording answers, given the precision that it was recorded in.

A value in BF16 is the FP32 value rounded to 8 bits: its power of two is right but where rounding carried
it over to the next one. A value in FP16 has lost what lies outside FP16's range. So counts of powers of
two are exact of what was stored, and a bound, one rounding wide, of what each operation had before it
rounded (``numerics.rounded``). What the format itself has lost is in no recording made in it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mpdiag.numerics.formats import BF16, FP32, FloatFormat
from mpdiag.runs.precision import BYTES, HALF, LABELS, PrecisionFacts

if TYPE_CHECKING:
    from mpdiag.runs.operations import Operation

Certainty = Literal["exact", "bound", "no"]
UNKNOWN = "unknown"
"""Stands for a dtype of half precision that the recording does not name."""
_UNNAMED = ("half_modules", "half_parameters", "not_switched_off")
"""What of ``precision`` in ``meta.json`` says that there is one."""


@dataclass(frozen=True)
class Answer:
    """Whether a recording answers a question.

    Attributes:
        question: What is asked.
        answer: ``exact``; ``bound``: up to one rounding of the format it was recorded in; or ``no``.
        reason: Why.
    """

    question: str
    answer: Certainty
    reason: str


@dataclass(frozen=True)
class HalfPrecision:
    """What of a recorded training is in half precision.

    Attributes:
        computed: The dtypes in which it stores or multiplies; ``UNKNOWN`` among them where one is not
            named.
        weights: Those of trained weights that have no wider master copy, in bytes too.
    """

    computed: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()

    @property
    def rounded_to(self) -> FloatFormat | None:
        """The format that all recorded values were rounded to and whose range is FP32's, if any."""
        return BF16 if self.computed == {BF16.torch_name} else None

    @property
    def label(self) -> str:
        """The precision of the training, as people write it."""
        labels = (LABELS.get(dtype, "half precision") for dtype in sorted(self.computed))
        return "/".join(labels) or FP32.label


def half_precision(
    meta: Mapping[str, Any],
    modules: Iterable[Mapping[str, Any]],
    facts: PrecisionFacts | None,
    products: Collection[str],
) -> HalfPrecision:
    """What is in half precision, by all that a recording knows of it.

    Args:
        meta: Its ``meta.json``.
        modules: Its table of modules.
        facts: Its ``precision.json``, if it has one.
        products: Dtypes of half precision in which its own code multiplies, see ``half_products``.
    """
    precision = meta.get("precision")
    precision = precision if isinstance(precision, dict) else {}
    stored = {str(row["dtype"]) for row in modules if row["what"] == "parameter"}
    read = () if facts is None else facts.parameters
    weights = {p.master or p.stored for p in read if p.trainable} if read else stored
    computed = {*map(str, precision.get("autocast") or ()), *stored, *products}
    computed |= {p.forward for p in read if p.forward}
    found = computed & HALF
    if not found and any(precision.get(name) for name in _UNNAMED):
        found = {UNKNOWN}
    return HalfPrecision(frozenset(found), frozenset(weights & (HALF | BYTES)))


def half_products(operations: "Iterable[Operation]") -> dict[str, str]:
    """Where a training's own code multiplies in half precision, forward and backward, and in which.

    A frozen half-precision model inside of an FP32 training has no backward pass of its own.
    """
    return {
        op.where or op.module or op.op: str(dtype)
        for op in operations
        if op.node and op.flops
        for dtype in {t.dtype for t in op.outputs} & HALF
    }


def answers(half: HalfPrecision, meta: Mapping[str, Any]) -> tuple[Answer, ...]:
    """The questions that a recording answers.

    Args:
        half: What of the training is in half precision.
        meta: The recording's ``meta.json``.
    """
    operations = bool((meta.get("operations") or {}).get("steps"))
    optimizers = meta.get("optimizers") != []
    found = []
    for question in _QUESTIONS:
        certainty, reason = _answered(question, half)
        if question == SENSITIVE and certainty == "exact" and not operations:
            certainty, reason = "no", "no operation was recorded"
        if question == UPDATES and not optimizers:
            certainty, reason = "no", "no optimizer was recorded"
        found.append(Answer(question, certainty, reason))
    return tuple(found)


def no_answers(reason: str) -> tuple[Answer, ...]:
    """The same questions, none of which is answered."""
    return tuple(Answer(question, "no", reason) for question in _QUESTIONS)


RANGE = "range of FP16 and loss scale"
UPDATES = "updates rounded away"
SENSITIVE = "sensitive operations"
_FP8 = "FP8 formats"
_BLOCKS = "block formats"
_DRIFT = "drift of ranges over the steps"
_OWN = "what this training's own format has lost"
_QUESTIONS = (RANGE, _FP8, _BLOCKS, UPDATES, _DRIFT, _OWN, SENSITIVE)


def _answered(question: str, half: HalfPrecision) -> tuple[Certainty, str]:
    label = half.label
    if question == _BLOCKS:
        return "no", "the recording has no blocks of values"
    if question == UPDATES:
        if half.weights & BYTES:
            return "no", "quantized weights were trained, and their updates were not counted"
        if half.weights:
            return "exact", "the weights that were trained are in half precision, and were counted"
        return "exact", "updates were recorded in FP32"
    if not half.computed:
        return "exact", "the training computes in FP32"
    if question == _OWN:
        return "no", f"{label} values do not show what {label} rounded away; record with --fp32"
    if half.rounded_to is None:
        return "no", f"{label} has lost what lies outside its range; record with --fp32"
    if question == SENSITIVE:
        return "no", f"they ran in {label}; record with --fp32"
    moves = "that moves a power of two only at its edges"
    return "bound", f"each operation rounded its values to {label} once; {moves}"
