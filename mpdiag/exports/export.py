"""What an export is, and what all exporters share.

An exporter is a pure function from a plan to an ``Export``. It states what its framework supports
(``Support``); everything else in the plan becomes a note, so that nothing is dropped silently. If the
language has comments, the text contains the notes, too.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mpdiag.errors import UsageError
from mpdiag.numerics.formats import FP16, format_named
from mpdiag.plan import NO_SCALE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.exports.notes import Support
    from mpdiag.plan import PrecisionPlan

TextLanguage = Literal["python", "json", "shell", "prototxt", "lua"]
_COMMENT = {"python": "# ", "shell": "# ", "prototxt": "# ", "lua": "-- "}

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Export:
    """A plan in a framework's own terms.

    Attributes:
        framework: The name given to ``--to``.
        language: The language of the text.
        text: The file's content, with the notes if the language has comments.
        settings: The same decisions as plain values, under the framework's own names.
        notes: What the framework cannot express, a sentence each.
    """

    framework: str
    language: TextLanguage
    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag export --json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "framework": self.framework,
            "language": self.language,
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "text": self.text,
        }


@dataclass(frozen=True)
class Scaling:
    """The plan's loss scale, as frameworks know it.

    Attributes:
        kind: ``none``, ``constant`` or ``dynamic``.
        scale: The constant scale, or the one to begin with.
    """

    kind: Literal["none", "constant", "dynamic"]
    scale: float


def scaling_of(plan: PrecisionPlan) -> Scaling:
    """How a framework with constant and backoff scales would scale by this plan.

    Where it has no such scaler it backs off from the plan's first scale; the notes say so.
    """
    scale = plan.loss_scale
    if plan.level in ("O0", "O3") or scale.method == NO_SCALE:
        return Scaling("none", 1.0)
    return Scaling("dynamic" if scale.adaptive else "constant", scale.init_scale)


def constant_scale(plan: PrecisionPlan) -> float:
    """The scale for a framework that has only constant scales; 1 means none."""
    scaling = scaling_of(plan)
    return plan.loss_scale.recommended if scaling.kind == "dynamic" else scaling.scale


def format_of(plan: PrecisionPlan, support: Support) -> str:
    """The format that the framework would compute in: ``fp16``, ``bf16``, an FP8 format or ``fp32``.

    For a plan in FP8, a framework without FP8 uses FP16, the format in which FP8 training keeps what
    is outside its matrix products; the plan's loss scale is FP16's.

    Raises:
        UsageError: If the framework has no such format, so that another plan is needed.
    """
    if plan.level == "O0":
        return "fp32"
    if plan.target in support.formats:
        return plan.target
    if format_named(plan.target).needs_tensor_scale and FP16.name in support.formats:
        return FP16.name
    message = (
        f"{support.name} cannot train in {format_named(plan.target).label}: analyze with --target "
        f"{support.formats[0] if support.formats else 'fp16'}, and export that plan"
    )
    raise UsageError(message)


def heading(
    plan: PrecisionPlan, support: Support, notes: tuple[str, ...], language: TextLanguage
) -> str:
    """What an export is, and its notes, as comments of its language."""
    mark = _COMMENT[language]
    origin = f" of run {plan.run!r}" if plan.run else ""
    paragraphs = [f"{support.name}, by the plan{origin}.", plan.verdict.text]
    if notes:
        paragraphs += ["", "Notes:"]
    lines = [line for p in paragraphs for line in _wrapped(p, mark, "")]
    lines += [line for note in notes for line in _wrapped(note, mark, "- ")]
    return "".join(f"{line}\n" for line in lines)


def one_line(text: str) -> str:
    """Text for a comment, without line breaks that would end it or control characters."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "\ufffd" for c in words)


def _wrapped(text: str, mark: str, bullet: str) -> list[str]:
    """A paragraph as comment lines."""
    plain = one_line(text)
    if not plain:
        return [mark.rstrip()] if text == "" and not bullet else []
    wrapped = textwrap.wrap(
        plain,
        100 - len(mark),
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [mark + line for line in wrapped]
