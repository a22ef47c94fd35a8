"""The precision of a training: the dtypes of its parameters, and what its recording answers."""

from collections.abc import Iterable

import pandas as pd

from mpdiag.precision.audit import Audit
from mpdiag.reports.text.audit import CERTAINTIES, HEADINGS, answered, label, shown_columns
from mpdiag.runs.answers import Answer

MISSING = (
    "this run does not say which dtypes it had: an earlier mpdiag recorded it, or it ended in its "
    "first step; record it again"
)


def precision_frame(audit: Audit) -> pd.DataFrame:
    """Groups of parameters with the same dtypes: ``parameters``, ``elements`` and their dtypes."""
    shown = shown_columns(audit)
    rows = [
        {"parameters": row["parameters"], "elements": row["numel"]}
        | {HEADINGS[name]: label(row[name]) for name in shown}
        for row in audit.table
    ]
    return pd.DataFrame(rows, columns=["parameters", "elements", *(HEADINGS[n] for n in shown)])


def answers_frame(answers: Iterable[Answer]) -> pd.DataFrame:
    """Whether the recording answers questions: ``answer``, ``question`` and ``reason``."""
    rows = [
        {"answer": CERTAINTIES[certainty], "question": questions, "reason": reason}
        for certainty, questions, reason in answered(answers)
    ]
    return pd.DataFrame(rows, columns=["answer", "question", "reason"])
