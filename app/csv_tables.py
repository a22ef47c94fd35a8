"""Tables as CSV, for a spreadsheet: text is never a formula."""

from typing import Any

import pandas as pd

_FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # wide ones are read as formulas, too


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
