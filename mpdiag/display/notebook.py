"""HTML for notebooks, from ``templates/notebook.html.j2``.

Each function returns ``Markup``, a string that is HTML already; any other text is escaped.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from markupsafe import Markup

from mpdiag.display.wording import scale_text

_TEMPLATE = "display/templates/notebook.html.j2"
CHOICES = 12
"""Modules and operations in FP32 that are shown of a plan."""
_COLOURS = {"error": "#d33", "warning": "#c80", "info": "#28a", "good": "#2a2"}


def card(title: str, *parts: str, mood: str = "good") -> Markup:
    """A box with a title and what stands below it.

    Args:
        title: Plain text.
        parts: From the functions below; other text is escaped.
        mood: ``good``, ``info``, ``warning`` or ``error``: the colour at its edge.
    """
    return _macro("card", title, [p for p in parts if p], _COLOURS.get(mood, _COLOURS["info"]))


def note(text: str) -> Markup:
    """A line in small print."""
    return _macro("note", text)


def facts(rows: Iterable[tuple[str, object]]) -> Markup:
    """Names and their values, a row each; rows without a value are left out."""
    return _macro("facts", [row for row in rows if row[1] not in (None, "")])


def next_step(code: str, words: str = "") -> Markup | str:
    """What to do next: code to copy, or a sentence; "" for neither."""
    return _macro("next_step", code, words) if code or words else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table; numbers as they are given."""
    return _macro("table", head, list(rows))


def items(entries: Iterable[tuple[str, str]]) -> str:
    """A list of sentences, each with its severity; nothing where there are none."""
    rows = [(severity, text, _COLOURS.get(severity, "inherit")) for severity, text in entries]
    return _macro("items", rows) if rows else ""


def plan_parts(plan: Any, *, scaled: bool, said: Collection[str] = ()) -> tuple[str, ...]:
    """A plan's card, from top to bottom: the scales that work, the decisions, what stays in FP32.

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
    modules = plan.fp32_modules  # most are among the operations, too
    choices = (*modules, *(c for c in plan.fp32_operations if c not in modules))
    return (facts(rows), _choices_table(choices), note(f"run {plan.run}" if plan.run else ""))


def _scale_words(scale: Any, *, scaled: bool) -> str:
    if not scaled:
        return f"none ({scale.need})"
    bounds = f"{scale_text(scale.lower)} to {scale_text(scale.upper)} work"
    return f"{scale_text(scale.init_scale)}, {scale.method} ({scale.need}; {bounds})"


def _choices_table(choices: Sequence[Any]) -> str:
    if not choices:
        return ""
    rows = [(c.module or "the model", c.op or "all", c.reason) for c in choices[:CHOICES]]
    rest = f"and {len(choices) - CHOICES} more" if len(choices) > CHOICES else ""
    return table(("in FP32", "operation", "reason"), rows) + note(rest)


def _macro(name: str, *arguments: Any) -> Markup:
    from mpdiag.display.rendering import render_macro

    return render_macro(_TEMPLATE, name, *arguments)
