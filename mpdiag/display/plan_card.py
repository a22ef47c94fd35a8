"""A plan as a notebook shows it: the loss scales that work, the decisions, what stays in FP32.

It takes a ``PrecisionPlan``, or its parts, without knowing the class, which stands on a floor above.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mpdiag.display import notebook, svg
from mpdiag.display.wording import scale_text

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

CHOICES = 12
"""Modules and operations in FP32 that are shown."""


def parts(plan: Any, *, scaled: bool, said: Collection[str] = ()) -> tuple[str, ...]:
    """The parts of a card, from top to bottom.

    Args:
        plan: A ``PrecisionPlan``.
        scaled: Whether it scales the loss.
        said: Reasons that stand beside it already.
    """
    reduction = plan.reduction
    divided = ", divided before" if reduction is not None and reduction.pre_divide else ""
    rows = [
        ("Format", f"{plan.target}, level {plan.level}"),
        ("Loss scale", _scale_words(plan.loss_scale, scaled=scaled)),
        ("", "" if plan.loss_scale.reason in said else plan.loss_scale.reason),
        ("Master weights", "FP32" if plan.master_weights.needed else "not needed"),
        ("", "" if plan.master_weights.reason in said else plan.master_weights.reason),
        ("Gradient reduction", reduction and f"{reduction.dtype}{divided}"),
        ("To pad", ", ".join(f"{s.module} {s.size}→{s.padded}" for s in plan.shapes)),
    ]
    return (
        _scale_figure(plan.loss_scale) if scaled else "",
        notebook.facts(rows),
        _choices_table((*plan.fp32_modules, *plan.fp32_operations)),
        notebook.note(f"run {plan.run}" if plan.run else ""),
    )


def _scale_words(scale: Any, *, scaled: bool) -> str:
    if not scaled:
        return f"none ({scale.need})"
    bounds = f"{scale_text(scale.lower)} to {scale_text(scale.upper)} work"
    return f"{scale_text(scale.init_scale)}, {scale.method} ({scale.need}; {bounds})"


def _scale_figure(scale: Any) -> str:
    """The loss scales that work, on a line; "" where none is known."""
    if scale.need == "unknown" or (scale.upper is not None and scale.lower > scale.upper):
        return ""
    words = (
        f"Loss scales that work (bar): {scale_text(scale.lower)} to {scale_text(scale.upper)}; "
        f"recommended (dot): {scale_text(scale.recommended)}"
    )
    upper = math.inf if scale.upper is None else math.log2(scale.upper)
    chosen = math.log2(scale.recommended)
    return notebook.figure(svg.interval(math.log2(scale.lower), upper, chosen, words=words), words)


def _choices_table(choices: Sequence[Any]) -> str:
    if not choices:
        return ""
    rows = [(c.module or "the model", c.op or "all", c.reason) for c in choices[:CHOICES]]
    rest = f"and {len(choices) - CHOICES} more" if len(choices) > CHOICES else ""
    return notebook.table(("in FP32", "operation", "reason"), rows) + notebook.note(rest)
