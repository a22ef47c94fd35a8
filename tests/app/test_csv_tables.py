"""Downloads for a spreadsheet: a name is never a formula, a number stays a number."""

import io

import pandas as pd
import pytest
from csv_tables import csv_text


@pytest.mark.parametrize(
    "name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\n=1", "＝1", '=HYPERLINK("x")']
)
def test_a_formula_becomes_text(name):
    frame = pd.DataFrame({"name": [name, "conv.1"], "=count": [-3, 4], "x": [-0.5, None]})
    frame["kind"] = pd.Categorical([name, "other"])
    read = pd.read_csv(io.StringIO(csv_text(frame)))
    assert read["name"].tolist() == ["'" + name, "conv.1"]
    assert read["kind"].tolist() == ["'" + name, "other"]
    assert read["'=count"].tolist() == [-3, 4]
    assert read["x"].iloc[0] == -0.5
    assert frame["name"].iloc[0] == name  # the frame is left as it was


def test_other_tables_are_as_pandas_writes_them():
    frame = pd.DataFrame({"name": ["a,b", 'say "x"', None], "n": [1, 2, 3]})
    assert csv_text(frame) == frame.to_csv(index=False)
