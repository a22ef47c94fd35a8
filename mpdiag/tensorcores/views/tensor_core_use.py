"""The time of each step, and what each cause costs: from ``mpdiag profile --json``."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mpdiag.display.colors import GREY, PURPLE, SKY, VERDICT_COLORS, YELLOW
from mpdiag.display.wording import counted, percent
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import empty, figure
from mpdiag.reports.receipts import texts_in
from mpdiag.tensorcores.summary import CAUSES, IDLE, in_words_of, is_of_amd, milliseconds

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


def summary_of(profile: Mapping[str, Any]) -> list[str]:
    """The sentences on eligibility, steps and idle time; [] in an older document."""
    found = profile.get("summary")
    return [s for s in found if isinstance(s, str)] if isinstance(found, list) else []


def cause_words(cause: object) -> str:
    """What a cause is called; its code where it is no known one."""
    return CAUSES.get(str(cause), str(cause or "").replace("_", " "))


def cause_costs(profile: Mapping[str, Any]) -> list[tuple[float, str, str]]:
    """Each cause: the share of all time it affects, a sentence with its bound, and the fix.

    None of a CPU's profile, nor of an older document: their operations have causes and fixes.
    """
    groups = profile.get("causes")
    known = [g for g in (groups if isinstance(groups, list) else []) if isinstance(g, dict)]
    return [
        (_number(group.get("fraction")), group["sentence"], str(group.get("fix") or ""))
        for group in known
        if isinstance(group.get("sentence"), str) and math.isfinite(_number(group.get("fraction")))
    ]


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
    words = f"{counted(len(frame), 'step')}, {percent(idle)} of the time idle"
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
