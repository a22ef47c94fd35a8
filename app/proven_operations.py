"""Operations that the recorded numbers prove to need FP32, as a table."""

import pandas as pd

from mpdiag.analysis.analyzer import Analysis
from mpdiag.display.wording import layer_name


def proven_frame(analysis: Analysis) -> pd.DataFrame:
    """Operations that the recorded numbers themselves show to need FP32, each with its line."""
    rows = [
        {
            "operation": found.op,
            "module": layer_name(found.module),
            "line": found.where,
            "code": found.text,
            "why": found.told,
            "without it": found.without,
            "fix": found.fix,
            "on autocast's own list": found.covered,
        }
        for found in analysis.operations
    ]
    return pd.DataFrame(rows)
