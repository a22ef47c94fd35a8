"""Eligible against used, and the time of each step: from the document of ``mpdiag profile --json``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from mpdiag.display.wording import beginning, in_figure, percent
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting.colors import GREY, ORANGE, PURPLE, SKY, VERDICT_COLORS
from mpdiag.reports.plotting.style import empty, figure, layer_axis, row_height

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import plotly.graph_objects as go

MOST = 15
"""Operations in the figure; the table has all of them."""
LABEL = 40
USE = {
    "used": ("used Tensor Cores", VERDICT_COLORS["tensor_core"]),
    "not used": ("could have, did not", VERDICT_COLORS["cuda_core"]),
    "unknown": ("could have, use unknown", PURPLE),
    "eligibility unknown": ("not known whether it could", GREY),
}
"""Words and colour of each class of an operation."""
PARTS = {
    "tensor_core": ("Tensor Cores", VERDICT_COLORS["tensor_core"]),
    "cuda_core": ("matrix work on CUDA cores", VERDICT_COLORS["cuda_core"]),
    "other": ("other kernels", SKY),
    "unknown": ("unknown kernels", PURPLE),
    "collective": ("collectives", ORANGE),
    "idle": ("idle", GREY),
}
"""Words and colour of each part of a step; helpers and layout conversions are other kernels."""


def summary_of(profile: Mapping[str, Any]) -> list[str]:
    """The sentences on eligibility, steps and idle time; [] in an older document."""
    found = profile.get("summary")
    return [s for s in found if isinstance(s, str)] if isinstance(found, list) else []


def cause_rows(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each cause with its bound, and what to do; [] in an older document."""
    found = profile.get("causes")
    return [
        (str(group.get("sentence") or ""), str(group.get("fix") or ""))
        for group in (found if isinstance(found, list) else [])
        if isinstance(group, dict)
    ]


# -- eligible and used -----------------------------------------------------------------------------


def use_frame(profile: Mapping[str, Any]) -> pd.DataFrame:
    """The operations that are or may be eligible, those of the most time first.

    Returns:
        ``op``, ``module``, ``phase``, ``use`` (a key of ``USE``), ``time_us``, ``share`` of all
        kernels' time, ``tflops``, ``peak_share``; the last two NaN where they are not known.
    """
    columns = ["op", "module", "phase", "use", "time_us", "share", "tflops", "peak_share"]
    whole = _number(profile.get("kernel_time_us"))
    rows = []
    for row in profile.get("operations", []):
        use = _use(row)
        spent = _number(row.get("time_us"))
        if use and spent > 0:
            words = [str(row.get(name) or "") for name in columns[:3]]
            share = spent / whole if whole > 0 else math.nan
            rates = [_number(row.get(name)) for name in columns[-2:]]
            rows.append([*words, use, spent, share, *rates])
    frame = pd.DataFrame(rows, columns=columns)
    return frame.sort_values("time_us", ascending=False, kind="stable", ignore_index=True)


def _use(row: Mapping[str, Any]) -> str:
    if "eligible" not in row or row["eligible"] is False:
        return ""
    if row["eligible"] is None:
        return "eligibility unknown"
    used = row.get("used")
    return ("used" if used else "not used") if isinstance(used, bool) else "unknown"


def _number(value: Any) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known else math.nan


def use_figure(frame: pd.DataFrame) -> go.Figure:
    """Time of the longest of these operations, coloured by use."""
    if frame.empty:
        return empty("no operation is known to be eligible for Tensor Cores")
    top = frame.head(MOST)
    names = [
        beginning(f"{op.removeprefix('aten::')} {module}".strip(), LABEL)
        for op, module in zip(top["op"], top["module"], strict=True)
    ]
    fig = figure(row_height(len(names)))
    for use, (words, colour) in USE.items():
        part = top[top["use"] == use]
        if part.empty:
            continue
        fig.add_bar(
            x=part["time_us"],
            y=list(part.index),
            orientation="h",
            name=words,
            showlegend=True,
            marker={"color": colour},
            customdata=[_hover(row) for row in part.to_dict("records")],
            hovertemplate="%{customdata}<extra>" + words + "</extra>",
        )
    layer_axis(fig, names, LABEL)
    return fig.update_xaxes(title="time (µs)")


def _hover(row: Mapping[Any, Any]) -> str:
    words = [in_figure(f"{row['op']} {row['module']} {row['phase']}".strip())]
    words.append(f"{row['time_us']:,.0f} µs, {percent(row['share'])} of kernel time")
    if math.isfinite(row["tflops"]):
        of_peak = f", {percent(row['peak_share'])} of the peak"
        known = math.isfinite(row["peak_share"])
        words.append(f"{row['tflops']:.3g} TFLOP/s{of_peak if known else ''}")
    return "<br>".join(words)


def use_receipt(run: str) -> str:
    """Receipt of ``use_frame``: time and rate of the operations that are or may be eligible."""
    return f"""\
import json
from pathlib import Path
import pandas as pd

profile = json.loads(Path({run + "/profile.json"!r}).read_text())
rows = [row for row in profile["operations"] if row.get("eligible", False) is not False]
frame = pd.DataFrame(rows, columns=["op", "module", "eligible", "used", "time_us", "tflops"])
frame["share"] = frame["time_us"] / profile["kernel_time_us"]
frame = frame.sort_values("time_us", ascending=False, kind="stable", ignore_index=True)
"""


# -- steps -----------------------------------------------------------------------------------------


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
        parts = {name: known.get(name, 0.0) for name in PARTS if name != "idle"}
        parts["other"] += known.get("helper", 0.0) + known.get("layout", 0.0)
        name = str(step.get("name") or len(rows))
        idle = _number(step.get("idle_us"))
        rows.append({"step": name, "wall_us": _number(step.get("wall_us")), **parts, "idle": idle})
    return pd.DataFrame(rows, columns=["step", "wall_us", *PARTS])


def step_figure(frame: pd.DataFrame) -> go.Figure:
    """One bar for each step, in parts."""
    if frame.empty:
        return empty("nothing in the trace marks its steps")
    fig = figure(340, barmode="stack", legend_traceorder="normal")
    for part, (words, colour) in PARTS.items():
        if not (frame[part] > 0).any():
            continue
        fig.add_bar(
            x=frame["step"],
            y=frame[part] / 1000,
            name=words,
            marker={"color": colour},
            hovertemplate=f"step %{{x}}: %{{y:.3g}} ms<extra>{words}</extra>",
        )
    fig.update_xaxes(title="step", type="category")
    return fig.update_yaxes(title="time (ms)")


def step_receipt(run: str) -> str:
    """Receipt of ``step_frame``: length and idle time of each step."""
    return f"""\
import json
from pathlib import Path
import pandas as pd

steps = json.loads(Path({run + "/profile.json"!r}).read_text())["timeline"]["steps"]
frame = pd.DataFrame(
    [{{"step": step["name"], "wall_us": step["wall_us"], "idle": step["idle_us"]}} for step in steps]
)
"""


# -- pictures --------------------------------------------------------------------------------------


def use_pictures(run: str, profile: Mapping[str, Any]) -> Iterator[Picture]:
    """What a document of a GPU's trace allows; nothing of an older one or of a CPU."""
    used = use_frame(profile)
    if not used.empty:
        yield Picture(
            "use",
            "Eligible for Tensor Cores, and used",
            f"The {min(MOST, len(used))} longest of {len(used)} operations that are or may be eligible. "
            "Used is by name, and by the rate where the name does not say.",
            use_figure(used),
            used,
            use_receipt(run),
        )
    steps = step_frame(profile)
    if not steps.empty:
        yield Picture(
            "steps",
            "What each step's time went to",
            "On the GPU, from a step's first kernel to the next step's; the last one ends with its last "
            "kernel. Kernels that ran at the same time count each.",
            step_figure(steps),
            steps,
            step_receipt(run),
        )
