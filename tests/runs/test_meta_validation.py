"""``meta.json`` with a field that is not what it should be."""

from __future__ import annotations

import json

import pytest
from made_runs import write_run

from mpdiag.errors import DamagedRun
from mpdiag.runs.run import open_run


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, [None]) for field in ("optimizers", "failures", "argv")),
        ("optimizers", [{"type": "SGD", "steps_taken": "many"}]),
    ],
)
def test_a_field_with_a_hole_or_of_another_type_is_named(tmp_path, field, value):
    run = write_run(tmp_path / "run")
    meta = json.loads((run / "meta.json").read_text(encoding="utf-8"))
    (run / "meta.json").write_text(json.dumps({**meta, field: value}), encoding="utf-8")
    with pytest.raises(DamagedRun) as caught:
        open_run(run)
    message = str(caught.value)
    assert "\n" not in message
    assert "meta.json" in message
    assert field in message
