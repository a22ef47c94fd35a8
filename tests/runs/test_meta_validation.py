"""``meta.json`` with a field that is not what it should be."""

from __future__ import annotations

import json

import pytest
from made_runs import write_run

from mpdiag.errors import DamagedRun
from mpdiag.runs.run import open_run


@pytest.mark.parametrize("field", ["optimizers", "failures", "argv"])
def test_a_list_with_a_hole_is_no_meta(tmp_path, field):
    run = write_run(tmp_path / "run")
    meta = json.loads((run / "meta.json").read_text(encoding="utf-8"))
    (run / "meta.json").write_text(json.dumps({**meta, field: [None]}), encoding="utf-8")
    with pytest.raises(DamagedRun) as caught:
        open_run(run)
    message = str(caught.value)
    assert "\n" not in message
    assert "meta.json" in message
    assert field in message


def test_a_step_count_that_is_none_is_no_meta(tmp_path):
    run = write_run(tmp_path / "run")
    meta = json.loads((run / "meta.json").read_text(encoding="utf-8"))
    odd = {**meta, "optimizers": [{"type": "SGD", "steps_taken": "many"}]}
    (run / "meta.json").write_text(json.dumps(odd), encoding="utf-8")
    with pytest.raises(DamagedRun, match="optimizers"):
        open_run(run)
