"""The page of the documentation that shows the last pass; its tables come from the committed results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_sections import document, markdown
from gpu_sections.runner import BENCHMARKS

if TYPE_CHECKING:
    from pathlib import Path

RESULTS = BENCHMARKS / "results"
REHEARSALS = BENCHMARKS.parent / "runs" / "gpu-rehearsal"
"""Where rehearsals are written to, which git ignores."""
PAGE = BENCHMARKS.parent / "docs" / "gpu.md"
BEGIN, END = "<!-- promises -->", "<!-- end of promises -->"


def last_pass(folder: Path = RESULTS) -> dict[str, Any] | None:
    """The newest full pass on a card, else the newest quick one; without any, the rehearsal."""
    found = [document.load(path) for path in sorted(folder.glob("gpu-*.json"))]
    known = [d for d in found if d and d.get("schema_version") == document.SCHEMA_VERSION]
    order = ("rehearsal", "quick", "full")
    return max(known, key=lambda d: (order.index(d["mode"]), d["date"]), default=None)


def filled(text: str, result: dict[str, Any]) -> str:
    """The page's text with the tables of a pass between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [*markdown.facts(result), "", *markdown.table(result)]
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}"


def renew() -> None:
    """Write the last pass into the page."""
    result = last_pass()
    if result is not None:
        document.write(PAGE, filled(PAGE.read_text(encoding="utf-8"), result))
