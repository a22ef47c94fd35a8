"""What an export is, and what each family of frameworks shares in writing one.

An exporter is a pure function from a plan to an ``Export``. It states what its framework is able
to hold (``Able``); whatever the plan holds beyond that comes out as a note, so nothing is dropped
in silence. Where the text has comments, the notes stand in it, too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mpdiag.errors import UsageError
from mpdiag.exports.notes import Able, shortfalls
from mpdiag.numerics.formats import FP16, format_named
from mpdiag.plan import NO_SCALE

if TYPE_CHECKING:
    from mpdiag.plan import PrecisionPlan

Language = Literal["python", "json", "shell", "prototxt", "lua"]
_COMMENT = {"python": "# ", "shell": "# ", "prototxt": "# ", "lua": "-- ", "json": ""}

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Export:
    """A plan in a framework's own words.

    Attributes:
        framework: The name given to ``--to``.
        language: What the text is written in.
        text: The file's content, notes included where the language has comments.
        settings: The same decisions as plain values, under the framework's own names.
        notes: What the framework cannot express, a sentence each.
    """

    framework: str
    language: Language
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


Exporter = Callable[["PrecisionPlan"], Export]


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
    """The one scale for a framework that knows constant scales alone; 1 is none."""
    scaling = scaling_of(plan)
    return plan.loss_scale.recommended if scaling.kind == "dynamic" else scaling.scale


def format_of(plan: PrecisionPlan, able: Able) -> str:
    """``fp16``, ``bf16``, an FP8 format or ``fp32``: what the framework would compute in.

    Where a plan for FP8 meets a framework without it, FP16 stays, in which FP8 training keeps
    what is outside its matrix products; the plan's loss scale is FP16's.

    Raises:
        UsageError: If the framework knows no BF16: another plan is needed, not another setting.
    """
    if plan.level == "O0":
        return "fp32"
    if plan.target in able.formats:
        return plan.target
    if format_named(plan.target).bits == 8 and FP16.name in able.formats:
        return FP16.name
    message = (
        f"{able.name} cannot train in {format_named(plan.target).label}: analyze with --target "
        f"{able.formats[0] if able.formats else 'fp16'}, and export that plan"
    )
    raise UsageError(message)


def make(
    plan: PrecisionPlan,
    framework: str,
    able: Able,
    language: Language,
    body: str,
    settings: Mapping[str, Any],
    *extra_notes: str,
) -> Export:
    """An export with its heading and notes as comments above the body."""
    notes = (*extra_notes, *shortfalls(plan, able))
    text = body.strip("\n") + "\n"
    mark = _COMMENT[language]
    if mark:
        text = _heading(plan, able, notes, mark) + "\n" + text
    return Export(framework, language, text, settings, notes)


def _heading(plan: PrecisionPlan, able: Able, notes: tuple[str, ...], mark: str) -> str:
    origin = f" of run {plan.run!r}" if plan.run else ""
    paragraphs = [f"{able.name}, by the plan{origin}.", plan.verdict]
    if notes:
        paragraphs += ["", "Notes:"]
    lines = [line for p in paragraphs for line in _wrapped(p, mark, "")]
    lines += [line for note in notes for line in _wrapped(note, mark, "- ")]
    return "".join(f"{line}\n" for line in lines)


def one_line(text: str) -> str:
    """Text for a comment: no line break of a name ends it, and nothing in it commands a terminal."""
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


def number(value: float) -> str:
    """A number as every language here reads it: 1024.0, never 1.02e+03."""
    return repr(float(value))
