"""Checks that a receipt reproduces the numbers of its picture."""

import re

import pandas as pd

KEYS = "run module operation layer parameter name step exponent scale_exponent".split()


def same_numbers(picture, *, needed=()):
    """The receipt's table against the picture's, in the columns that both have."""
    names: dict[str, object] = {}
    exec(compile(picture.receipt, f"{picture.key}.py", "exec"), names)
    found = names["frame"]
    columns = [c for c in found.columns if c in picture.frame.columns]
    assert set(needed) <= set(columns), columns
    keys = [c for c in KEYS if c in columns]
    tables = [t[columns].sort_values(keys, ignore_index=True) for t in (picture.frame, found)]
    assert len(tables[0]) > 0
    pd.testing.assert_frame_equal(*tables, check_dtype=False, rtol=1e-12)
    assert not re.search(r"^(import|from) mpdiag", picture.receipt, re.MULTILINE)
