"""What the dashboard and the HTML report show: pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # wide ones are read as formulas, too


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


def csv_text(frame: pd.DataFrame) -> str:
    """A frame without its index; text that would be a formula gets an apostrophe before it.

    Source: OWASP, *CSV Injection*.
    """
    plain = frame.copy(deep=False)
    plain.columns = [_as_text(name) for name in frame.columns]
    for i, kind in enumerate(frame.dtypes):
        if kind.kind not in "biuf":
            column: Any = frame.iloc[:, i].astype(object).map(_as_text)
            plain.isetitem(i, column)
    text: str = plain.to_csv(index=False)
    return text


def _as_text(value: Any) -> Any:
    return "'" + value if isinstance(value, str) and value.startswith(_FORMULA) else value
