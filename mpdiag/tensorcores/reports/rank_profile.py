"""What ``mpdiag profile`` prints of several ranks: the slowest, and what each one did in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from mpdiag.reports import terminal
from mpdiag.reports.text.tables import Fitted
from mpdiag.tensorcores.usage.summary import milliseconds, percent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mpdiag.tensorcores.timeline.ranks import RankComparison

RANKS = ("rank", "length", "own", "computing", "exposed", "overlapped", "idle", "Tensor Cores")
LEGEND = (
    "own: outside of exposed collectives; exposed, overlapped: collectives without and with "
    "computing beside them; Tensor Cores: of the kernel time of the whole trace"
)
MOST = 16
"""Ranks shown; of more, the slowest ones."""


def show_ranks(found: RankComparison, *, as_json: bool) -> dict[str, Any]:
    """Print one step of several ranks; returns the JSON document."""
    document = found.to_json()
    if as_json:
        terminal.show_json(document)
    else:
        terminal.show(rank_text(found))
    return document


def rank_text(found: RankComparison) -> RenderableType:
    """The verdict, and a row for each rank."""
    table = Fitted(
        RANKS,
        f"Step {found.step}" if found.step else "Whole traces",
        LEGEND,
        right=frozenset(RANKS[1:]),
        boxed=False,
    )
    rows = rank_rows(found)
    for row in rows[:MOST]:
        table.add_row(*row)
    if len(rows) > MOST:
        table.title += f", the {MOST} slowest of {len(rows)} ranks"
    return Group(Text(found.verdict, style="bold"), table)


def rank_rows(found: RankComparison) -> list[list[str]]:
    """A row for each rank, by number; the slowest ones first where there are many."""
    ranks = list(found.ranks)
    if len(ranks) > MOST:
        ranks.sort(key=lambda r: -r.own_us)
    rows = []
    for r in ranks:
        step = r.step
        overlapped = max(0.0, step.collective_us - step.exposed_us)
        times = [step.wall_us, r.own_us, step.compute_us, step.exposed_us, overlapped, step.idle_us]
        label = f"{r.rank} slowest" if r is found.slowest else str(r.rank)
        rows.append([label, *map(milliseconds, times), percent(r.tensor_core_fraction)])
    return rows
