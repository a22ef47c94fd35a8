"""Who may write into a run folder, and what happens when nothing can be written."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from recorded import model_and_optimizer, steps
from torch import nn

import mpdiag
from mpdiag.analysis.analyzer import analyze
from mpdiag.recording import ledger
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

        def steps(count):
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.randn(2, width)).square().mean().backward()
                optimizer.step()

        return recorder, steps

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


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken(*_args, **_kwargs):
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize(
    ("owner", "method", "fails", "said"),
    [
        (RunWriter, "append", full, "No space left"),
        (RunWriter, "write_meta", full, "No space left"),
        (ledger.Ledger, "count", broken, "training goes on"),
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
    """The first step is written at once, the others when the training is over and the disk full."""
    recorder, train = training(8)
    train(5)
    monkeypatch.setattr(RunWriter, "append", full)
    train(1)
    with pytest.warns(RuntimeWarning, match="training goes on"):
        recorder.close()
    run = open_run(recorder.folder)
    written = run.meta["state"], run.meta["steps_recorded"], run.meta["steps_seen"]
    assert written == ("failed", 1, 6)
    verdict = analyze(run).verdict
    assert verdict.level == "cannot"
    assert verdict.text.startswith("The recording failed at step ")
    assert "No space left on device" in verdict.text
    assert "1 of 6 steps" in verdict.text
