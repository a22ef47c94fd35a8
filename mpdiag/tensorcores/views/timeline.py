"""One step of a GPU on the clock: what ran on each stream, and when nothing did."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mpdiag.display.colors import BLUE, GREY, PURPLE, SKY, VERDICT_COLORS, YELLOW
from mpdiag.display.wording import beginning, counted, in_figure, kernel_label
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import Drawing, empty, figure, layer_axis
from mpdiag.tensorcores.opened_trace import StepPieces
from mpdiag.tensorcores.summary import IDLE, milliseconds, percent
from mpdiag.tensorcores.timeline.host_spans import Gap
from mpdiag.tensorcores.views.tensor_core_use import HATCHES, TEXTS

PIXELS = 1200
"""Of a step's length: neighbours of one kind that are nearer than one of them are drawn as one."""
KINDS = {
    **{kind: colour for kind, colour in VERDICT_COLORS.items() if kind != "unknown"},
    "unknown": PURPLE,
    "collective": YELLOW,
    "copy": BLUE,
}
"""Colour of each kind of work."""
OTHER_WORDS = {"collective": "collectives", "copy": "copies"}
LANE = "idle"
SHORTER = "shorter"
"""A gap that is not among the longest of the trace: its cause is in the step's sums alone."""
_IDLE_WORDS = {**IDLE, SHORTER: "shorter gaps"}
_COLUMNS = ["lane", "kind", "start_us", "duration_us", "kernels", "longest"]


def block_frame(work: StepPieces, gaps: Sequence[Gap]) -> pd.DataFrame:
    """The blocks of a step, in the order of their lanes and starts.

    Args:
        work: The step.
        gaps: The longest gaps of the trace, which know their causes.

    Returns:
        ``lane``: a stream, or ``idle``; ``kind``: a verdict, ``collective``, ``copy``, or the cause
        of a gap, ``shorter`` where it is not among ``gaps``; ``start_us`` from the step's begin,
        ``duration_us``; ``kernels``: how many pieces are in it; ``longest``: the name of the longest.
    """
    least = work.step.wall_us / PIXELS
    begin = work.step.start_us
    rows: list[list[Any]] = []
    for stream in sorted({piece.stream for piece in work.pieces}):
        rows += _lane(stream, work, least)
    known = sorted(gaps, key=lambda gap: gap.start_us)
    ends = [gap.end_us for gap in known]
    for start, end in _idle(work):
        at = bisect_right(ends, start)
        cause = known[at].cause if at < len(known) and known[at].start_us < end else SHORTER
        if end - start >= least:
            rows.append([LANE, cause, start - begin, end - start, 0, ""])
    return pd.DataFrame(rows, columns=_COLUMNS)


def _lane(stream: str, work: StepPieces, least: float) -> list[list[Any]]:
    """One stream's blocks."""
    begin = work.step.start_us
    blocks: list[list[Any]] = []
    longest = 0.0
    for piece in work.pieces:
        if piece.stream != stream:
            continue
        start, end = piece.start_us - begin, piece.start_us + piece.duration_us - begin
        last = blocks[-1] if blocks else None
        if last and last[1] == piece.kind and start - (last[2] + last[3]) < least:
            last[3] = max(last[3], end - last[2])
            last[4] += 1
            if piece.duration_us > longest:
                last[5], longest = piece.name, piece.duration_us
        else:
            blocks.append([f"stream {stream}", piece.kind, start, end - start, 1, piece.name])
            longest = piece.duration_us
    return blocks


def _idle(work: StepPieces) -> list[tuple[float, float]]:
    """When nothing ran within the step; not known where some pieces were left out."""
    if work.left_out:
        return []
    gaps, reach = [], max(work.step.start_us, work.busy_until_us)
    for piece in work.pieces:
        if piece.start_us > reach:
            gaps.append((reach, piece.start_us))
        reach = max(reach, piece.start_us + piece.duration_us)
    if work.step.end_us > reach:
        gaps.append((reach, work.step.end_us))
    return gaps


def timeline_figure(frame: pd.DataFrame, length_us: float, words: Mapping[str, str]) -> go.Figure:
    """The blocks of a step (``block_frame``) on the clock.

    Args:
        frame: The blocks.
        length_us: Of the step.
        words: What verdicts are called on the device.
    """
    if frame.empty:
        return empty("nothing ran in this step")
    lanes = list(dict.fromkeys(frame["lane"]))
    fig = figure(240 + 46 * len(lanes), barmode="overlay", bargap=0.25)
    places = {lane: i for i, lane in enumerate(lanes)}
    named = {**words, **OTHER_WORDS}
    for kind, colour in KINDS.items():
        part = frame[(frame["kind"] == kind) & (frame["lane"] != LANE)]
        _bars(fig, part, places, named[kind], {"color": colour, "line": {"width": 0}})
    for cause, shape in {**HATCHES, SHORTER: ""}.items():
        part = frame[(frame["kind"] == cause) & (frame["lane"] == LANE)]
        pattern = {"shape": shape, "size": 5, "solidity": 0.35}
        name = f"idle: {_IDLE_WORDS[cause]}"
        _bars(fig, part, places, name, {"color": GREY, "line": {"width": 0}, "pattern": pattern})
    layer_axis(fig, lanes)
    return fig.update_xaxes(
        title="time in the step (ms)", range=[-0.004 * length_us / 1000, 1.004 * length_us / 1000]
    ).figure()


def _bars(
    fig: Drawing, part: pd.DataFrame, places: Mapping[str, int], name: str, marker: dict[str, Any]
) -> None:
    if part.empty:
        return
    fig.add_bar(
        base=part["start_us"] / 1000,
        x=part["duration_us"] / 1000,
        y=[places[lane] for lane in part["lane"]],
        orientation="h",
        name=name,
        showlegend=True,
        marker=marker,
        customdata=[_hover(row) for row in part.to_dict("records")],
        hovertemplate="%{customdata}<extra>" + in_figure(name) + "</extra>",
    )


def _hover(row: Mapping[Any, Any]) -> str:
    words = [f"{milliseconds(row['duration_us'])} from {milliseconds(row['start_us'])} on"]
    if row["longest"]:
        name = in_figure(beginning(kernel_label(str(row["longest"])), 70))
        words.append(name if row["kernels"] == 1 else f"{row['kernels']} kernels, longest: {name}")
    return "<br>".join(words)


def timeline_caption(work: StepPieces) -> str:
    """What the figure of a step shows, in figures."""
    step = work.step
    where = f"Step {step.name}" if step.name else "The whole trace (nothing in it marks steps)"
    words = f"{where}: {milliseconds(step.wall_us)} from its first kernel on, "
    words += f"{percent(step.idle_fraction)} of it idle"
    longest = max(step.gaps, key=lambda cause: step.gaps[cause], default=None)
    if longest is not None and step.gaps[longest] > 0:
        words += f" (mostly {IDLE[longest]}: {milliseconds(step.gaps[longest])})"
    least = f"{step.wall_us / PIXELS:.3g} µs"
    words += f". Blocks join neighbours of one kind that are less than {least} apart."
    if work.left_out:
        words += (
            f" {counted(work.left_out, 'shorter piece')} of {milliseconds(work.left_out_us)} together "
            "are not drawn, and neither is the idle lane."
        )
    return words


def timeline_receipt(path: str, work: StepPieces) -> str:
    """Receipt of the pieces of a step, of a trace of torch.profiler."""
    start, end = work.step.start_us, work.step.end_us
    return TEXTS["timeline"].substitute(path=repr(path), start=start, end=end)


def timeline(path: str, work: StepPieces, gaps: Sequence[Gap], words: Mapping[str, str]) -> Picture:
    """One step on the clock.

    Args:
        path: The trace, for the receipt.
        work: The step.
        gaps: The longest gaps of the trace.
        words: What verdicts are called on the device.
    """
    frame = block_frame(work, gaps)
    return Picture(
        "timeline",
        f"Step {work.step.name} on the clock" if work.step.name else "The trace on the clock",
        timeline_caption(work),
        timeline_figure(frame, work.step.wall_us, words),
        frame,
        timeline_receipt(path, work),
    )


RANK_PARTS = {
    "compute_us": ("computing", VERDICT_COLORS["tensor_core"]),
    "exposed_collective_us": ("exposed collectives", YELLOW),
    "idle_us": ("idle", GREY),
    "rest_us": ("copies alone", SKY),
}
"""Words and colour of each part of a rank's step; they add up to its length."""


def rank_frame(document: Mapping[str, Any]) -> pd.DataFrame:
    """One step of each rank (``mpdiag profile --json`` of several traces): a row for each."""
    rows = []
    for rank in document["ranks"]:
        parts = {name: float(rank[name]) for name in RANK_PARTS if name in rank}
        rest = max(0.0, float(rank["wall_us"]) - sum(parts.values()))
        rows.append(
            {"rank": str(rank["rank"]), "wall_us": rank["wall_us"], **parts, "rest_us": rest}
        )
    return pd.DataFrame(rows)


def rank_figure(frame: pd.DataFrame) -> go.Figure:
    """A bar for each rank, in parts."""
    fig = figure(130 + 34 * len(frame), barmode="stack", legend_traceorder="normal")
    for part, (words, colour) in RANK_PARTS.items():
        if not (frame[part] > 0).any():
            continue
        fig.add_bar(
            x=frame[part] / 1000,
            y=list(range(len(frame))),
            orientation="h",
            name=words,
            marker={"color": colour},
            hovertemplate=f"%{{x:.3g}} ms<extra>{words}</extra>",
        )
    layer_axis(fig, [f"rank {rank}" for rank in frame["rank"]])
    return fig.update_xaxes(title="time (ms)").figure()


def ranks(document: Mapping[str, Any]) -> Picture:
    """One step of several ranks."""
    frame = rank_frame(document)
    step = document.get("step")
    return Picture(
        "ranks",
        f"Step {step} on each rank" if step else "The traces of each rank",
        "Collectives may overlap with computing; a collective is exposed while nothing overlaps it. "
        f"A rank that is ready early waits in it for rank {document['slowest']}.",
        rank_figure(frame),
        frame,
        TEXTS["ranks"].template,  # it runs the command that prints the same
    )
