"""The report of several ranks' traces, as HTML or Markdown: who is slowest, and what each rank did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from mpdiag.display.colors import GREEN, GREY, ORANGE
from mpdiag.display.wording import sentence
from mpdiag.reports import terminal
from mpdiag.reports.documents import markdown
from mpdiag.reports.documents.page import page, save, text_table
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import figure
from mpdiag.tensorcores.reports.profile import LEGEND, RANKS, rank_rows
from mpdiag.tensorcores.trace_analysis import profile_ranks, traces_in
from mpdiag.version import __version__

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mpdiag.files.paths import AnyPath
    from mpdiag.reports.documents.page import PageTable
    from mpdiag.tensorcores.timeline.ranks import RankComparison

_PARTS = {
    "compute_us": ("computing", GREEN),
    "exposed_collective_us": ("exposed collectives", ORANGE),
    "idle_us": ("idle", GREY),
}


def rank_frame(found: RankComparison) -> pd.DataFrame:
    """A row for each rank, as in the JSON document."""
    return pd.DataFrame(found.to_json()["ranks"]).drop(columns="trace")


def rank_figure(frame: pd.DataFrame) -> go.Figure:
    """A bar for each rank; copies beside no kernel are what is missing to its length."""
    fig = figure(340, barmode="stack", legend_traceorder="normal")
    for part, (words, colour) in _PARTS.items():
        fig.add_bar(
            x=frame["rank"].astype(str),
            y=frame[part] / 1000,
            name=words,
            marker={"color": colour},
            hovertemplate=f"rank %{{x}}: %{{y:.3g}} ms<extra>{words}</extra>",
        )
    fig.update_xaxes(title="rank", type="category")
    return fig.update_yaxes(title="time (ms)").figure()


def rank_picture(found: RankComparison) -> Picture:
    """What each rank's time went to."""
    frame = rank_frame(found)
    receipt = """\
import json
from pathlib import Path
import pandas as pd

frame = pd.DataFrame(json.loads(Path("profile.json").read_text())["ranks"])
frame = frame[["rank", "wall_us", "own_us", "compute_us", "exposed_collective_us", "idle_us"]]
"""
    return Picture(
        "ranks",
        f"Step {found.step}, rank by rank" if found.step else "The whole traces, rank by rank",
        "Copies that run beside no kernel are what is missing to a rank's length.",
        rank_figure(frame),
        frame,
        receipt,
    )


def rank_page(folder: Path, found: RankComparison) -> str:
    """The whole document as HTML."""
    return page(
        "trace.html.j2",
        str(folder),
        [rank_picture(found)],
        tone="fine",
        verdict=sentence(found.verdict),
        facts=[],
        change=None,
        summary=[],
        causes=[],
        findings=[],
        said=[],
        open_tables=[("Ranks", _table(found))],
        tables=[],
        provenance=f"{folder}: {len(found.ranks)} traces; mpdiag {__version__}",
    )


def rank_markdown(folder: Path, found: RankComparison) -> str:
    """The whole document as Markdown."""
    parts = [
        f"## {markdown.escaped(folder.resolve().name)}",
        f"**{markdown.escaped(sentence(found.verdict))}**",
        markdown.page_table(_table(found)),
        markdown.escaped(sentence(LEGEND)),
        markdown.escaped(f"{folder}: {len(found.ranks)} traces; mpdiag {__version__}."),
    ]
    return "\n\n".join(parts) + "\n"


def _table(found: RankComparison) -> PageTable:
    return text_table(RANKS, rank_rows(found))


def write_rank_report(folder: Path, output: Path | None = None) -> AnyPath:
    """Write the report of a folder that holds a trace of each rank of a run.

    Args:
        folder: With the traces.
        output: Where to write; default: the folder's name and ``.html``, in the working folder.

    Returns:
        The file.

    Raises:
        InputError: If a trace cannot be read.
        UsageError: If they are not of one run, or the file cannot be written.
    """
    with terminal.waiting(f"reading {folder}"):
        found = profile_ranks(traces_in(folder))
    path = output or Path(f"{folder.resolve().name}.html")
    document = rank_markdown if path.suffix == ".md" else rank_page
    return save(path, document(folder, found))
