"""What ``replay`` prints: the loss scale that a scaler would have used, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mpdiag.display.wording import counted, magnitude, percent, scale_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mpdiag.analysis.scaling.replay import Replay


def replay_text(played: Replay) -> RenderableType:
    """The report of ``mpdiag replay``."""
    document: dict[str, Any] = played.to_json()
    steps = document["steps"]
    table = Table()
    columns = ["step", "scale", "|g| max", "values lost"]
    if document["skips"]:
        columns.append("")
    for column in columns:
        table.add_column(column, justify="right")
    shown = steps if len(steps) <= 40 else [*steps[:20], *steps[-20:]]
    for i, row in enumerate(shown):
        if len(steps) > 40 and i == 20:
            table.add_row("…")
        cells = (
            str(row["step"]),
            scale_text(row["scale"]),
            "not finite" if row["absmax"] is None else magnitude(row["absmax"]),
            percent(row["lost"]),
            "skipped" if row["overflow"] else "",
        )
        table.add_row(*cells[: len(columns)])
    title = Text("Loss-scale replay over the recorded steps", style="bold")
    legend = Text("lost: of all activation gradients' values in FP16, at the step's scale", "dim")
    skipped = f"{document['skips']} of {counted(len(steps), 'recorded step')} skipped"
    return Group(title, table, legend, Text(skipped, "bold"))
