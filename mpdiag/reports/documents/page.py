"""What the HTML pages of all reports share: tables and figures as templates take them.

The templates lie in ``reports/templates``. plotly.js is embedded once; light or dark follows the
reader's system, and print is light. Jinja escapes every name that comes from a file, and no
figure's data can end its script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.display.explanations import meaning_of
from mpdiag.display.rendering import render
from mpdiag.display.wording import counted, sentence
from mpdiag.files.atomic import atomic_path, writing
from mpdiag.files.paths import AnyPath

if TYPE_CHECKING:
    import pandas as pd
    from markupsafe import Markup

    from mpdiag.reports.picture import Picture


@dataclass(frozen=True)
class PageTable:
    """A table of a page.

    Attributes:
        columns: Their headings.
        rows: Cells as text.
        note: What stands below it.
        total: How many rows there are, shown or not.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    total: int = 0

    @property
    def extent(self) -> str:
        """How many rows it has, and of how many: ``30 of 84 rows``."""
        shown, all_rows = len(self.rows), max(self.total, len(self.rows))
        return counted(shown, "row") if shown == all_rows else f"{shown} of {all_rows:,} rows"


def page(template: str, title: str, pictures: Iterable[Picture], **values: Any) -> str:
    """A whole page: a template of ``reports/templates``, its figures, and what else it shows."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    return render(
        f"reports/templates/{template}",
        title=title,
        plotly=Markup(get_plotlyjs()),  # noqa: S704 - a script of a library, not a name from a run
        figures=[(picture, figure_data(picture)) for picture in pictures],
        **values,
    )


def figure_data(picture: Picture) -> Markup:
    """A figure as JSON that may stand inside of a script element: it holds no ``<``."""
    from jinja2.utils import htmlsafe_json_dumps
    from plotly.utils import PlotlyJSONEncoder  # which turns NaN into null, as plotly.js wants it

    document = picture.figure.to_plotly_json()
    return htmlsafe_json_dumps(document, cls=PlotlyJSONEncoder, allow_nan=False)


def findings(found: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Findings for a template, each as ``Finding.to_json`` has it."""
    return [
        {
            "severity": f["severity"],
            "message": sentence(f["message"]),
            "fix": sentence(f["fix"]),
            "code": f["code"],
            "meaning": meaning_of(f["code"]),
        }
        for f in found
    ]


def frame_table(frame: pd.DataFrame) -> PageTable:
    """A table of pandas, without its index."""
    return text_table(map(str, frame.columns), frame.itertuples(index=False))


def text_table(
    columns: Iterable[str], rows: Iterable[Sequence[Any]], most: int | None = None, note: str = ""
) -> PageTable:
    """A table of plain values.

    Args:
        columns: Their headings.
        rows: A value for each column.
        most: How many rows to show; None for all.
        note: What to say below where there are more, with ``{shown}`` and ``{all}``.
    """
    cells = tuple(tuple(map(_text, row)) for row in rows)
    shown = cells[:most]
    more = note.format(shown=len(shown), all=len(cells)) if len(shown) < len(cells) else ""
    return PageTable(tuple(columns), shown, more, len(cells))


def _text(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def save(path: AnyPath, text: str) -> AnyPath:
    """Write a report: the whole file or none of it.

    Raises:
        UsageError: If the file cannot be written.
    """
    with writing(path), atomic_path(path) as partial:
        # The name of a folder may be no UTF-8.
        partial.write_text(text, encoding="utf-8", errors="replace")
    return path
