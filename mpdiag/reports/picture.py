"""What the dashboard and the HTML report show: pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure, the table it is drawn from, and the receipt that reproduces the same numbers.

    Attributes:
        key: A short stable name, of files and of widgets.
        title: What it shows; text, no markup.
        caption: How to read it; text, no markup.
        figure: The figure.
        frame: Its numbers.
        receipt: A script that computes them from the run folder.
    """

    key: str
    title: str
    caption: str
    figure: go.Figure
    frame: pd.DataFrame
    receipt: str
