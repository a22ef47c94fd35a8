"""The table of operations without half precision is what torch's tests of its operators say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import half_precision_table as study

pytest.importorskip("expecttest", reason="torch's op_db needs expecttest")


def test_the_table_lists_what_torch_refuses(monkeypatch):
    # Its import would forbid all tests after this one to set torch.backends' flags.
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from torch.testing._internal.common_methods_invocations import op_db

    known = {row.split("\t")[1] for row in study.TABLE.read_text().splitlines() if "\t" in row}
    assert study.refusing(op_db) - known == set()
