"""Boards: the event file is read back, and says what the run says."""

import json
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from calls import run as call
from recorded_steps import loss_of_network, record_steps
from support import loss_of_batch, network, wrapped

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.integrations import boards
from mpdiag.integrations.series import figures

pytest.importorskip("tensorboard")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Recorded in FP32 and then trained by a plan, into one folder."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    record_steps(folder, model, loss_of_network, 3, lambda *_: optimizer, every=1)
    with wrapped(model, optimizer=optimizer, run=folder) as mp:
        for i in range(4):
            mp.step(loss_of_batch(model, mp, i) * (float("inf") if i == 2 else 1))
        mp.log_metric("accuracy", 0.75)
    return mpdiag.open_run(folder)


@pytest.fixture(scope="module")
def board(run, tmp_path_factory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path_factory.mktemp("board")
    written = boards.to_tensorboard(run, str(folder))
    events = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0})
    events.Reload()
    return events, written


def scalar(events, tag):
    return {event.step: event.value for event in events.Scalars(tag)}


def test_the_series_are_those_of_a_live_recording(run, board, tmp_path, monkeypatch):
    """In every board: TensorBoard's file, lines of JSON, and MLflow through a stand-in."""
    expected = dict(figures(run.records))
    assert set(expected) == {0, 1, 2}
    events, _ = board
    for tag in expected[0]:
        found = scalar(events, tag)
        assert found == {step: np.float32(row[tag]) for step, row in expected.items()}, tag
    written, where = boards.write_board(run, "jsonl", str(tmp_path / "a" / "mine.jsonl"))
    boards.write_board(run, "jsonl", where)  # again, in place of the first
    lines = [json.loads(line) for line in Path(where).read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [0, 1, 2, 3]
    assert sum(map(len, lines)) == written
    for step, row in expected.items():
        assert lines[step] | row == lines[step]
    assert lines[3]["training/scale"] == 512.0
    fake = MagicMock()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    assert boards.write_board(run, "mlflow", "x") == (written, "MLflow, experiment x")
    fake.set_experiment.assert_called_once_with("x")
    for call_, line in zip(fake.log_metrics.call_args_list, lines, strict=True):
        # JSON has no infinity.
        assert {k: v if np.isfinite(v) else None for k, v in call_.args[0].items()} == line
    assert [c.kwargs["step"] for c in fake.log_metrics.call_args_list] == [0, 1, 2, 3]


def test_the_training_is_there(board):
    events, written = board
    assert scalar(events, "training/skipped") == {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0}
    assert scalar(events, "training/scale")[3] == 512.0
    assert scalar(events, "metric/accuracy") == {3: 0.75}
    assert written == sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"])


def test_the_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    result = call("board", run.folder, "-o", tmp_path / "board")
    assert result.exit_code == 0, result.output
    assert f"tensorboard --logdir {tmp_path / 'board'} " in " ".join((*result.stderr.split(), ""))
    assert list((tmp_path / "board" / run.name).glob("events.out.tfevents.*"))
    result = call("board", run.folder, "--to", "jsonl", "-o", tmp_path / "mine.jsonl")
    assert re.fullmatch(r"\d+ scalars written to \S+mine.jsonl\n", result.stdout)
    assert call("board", tmp_path / "none").exit_code == 3
    assert call("board", run.folder, "--to", "x").exit_code == 2


def test_what_is_missing_is_said(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match="needs wandb: pip install wandb"):
        boards.write_board(run, "wandb")
    with pytest.raises(UsageError, match="needs tensorboard: pip install tensorboard"):
        boards.write_board(run, "tensorboard")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match="needs mlflow: pip install mlflow"):
        boards.write_board(run, "mlflow")
    with pytest.raises(UsageError, match="no board"):
        boards.write_board(run, "aim")


def test_wandb_is_given_the_same(run, monkeypatch):
    """Through a stand-in, as wandb itself starts a server of its own."""
    fake = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    written, _ = boards.write_board(run, "wandb", "x")
    options = fake.init.call_args.kwargs
    assert (options["project"], options["name"]) == ("x", "mine")
    opened = fake.init.return_value.__enter__.return_value
    logged = {made.kwargs["step"]: made.args[0] for made in opened.log.call_args_list}
    assert logged[1]["training/loss"] > 0
    assert written == sum(map(len, logged.values()))
