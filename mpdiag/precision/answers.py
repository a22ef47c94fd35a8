"""Which questions a recording answers, given the precision that it was recorded in.

A value in BF16 is the FP32 value rounded to 8 bits: its power of two is right but where rounding carried
it over to the next one. A value in FP16 has lost what lies outside FP16's range. So counts of powers of
two are exact of what was stored, and a bound, one rounding wide, of what FP32 would have had. What the
format itself has lost is in no recording made in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpdiag.runs.precision import HALF, ParameterPrecision
from mpdiag.runs.run import Run

Certainty = Literal["exact", "bound", "no"]


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


def answers(
    parameters: Sequence[ParameterPrecision], autocast: Sequence[str], run: Run | None
) -> tuple[Answer, ...]:
    """The questions that a recording answers.

    Args:
        parameters: With the dtypes of their products.
        autocast: Dtypes in which autocast was on.
        run: The recording; None of objects that were looked at without a step.
    """
    if run is None:
        reason = "no step was run"
        return tuple(Answer(question, "no", reason) for question in _QUESTIONS)
    computed = {p.forward or p.stored for p in parameters} | set(autocast)
    weights = {p.master or p.stored for p in parameters if p.trainable}
    return tuple(
        Answer(question, *_answered(question, computed & HALF, weights & HALF))
        for question in _QUESTIONS
    )


_QUESTIONS = (
    "range of FP16 and loss scale",
    "FP8 and block formats",
    "updates rounded away",
    "what this training's own format has lost",
    "sensitive operations",
)


def _answered(question: str, computed: set[str], weights: set[str]) -> tuple[Certainty, str]:
    label = "/".join({"bfloat16": "BF16", "float16": "FP16"}[d] for d in sorted(computed))
    if question == "updates rounded away":
        if weights:
            return "exact", "the weights that were trained are in half precision, and were counted"
        return "exact", "updates were recorded in FP32"
    if question == "what this training's own format has lost":
        if computed:
            return (
                "no",
                f"{label} values do not show what {label} rounded away: record with --fp32",
            )
        return "exact", "the training computes in FP32"
    if not computed:
        return "exact", "the training computes in FP32"
    if "float16" in computed:
        return "no", "FP16 has lost what lies outside its range: record with --fp32"
    if question == "sensitive operations":
        return "no", "operations ran in BF16, so their rounding error in FP16 cannot be measured"
    return "bound", "BF16 values have the right power of two, up to one rounding at its edges"
