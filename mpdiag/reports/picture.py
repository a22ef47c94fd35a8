"""What the dashboard and the HTML report show: pictures, and the views that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from mpdiag.reports.contents import RunContents

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


@dataclass(frozen=True)
class View:
    """A page of the dashboard, and the pictures of it that the HTML report shows.

    Attributes:
        name: Of its file in ``app/views`` and its address.
        title: What the dashboard's menu calls it.
        icon: A Material symbol.
        pictures: What the report shows of a run, as far as the run holds it.
    """

    name: str
    title: str
    icon: str
    pictures: Callable[[RunContents], Iterator[Picture]] = lambda _: iter(())
