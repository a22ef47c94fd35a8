"""``mpdiag audit -- script.py``: the first steps of a script, recorded in a process of its own."""

import io
import sys

import pytest
from script_processes import TRAIN

from mpdiag.launching.audited_script import first_steps
from mpdiag.precision.audit import audit


@pytest.mark.parametrize("stderr", [io.StringIO(), None], ids=["a notebook's", "none"])
def test_the_first_steps_are_recorded_where_stderr_is_no_file(tmp_path, monkeypatch, stderr):
    script = tmp_path / "train.py"
    script.write_text(TRAIN + "print('trained')\n")
    monkeypatch.setattr(sys, "stderr", stderr)
    with first_steps([str(script)]) as run:
        assert run.meta["steps_recorded"] == 3
        assert audit(run).line == "FP32 weights"
    assert not run.folder.exists()
