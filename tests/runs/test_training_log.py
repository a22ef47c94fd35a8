"""``training.jsonl``: exact round trip, torn lines, hostile lines, and trainings that write it."""

import contextlib
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import loss_of_batch, network, wrapped

import mpdiag
from mpdiag.errors import DamagedRun, RunNotFound
from mpdiag.runs.training_log import LogWriter, Metric, TrainingStep, read_log

floats = st.floats(allow_nan=False)
steps = st.builds(
    TrainingStep, st.integers(0, 10**9), st.none() | floats, floats, st.booleans(), st.text(),
    st.none() | floats, st.none() | st.integers(0, 2**40), st.none() | floats,
)  # fmt: skip


def written(folder, *entries):
    """The log of some entries, as it is read again."""
    log = LogWriter(folder)
    for entry in entries:
        log.append(entry)
    log.close()
    return read_log(folder)


@given(
    st.lists(steps, min_size=1, max_size=5, unique_by=lambda s: s.step), st.floats(allow_nan=False)
)
def test_every_field_round_trips(tmp_path_factory, entries, value):
    entries, metric = sorted(entries, key=lambda s: s.step), Metric("m", value, False)
    found = written(tmp_path_factory.mktemp("run"), *entries, metric)
    assert (found.steps, found.metrics) == (tuple(entries), (metric,))


def test_a_step_is_no_skipped_one_unless_it_says_so(tmp_path):
    found = written(tmp_path, TrainingStep(0, 1.0, 2.0), TrainingStep(1, 1.0, 2.0, True))
    assert [s.step for s in found.skipped] == [1]


def test_a_training_that_begins_anew_in_a_folder_replaces_what_lies_there(tmp_path):
    earlier = (*(TrainingStep(i, 1.0, 1.0) for i in range(5)), Metric("m", 1.0))
    found = written(tmp_path, *earlier, *(TrainingStep(i, 2.0, 1.0) for i in range(2)))
    assert ([s.loss for s in found.steps], found.metrics) == ([2.0, 2.0], ())


def test_what_is_not_finite_is_written_as_a_word(tmp_path):
    (step,) = written(tmp_path, TrainingStep(0, math.nan, 1.0, gradient_norm=-math.inf)).steps
    document = json.loads((tmp_path / "training.jsonl").read_text(), parse_constant=pytest.fail)
    assert (document["loss"], document["gradient_norm"]) == ("nan", "-inf")
    assert math.isnan(step.loss)


def test_a_torn_last_line_is_passed_over_and_a_resumed_training_goes_on(tmp_path):
    written(tmp_path, *(TrainingStep(i, 1.0, 1.0) for i in range(3)))
    path = tmp_path / "training.jsonl"
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole[:-cut])
        assert len(read_log(tmp_path).steps) in (2, 3)
        found = written(tmp_path, TrainingStep(2, 7.0, 1.0)).steps
        assert [s.step for s in found] == [0, 1, 2]
        assert found[-1].loss == 7.0


@given(st.binary(max_size=60))
def test_hostile_lines_are_our_own_errors(tmp_path_factory, line):
    folder = tmp_path_factory.mktemp("run")
    (folder / "training.jsonl").write_bytes(
        b'{"step": 0, "loss": 1.0, "scale": 1.0}\n' + line + b"\n"
    )
    with contextlib.suppress(DamagedRun):
        read_log(folder)


DAMAGED = Path(__file__).with_name("damaged_lines.txt").read_text().splitlines()


@pytest.mark.parametrize("line", DAMAGED)
def test_the_damaged_line_is_named(tmp_path, line):
    (tmp_path / "training.jsonl").write_text(
        f'{{"step": 0, "loss": 1.0, "scale": 1.0}}\n{line}\n{{}}\n'
    )
    with pytest.raises(DamagedRun, match="line 2"):
        read_log(tmp_path)


def test_a_run_without_a_log(tmp_path):
    with pytest.raises(RunNotFound, match=r"no training\.jsonl"):
        read_log(tmp_path)


def test_a_training_writes_each_step_and_a_metric(tmp_path):
    model = network()
    run = tmp_path / "run"
    with wrapped(model, run=run) as mp:
        results = []
        for i in range(4):
            loss = loss_of_batch(model, mp, i) * (math.inf if i == 2 else 1.0)
            results.append(mp.step(loss))
        mp.log_metric("accuracy", 0.5)
    log = read_log(run)
    assert [s.loss for s in log.steps] == [r.loss for r in results]
    assert [s.scale for s in log.steps] == [1024, 1024, 1024, 512]
    assert [s.step for s in log.skipped] == [2]
    assert log.skipped[0].reason == results[2].reason != ""
    assert log.metric("accuracy").value == 0.5
    assert all(s.memory_bytes > 0 for s in log.steps)
    meta = mpdiag.open_run(run).meta
    assert (meta["state"], meta["training"]["backend"]) == ("complete", "emulated")
    assert mpdiag.PrecisionPlan.load(run / "plan.json") == mp.plan
    with pytest.raises(ZeroDivisionError), wrapped(network(), run=tmp_path / "failed"):
        raise ZeroDivisionError
    assert mpdiag.open_run(tmp_path / "failed").meta["state"] == "failed"


def test_a_log_that_cannot_be_written_is_said_once_and_training_goes_on(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = network()
    with pytest.warns(RuntimeWarning, match="training goes on") as said:
        mp = wrapped(model, run=tmp_path / "file" / "run")
        for _ in range(2):
            assert not mp.step(loss_of_batch(model, mp)).skipped
    assert len(said) == 1


def test_an_alarm_names_a_step_and_is_none(tmp_path):
    alarm = {"alarm": "underflow", "step": 0, "predicted": 0.4, "observed": 0.7, "message": "…"}
    log = written(tmp_path, alarm, TrainingStep(0, 1.0, 1.0))
    assert [s.loss for s in log.steps] == [1.0]
    assert log.notes == (alarm,)
