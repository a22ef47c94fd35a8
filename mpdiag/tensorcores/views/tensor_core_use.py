"""What each cause costs, the time of each step and of each rank: from ``mpdiag profile --json``."""

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mpdiag.display.colors import GREY, PURPLE, SKY, VERDICT_COLORS, YELLOW
from mpdiag.display.wording import counted, in_figure, percent
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import empty, figure, layer_axis
from mpdiag.reports.receipts import texts_in
from mpdiag.tensorcores.summary import CAUSES, IDLE, in_words_of, is_of_amd, milliseconds
from mpdiag.tensorcores.summary import percent as one_decimal

PARTS = {
    "tensor_core": ("Tensor Cores", VERDICT_COLORS["tensor_core"]),
    "cuda_core": ("matrix work on CUDA cores", VERDICT_COLORS["cuda_core"]),
    "other": ("other kernels", SKY),
    "unknown": ("unknown kernels", PURPLE),
    "collective": ("collectives", YELLOW),
    **{f"idle_{cause}": (f"idle: {words}", GREY) for cause, words in IDLE.items()},
}
"""Words and colour of each part of a step; helpers and layout conversions are other kernels."""
HATCHES = {"host": "/", "wait": "x", "loader": ".", "queued": "-", "unknown": ""}
"""How idle time of each cause is hatched: one colour, told apart without it."""


LEAST_PART = 1e-3
"""Share of a step below which a part is nothing one could see."""


TEXTS = texts_in(Path(__file__).with_name("receipts.txt"))
"""The lines of receipts, by name."""


def receipt(run: str, lines: str) -> str:
    """A receipt: lines that leave ``frame``, from a run's ``profile``."""
    path = repr(f"{run}/profile.json")
    return TEXTS["profile"].substitute(path=path, lines=lines.removesuffix("\n"))


def table_receipt(run: str, rows: str, columns: Collection[str], **derived: str) -> str:
    """The receipt of a table of one list of a profile, the rows of the most time first.

    Args:
        run: The run's folder.
        rows: The list: ``kernels`` or ``operations``.
        columns: To show.
        derived: Columns that the list lacks, in terms of ``frame``.
    """
    lines = [f"frame = pd.DataFrame(profile[{rows!r}])"]
    lines += [f"frame[{name!r}] = {words}" for name, words in derived.items()]
    lines.append(f"frame = frame[{list(columns)!r}]")
    order = '"time_us", ascending=False, kind="stable", ignore_index=True'
    return receipt(run, "\n".join([*lines, f"frame = frame.sort_values({order})", ""]))


def summary_of(profile: Mapping[str, Any]) -> list[str]:
    """The sentences on eligibility, steps and idle time; [] in an older document."""
    found = profile.get("summary")
    return [s for s in found if isinstance(s, str)] if isinstance(found, list) else []


def cause_words(cause: object) -> str:
    """What a cause is called; its code where it is no known one."""
    return CAUSES.get(str(cause), str(cause or "").replace("_", " "))


def cause_frame(profile: Mapping[str, Any]) -> pd.DataFrame:
    """Each cause: ``cause``, ``operations``, ``share`` of all time, ``bound``, ``fix``.

    Returns:
        Those of the document; of an older one, and of a CPU's, the sums of its operations. ``bound``
        is how many times as fast everything would be if that time vanished, at most.
    """
    columns = ["cause", "operations", "share", "bound", "fix"]
    groups = profile.get("causes")
    known = [g for g in (groups if isinstance(groups, list) else []) if isinstance(g, dict)]
    rows: list[list[Any]] = []
    for group in known:
        if "label" in group:
            numbers = [_number(group.get(name)) for name in ("operations", "fraction")]
            bound = _number(group.get("amdahl_bound"))
            rows.append([group["label"], *numbers, bound, str(group.get("fix") or "")])
    if not known:
        rows = _summed_causes(profile)
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"operations": "int64", "share": float, "bound": float})


def _summed_causes(profile: Mapping[str, Any]) -> list[list[Any]]:
    """The causes of operations that have a fix which makes anything faster."""
    whole = _number(profile.get("kernel_time_us"))
    members: dict[str, list[tuple[float, str]]] = {}
    for row in profile.get("operations", []):
        bound = row.get("amdahl_bound", 1.0)
        spent, fix = _number(row.get("time_us")), str(row.get("fix") or "")
        if fix and whole > 0 and spent > 0 and (bound is None or bound > 1.0):
            members.setdefault(str(row.get("cause") or "unknown"), []).append((spent, fix))
    rows = []
    for cause, found in members.items():
        share = min(1.0, sum(spent for spent, _ in found) / whole)
        fix = max(found)[1]
        others = sum(one != fix for _, one in found)
        more = f" ({counted(others, 'operation needs', 'operations need')} another fix)"
        rows.append(
            [cause_words(cause), len(found), share, _speedup(share), fix + (more if others else "")]
        )
    return sorted(rows, key=lambda row: (row[0] == CAUSES["outside"], -row[2]))


def _speedup(share: float) -> float:
    return 1.0 / (1.0 - share) if share < 1.0 else math.nan


def cause_figure(frame: pd.DataFrame) -> go.Figure:
    """The share of each cause (``cause_frame``), its bound beside the bar."""
    if frame.empty:
        return empty("no operation has a known fix that would make anything faster")
    fig = figure(90 + 72 * len(frame), bargap=0.62)
    outside = frame["cause"] == CAUSES["outside"]
    labels = [_cause_label(row) for row in frame.to_dict("records")]
    fig.add_bar(
        x=frame["share"],
        y=list(range(len(frame))),
        orientation="h",
        marker={"color": [GREY if out else VERDICT_COLORS["cuda_core"] for out in outside]},
        customdata=[
            f"{label}<br>{in_figure(fix)}" for label, fix in zip(labels, frame["fix"], strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
    )
    for place, label in enumerate(labels):  # above its bar, where a phone has room, too
        fig.add_annotation(
            x=0,
            y=place - 0.2,
            text=label,
            showarrow=False,
            xanchor="left",
            align="left",
            yanchor="bottom",
            font={"size": 13},
        )
    fig.update_yaxes(visible=False, range=[len(frame) - 0.7, -0.85])
    top = max(0.02, 1.05 * float(frame["share"].max()))
    return fig.update_xaxes(title="share of time", tickformat=".0%", range=[0, top])


def _cause_label(row: Mapping[Any, Any]) -> str:
    """``TF32 off``, and below it ``5 operations, 62.0 %, at most 2.63×``: a phone is narrow."""
    bound = f"at most {row['bound']:.2f}×" if math.isfinite(row["bound"]) else "all there is"
    many = counted(int(row["operations"]), "operation")
    return f"<b>{in_figure(str(row['cause']))}</b><br>{many}, {one_decimal(row['share'])}, {bound}"


def causes(run: str, profile: Mapping[str, Any]) -> Picture:
    """What each cause costs, one bound for all its operations."""
    frame = cause_frame(profile)
    shares = frame["share"].sum()
    together = f"; without all of it at most {1 / (1 - shares):.2f}×" if shares < 1 else ""
    return Picture(
        "causes",
        "What each cause costs",
        "Shares of the whole time. The bound is Amdahl's: how many times as fast everything would be if "
        f"that time vanished. Together {one_decimal(shares)}{together}.",
        cause_figure(frame),
        frame,
        receipt(run, TEXTS["causes"].template),
    )


def _number(value: Any) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known else math.nan


def step_frame(profile: Mapping[str, Any]) -> pd.DataFrame:
    """The steps in order: ``step``, ``wall_us``, and the time of each part (``PARTS``) in µs.

    Kernels that ran at the same time count each, so that the parts may be more than the whole.
    """
    timeline = profile.get("timeline")
    steps = timeline.get("steps") if isinstance(timeline, dict) else None
    rows: list[dict[str, Any]] = []
    for step in steps if isinstance(steps, list) else []:
        times = step.get("kernel_us") if isinstance(step, dict) else None
        if not isinstance(times, dict):
            continue
        known = {str(kind): _number(spent) for kind, spent in times.items()}
        parts = {name: known.get(name, 0.0) for name in PARTS if not name.startswith("idle_")}
        parts["other"] += known.get("helper", 0.0) + known.get("layout", 0.0)
        name = str(step.get("name") or len(rows))
        idle = _number(step.get("idle_us"))
        parts |= _idle_parts(step, idle)
        rows.append({"step": name, "wall_us": _number(step.get("wall_us")), **parts, "idle": idle})
    return pd.DataFrame(rows, columns=["step", "wall_us", *PARTS, "idle"])


def _idle_parts(step: Mapping[str, Any], idle: float) -> dict[str, float]:
    """Idle time by cause; all of it of an unknown one where the document does not say."""
    causes = step.get("idle_causes")
    found = causes if isinstance(causes, dict) else {}
    parts = {}
    for cause in IDLE:
        entry = found.get(cause)
        spent = _number(entry.get("time_us")) if isinstance(entry, dict) else 0.0
        parts[f"idle_{cause}"] = spent if math.isfinite(spent) else 0.0
    if not sum(parts.values()) and idle > 0:
        parts["idle_unknown"] = idle
    return parts


def step_figure(frame: pd.DataFrame, *, amd: bool = False) -> go.Figure:
    """One bar for each step, in parts; with ``amd`` in AMD's words."""
    if frame.empty:
        return empty("nothing in the trace marks its steps")
    fig = figure(340, barmode="stack", legend_traceorder="normal")
    for part, (label, colour) in PARTS.items():
        words = in_words_of(label, amd=amd)
        if not (frame[part] > LEAST_PART * frame["wall_us"].max()).any():
            continue
        hatch = HATCHES.get(part.removeprefix("idle_"), "")
        fig.add_bar(
            x=frame["step"],
            y=frame[part] / 1000,
            name=words,
            marker={"color": colour, "pattern": {"shape": hatch, "size": 6}},
            hovertemplate=f"step %{{x}}: %{{y:.3g}} ms<extra>{words}</extra>",
        )
    fig.update_xaxes(title="step", type="category")
    return fig.update_yaxes(title="time (ms)")


def _step_caption(frame: pd.DataFrame) -> str:
    """How long the steps are, and how they were measured."""
    idle = frame["idle"].sum() / frame["wall_us"].sum() if frame["wall_us"].sum() > 0 else math.nan
    longest = frame.nlargest(1, "wall_us").to_dict("records")[0]
    words = f"{counted(len(frame), 'step')}, {percent(idle)} of their time idle"
    if len(frame) > 1:
        words += f"; the longest is step {longest['step']} with {milliseconds(longest['wall_us'])}"
    return (
        f"{words}. A step runs from its first kernel to the next step's first; the last step ends with "
        "its last kernel. Kernels that ran at the same time count separately."
    )


def steps(run: str, profile: Mapping[str, Any]) -> Iterator[Picture]:
    """Of a GPU's trace the time of each step; nothing of an older document, or of a CPU's."""
    found = step_frame(profile)
    if not found.empty:
        yield Picture(
            "steps",
            "What each step's time went to",
            _step_caption(found),
            step_figure(found, amd=is_of_amd(profile)),
            found,
            receipt(run, TEXTS["steps"].template),
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
    return fig.update_xaxes(title="time (ms)")


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
