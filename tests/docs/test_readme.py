"""The README: short, and true about commands and training."""

from __future__ import annotations

import re

from calls import COMMANDS
from pages import ran, text

import mpdiag
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log


def test_it_is_short():
    assert len(text("README.md").splitlines()) <= 250


def test_its_table_has_every_command_and_no_other():
    rows = re.findall(r"^\| `mpdiag (\w+)", text("README.md"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


def test_its_example_records_and_trains():
    left = ran("README.md")
    assert isinstance(left.names["plan"], mpdiag.PrecisionPlan)
    assert open_run(left.folder / "runs" / "mine").meta["steps_recorded"] == 5
    assert left.names["result"].scale == left.names["plan"].loss_scale.init_scale
    assert len(read_log(left.folder / "runs" / "mine-fp16").steps) == 4
