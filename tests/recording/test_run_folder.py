"""Who may write into a run folder, and what happens when nothing can be written."""

import errno
import os
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from recorded import model_and_optimizer, steps
from torch import nn

import mpdiag
from mpdiag.analysis.analyzer import analyze
from mpdiag.recording import ledger, run_folder
from mpdiag.recording.run_folder import is_replaced
from mpdiag.runs.run import open_run
from mpdiag.runs.writer import RunWriter


@pytest.fixture
def training(tmp_path):
    """Begin a recording into the same folder; returns it and a function that takes steps."""

    def begin(width, **options):
        model = nn.Linear(width, width)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = mpdiag.record(model, optimizer, tmp_path / "run", every=1, **options).start()

        return recorder, lambda count: steps(count, model, optimizer, torch.randn(2, width))

    return begin


@pytest.mark.parametrize("flush_rows", [1, 10**6], ids=["while it trains", "at its end"])
def test_who_was_overwritten_writes_nothing_more(training, monkeypatch, flush_rows):
    first, train_first = training(8)
    train_first(2)
    second, train_second = training(16, overwrite=True)
    train_second(1)
    monkeypatch.setattr(ledger, "_FLUSH_ROWS", flush_rows)
    with pytest.warns(RuntimeWarning, match="another process has replaced the run"):
        train_first(3)
        first.close()
    train_second(2)
    second.close()
    run = open_run(first.folder)
    assert run.meta["state"] == "complete"
    assert run.meta["failures"] == []
    assert np.unique(run.records.step).tolist() == [0, 1, 2]
    weights = run.records.select(run.records.of_kind("weight"))
    assert set(weights.numel.tolist()) == {16, 16 * 16}
    assert {row["numel"] for row in run.modules() if row["what"] == "parameter"} == {16, 256}


def test_nobody_looks_where_nothing_is(tmp_path):
    assert not is_replaced(tmp_path, 0, "now")
    (tmp_path / "meta.json").write_text("{}")
    assert not is_replaced(tmp_path, 0, "now")
    (tmp_path / "meta.json").write_text('{\n  "created": "then"\n}')
    assert is_replaced(tmp_path, 0, "now")
    assert not is_replaced(tmp_path, 0, "then")
    assert not is_replaced(tmp_path, 1, "now")


full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


@pytest.mark.parametrize(
    ("owner", "method", "fails", "said"),
    [
        (RunWriter, "append", full, "No space left"),
        (RunWriter, "write_meta", full, "No space left"),
        (ledger.Ledger, "count", Mock(side_effect=ZeroDivisionError), "training goes on"),
        (None, "", None, "training goes on"),  # a file lies where the folder should be
    ],
)
def test_a_failure_warns_once_and_training_ends_the_same(
    tmp_path, monkeypatch, owner, method, fails, said
):
    plain, optimizer = model_and_optimizer()
    steps(3, plain, optimizer)

    if owner is None:
        (tmp_path / "folder").write_text("in the way")
    else:
        monkeypatch.setattr(owner, method, fails)
    model, optimizer = model_and_optimizer()
    with pytest.warns(RuntimeWarning, match=said) as warned:  # noqa: SIM117
        with mpdiag.record(model, optimizer, tmp_path / "folder" / "run", every=1):
            steps(3, model, optimizer)
    assert len(warned) == 1
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_disk_that_is_full_at_the_end_leaves_no_complete_recording(training, monkeypatch):
    """Five steps are written by then, the sixth when the training is over and the disk full."""
    recorder, train = training(8)
    train(5)
    monkeypatch.setattr(RunWriter, "append", full)
    train(1)
    with pytest.warns(RuntimeWarning, match="training goes on"):
        recorder.close()
    run = open_run(recorder.folder)
    written = run.meta["state"], run.meta["steps_recorded"], run.meta["steps_seen"]
    assert written == ("failed", 5, 6)
    verdict = analyze(run).verdict
    assert verdict.level == "cannot"
    assert verdict.text.startswith("The recording failed at step ")
    assert "No space left on device" in verdict.text
    assert "5 of 6 steps" in verdict.text


@pytest.mark.filterwarnings("ignore:recording into")
def test_a_failed_write_of_operations_is_tried_once(training, monkeypatch):
    """It was due again in every later step, and filled the list of failures."""
    refuse = Mock(side_effect=full.side_effect)
    monkeypatch.setattr(RunWriter, "append_part", refuse)
    recorder, train = training(8)
    train(30)
    recorder.close()
    assert refuse.call_count == 2  # at steps 0 and 10
    assert len(recorder.failures) == 2


def failing(monkeypatch, owner, name, times):
    """Let a function fail at its first calls; returns how often it was called."""
    plain, calls = getattr(owner, name), []

    def fail(*args, **options):
        calls.append(1)
        if len(calls) <= times:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(*args, **options)

    monkeypatch.setattr(owner, name, fail)
    return calls


@pytest.mark.parametrize("times", [1, 3])
def test_a_disk_that_fails_for_a_while_loses_nothing(training, monkeypatch, times):
    recorder, train = training(8)
    train(2)
    monkeypatch.setattr(run_folder, "_RETRY_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(ledger, "_FLUSH_ROWS", 1)
    failing(monkeypatch, os, "replace", times)
    train(8)
    recorder.close()
    run = open_run(recorder.folder)
    assert (run.meta["state"], run.meta["failures"]) == ("complete", [])
    assert np.unique(run.records.step).tolist() == list(range(10))


def test_a_disk_that_goes_on_failing_is_given_up_and_tried_rarely(training, monkeypatch):
    recorder, train = training(8)
    train(2)
    now = [0.0]
    monkeypatch.setattr(run_folder.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ledger, "_FLUSH_ROWS", 1)
    tries = failing(monkeypatch, RunWriter, "append", 10**6)
    with pytest.warns(RuntimeWarning, match="training goes on"):
        for _ in range(400):
            now[0] += 0.1
            train(1)
    assert len(tries) == 1 + len(run_folder._RETRY_SECONDS)
    recorder.close()
    assert recorder.steps_recorded < 400


def test_a_full_disk_leaves_a_run_that_says_failed(training, monkeypatch):
    """A new meta file has no room, the one that is there has."""
    recorder, train = training(8)
    monkeypatch.setattr(run_folder, "_RETRY_SECONDS", ())
    monkeypatch.setattr("mpdiag.files.atomic.atomic_path.__enter__", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        train(3)
    recorder.close()
    meta = open_run(recorder.folder).meta
    assert meta["state"] == "failed"
    assert "No space left" in meta["failures"][0]["error"]


def test_early_steps_are_on_the_disk_soon(training):
    """A script that was killed left one step of seven."""
    recorder, train = training(8)
    written = []
    for _ in range(30):
        train(1)
        written.append(open_run(recorder.folder).meta["steps_recorded"])
    recorder.close()
    assert written == [1] * 4 + [5] * 15 + [20] * 11
