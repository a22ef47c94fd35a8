"""What a recording does not show is named among the findings."""

from __future__ import annotations

import json

import pytest
from recorded import model_and_optimizer, step

import mpdiag


@pytest.fixture
def run(tmp_path):
    """A recording, whose meta.json is changed by a call."""
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(3):
            step(model, optimizer)

    def changed(**fields):
        path = tmp_path / "run" / "meta.json"
        meta = json.loads(path.read_text(encoding="utf-8"))
        for name, value in fields.items():
            meta.pop(name) if value is None else meta.update({name: value})
        path.write_text(json.dumps(meta), encoding="utf-8")
        return {f.code: f for f in mpdiag.analyze(tmp_path / "run").findings}

    return changed


def test_an_optimizer_whose_steps_were_all_missed_is_named(run):
    taken = {"type": "Adam", "steps_taken": 3, "steps_recorded": 0}
    seen = {"type": "SGD", "steps_taken": 3, "steps_recorded": 3}
    finding = run(optimizers=[seen, taken])["optimizer-not-recorded"]
    assert finding.message.startswith("no step of 1 optimizer was recorded")
    assert finding.evidence == {"optimizers": ["Adam"]}


@pytest.mark.parametrize(
    "optimizers",
    [
        [{"type": "SGD"}],  # of an earlier version
        [{"type": "SGD", "steps_taken": 3, "steps_recorded": 3}],
        [{"type": "SGD", "steps_taken": 0, "steps_recorded": 0}],
    ],
)
def test_an_optimizer_that_was_seen_or_never_stepped_is_not(run, optimizers):
    assert "optimizer-not-recorded" not in run(optimizers=optimizers)


def test_a_recording_of_an_earlier_version_says_nothing_of_autocast(run):
    assert "not-fp32" not in run(precision=None)
