"""Findings as lines of a terminal: the sentence, and what to do below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from mpdiag.analysis.findings import Finding

COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}
EXPLAIN = "what a finding means: mpdiag explain CODE"
"""The line below findings whose codes are shown."""


def finding_lines(findings: Sequence[Finding]) -> list[RenderableType]:
    """Findings in order; a fix that several in a row share is said once, after the last of them."""
    lines: list[RenderableType] = []
    for i, f in enumerate(findings):
        lines.append(Text.assemble((f"{f.severity}: ", COLOURS[f.severity]), f.message))
        following = findings[i + 1] if i + 1 < len(findings) else None
        if following is None or (following.fix, following.code) != (f.fix, f.code):
            fix = Text(f"{f.fix}  [{f.code}]".lstrip(), style="dim")
            lines.append(Padding(fix, (0, 0, 0, 2), expand=False))
    return lines
