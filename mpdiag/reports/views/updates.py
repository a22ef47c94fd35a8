"""Weight updates: how small they are beside their weights, and what 16-bit weights round away.

The run folder calls an update *swallowed* that a 16-bit weight would round away.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mpdiag.analysis.layers import countable_rows, share
from mpdiag.display.colors import BLUE, ORANGE, VERMILION
from mpdiag.display.wording import layer_name, percent
from mpdiag.numerics.formats import FP16, HALVES, FloatFormat
from mpdiag.reports.contents import RunContents
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import empty, exponent_axis, figure
from mpdiag.reports.receipts import Rows
from mpdiag.runs.records import Records
from mpdiag.runs.schema import FormatFact

BEGINS, CERTAIN = 11, 12
"""|w|/|Δw| of 2^11 = 2048, from which a normal FP16 weight loses some updates to rounding, and of
2^12 = 4096, beyond which it loses them all."""
_FACTS: dict[str, tuple[FormatFact, FloatFormat]] = {
    **{f"swallowed_{fmt.name}": ("swallowed", fmt) for fmt in HALVES},
    "vanished_fp16": ("vanished", FP16),
}


def update_frame(records: Records) -> pd.DataFrame:
    """How many updates 16-bit weights would round away, by parameter.

    Returns:
        ``parameter``; ``changed``, ``swallowed_fp16``, ``swallowed_bf16``, ``vanished_fp16``:
        counts over all steps; ``fp16_share``, ``bf16_share``: swallowed of the changed;
        ``beyond_2048``: share of the changed whose |w|/|Δw| is above 2048. Most swallowed first.
    """
    rows = _rows(records)
    codes, group = np.unique(records.name[rows], return_inverse=True)
    frame = pd.DataFrame({"parameter": np.array(records.words["name"], dtype=object)[codes]})
    frame["changed"] = _added(records.changed[rows], group, len(codes))
    for column, (fact, fmt) in _FACTS.items():
        frame[column] = _added(records.fact(fact, fmt.name)[rows], group, len(codes))
    h = records.select(rows).ratios(group.reshape(-1), len(codes))
    beyond = h.counts[:, BEGINS - h.first :].sum(axis=1)
    for fmt in HALVES:
        frame[f"{fmt.name}_share"] = share(frame[f"swallowed_{fmt.name}"], frame["changed"])
    frame["beyond_2048"] = share(beyond, frame["changed"])
    return frame.sort_values("fp16_share", ascending=False, kind="stable", ignore_index=True)


def ratio_frame(records: Records, parameter: str | None = None) -> pd.DataFrame:
    """Changed elements by |w|/|Δw|: ``exponent``, ``count``; of one parameter or of all."""
    rows = _rows(records, parameter)
    h = records.select(rows).ratios(np.zeros(len(rows), np.int64), 1)
    columns = np.flatnonzero(h.counts[0])
    return pd.DataFrame({"exponent": h.exponents[columns], "count": h.counts[0, columns]})


def _rows(records: Records, parameter: str | None = None) -> Any:
    mask = records.of_kind("update") & countable_rows(records)
    if parameter is not None:
        mask &= records.name == records.code("name", parameter)
    return np.flatnonzero(mask)


def _added(values: Any, group: Any, size: int) -> Any:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, group.reshape(-1), values)
    return sums


_NONE = "no weight update was recorded"


def ratio_figure(frame: pd.DataFrame, *, log: bool = True) -> go.Figure:
    """The ratios |w|/|Δw| (``ratio_frame``), with the lines at 2048 and 4096."""
    if frame.empty:
        return empty(_NONE)
    fig = figure(360)
    parts = (
        (frame["exponent"] < BEGINS, "up to 2048: kept", BLUE),
        (frame["exponent"] == BEGINS, "2048 to 4096: some rounded away", ORANGE),
        (frame["exponent"] >= CERTAIN, "above 4096: all rounded away", VERMILION),
    )
    for mask, name, colour in parts:
        part = frame[mask]
        fig.add_bar(
            x=part["exponent"] + 0.5,
            y=part["count"],
            width=0.94,
            name=name,
            marker={"color": colour},
            customdata=part["exponent"],
            hovertemplate="2^%{customdata}: %{y:,} updates<extra></extra>",
        )
    fig.add_vline(BEGINS, line={"color": ORANGE, "width": 2, "dash": "dot"})
    fig.add_vline(CERTAIN, line={"color": VERMILION, "width": 2})
    low, high = int(frame["exponent"].min()), int(frame["exponent"].max()) + 1
    exponent_axis(fig, min(low, 4) - 1, max(high, CERTAIN + 2) + 1, "|w| / |Δw|, FP16 weights")
    fig.update_yaxes(type="log" if log else "linear", title="updates", exponentformat="power")
    return fig


@dataclass(frozen=True, eq=False)
class Updates:
    """The weight updates of a recording: their tables and pictures."""

    run: str
    records: Records

    @cached_property
    def by_parameter(self) -> pd.DataFrame:
        """How many updates 16-bit weights would round away, by parameter."""
        return update_frame(self.records)

    def ratios(self, parameter: str | None = None, *, log: bool = True) -> Picture:
        """Updates by |w|/|Δw|, of one parameter or of all."""
        frame = ratio_frame(self.records, parameter)
        whose = "all parameters" if parameter is None else layer_name(parameter)
        worst = _most(self.by_parameter) if parameter is None else ""
        return Picture(
            "ratios",
            f"Size of the updates relative to the weights: {whose}",
            f"Over all recorded steps{_beyond(frame)}. FP16 weights round some updates away from a "
            f"ratio of 2048 on, and all of them above 4096 (for normal weights).{worst}",
            ratio_figure(frame, log=log),
            frame,
            Rows(self.run, "update", parameter).ratios(),
        )


def _beyond(frame: pd.DataFrame) -> str:
    """How many of the updates of a ``ratio_frame`` are beyond the two lines."""
    if frame.empty:
        return ""
    counts = [int(frame.loc[frame["exponent"] >= at, "count"].sum()) for at in (BEGINS, CERTAIN)]
    some, all_of_them = (percent(count / int(frame["count"].sum())) for count in counts)
    return f": {some} of the updates have a ratio above 2048, {all_of_them} above 4096"


def _most(frame: pd.DataFrame) -> str:
    """The parameter of an ``update_frame`` whose updates FP16 weights round away most."""
    if frame.empty or not frame["fp16_share"].iloc[0]:
        return ""
    worst = layer_name(str(frame["parameter"].iloc[0]))
    share = percent(float(frame["fp16_share"].iloc[0]))
    return f" They would round {share} of the updates of {worst} away, more than of any other."


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows: all parameters."""
    shown = Updates(str(contents.folder), contents.analysis.run.records)
    if shown.records.of_kind("update").any():
        yield shown.ratios(log=False)
