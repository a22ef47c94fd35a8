"""The losses of a recorded training: which are written, when, and whose."""

from __future__ import annotations

import pytest
import torch
from support import batch, network
from torch import nn

import mpdiag
from mpdiag.errors import RunNotFound
from mpdiag.training_log import read_log

PLAIN = torch.autograd.backward


@pytest.fixture(autouse=True)
def _torch_gets_its_function_back():
    yield
    assert torch.autograd.backward is PLAIN


def train(model, optimizer, steps, parts=1, weight=1.0):
    """The losses of the last part of each step."""
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            x, y = batch(i * parts + part)
            loss = nn.functional.cross_entropy(model(x), y) * weight
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def logged(folder):
    return [s.loss for s in read_log(folder).steps]


@pytest.mark.parametrize("parts", [1, 3])
def test_every_step_has_its_loss_recorded_or_not(tmp_path, parts):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=7) as recorder:
        losses = train(model, optimizer, 300, parts)
    assert logged(tmp_path / "run") == losses
    assert recorder.steps_recorded == 43
    assert not recorder.failures


def test_a_loss_that_is_changed_in_place_is_written_as_it_was(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        x, y = batch(0)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        before = loss.item()
        with torch.no_grad():
            loss.mul_(100)
        optimizer.step()
    assert logged(tmp_path / "run") == [before]


def test_noting_a_loss_is_no_operation_of_the_training(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run", operations=1):
        train(model, optimizer, 1)
    assert len(logged(tmp_path / "run")) == 1
    operations = mpdiag.open_run(tmp_path / "run").operations()
    assert not [o.op for o in operations if o.op in ("_local_scalar_dense", "detach", "clone")]


def test_a_grad_scaler_is_divided_out(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for i in range(3):
            x, y = batch(i)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    steps = read_log(tmp_path / "run").steps
    assert [s.loss for s in steps] == pytest.approx(losses)
    assert [s.scale for s in steps] == [1024.0] * 3


def test_a_trainer_in_the_same_folder_logs_by_itself(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = mpdiag.PrecisionPlan("fp16")
    with (
        mpdiag.record(model, optimizer, tmp_path / "run", every=1),
        mpdiag.MixedPrecision(model, optimizer, plan, run=tmp_path / "run") as mp,
    ):
        for i in range(3):
            x, y = batch(i)
            with mp.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            mp.step(loss)
    lines = (tmp_path / "run" / "training.jsonl").read_text().splitlines()
    assert sum('"step"' in line for line in lines) == 3
    assert all(s.gradient_norm for s in read_log(tmp_path / "run").steps)


def test_what_a_trainer_scales_is_no_loss(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        mpdiag.record(model, optimizer, tmp_path / "run"),
        mpdiag.MixedPrecision(model, optimizer, mpdiag.PrecisionPlan("fp16")) as mp,
    ):
        x, y = batch(0)
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        mp.step(loss)
    with pytest.raises(RunNotFound, match="no loss and no metric"):
        read_log(tmp_path / "run")


def test_two_recordings_at_once_each_note_and_the_last_one_gives_torch_back(tmp_path):
    model, other = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outer = mpdiag.record(model, optimizer, tmp_path / "a").start()
    inner = mpdiag.record(other, torch.optim.SGD(other.parameters(), 0.1), tmp_path / "b").start()
    losses = train(model, optimizer, 2)
    outer.close()
    assert torch.autograd.backward is not PLAIN
    inner.close()
    assert logged(tmp_path / "a") == losses


def test_what_is_no_loss_is_passed_over(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run") as recorder:
        x, _ = batch(0)
        out = model(x)
        torch.autograd.backward((out, out.sum()), (torch.ones_like(out), None))
        optimizer.step()
        model(x).backward(torch.ones_like(out))
        optimizer.step()
    assert not (tmp_path / "run" / "training.jsonl").exists()
    assert not recorder.failures


def test_a_metric_goes_into_the_run_that_began_last_also_after_its_end(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "fp32") as recorder:
        train(model, optimizer, 2)
        mpdiag.log_metric("accuracy", torch.tensor(0.5))
    mpdiag.log_metric("accuracy", 0.75)
    recorder.log_metric("loss", 0.1, higher_is_better=False)
    with mpdiag.MixedPrecision(
        model, optimizer, mpdiag.PrecisionPlan("fp16"), run=tmp_path / "fp16"
    ) as mp:
        x, y = batch()
        mp.step(nn.functional.cross_entropy(model(x), y))
    mpdiag.log_metric("accuracy", 0.7)
    log = read_log(tmp_path / "fp32")
    assert [m.value for m in log.metrics] == [0.5, 0.75, 0.1]
    assert len(log.steps) == 2
    assert read_log(tmp_path / "fp16").metric("accuracy").value == 0.7
    (metric, _) = mpdiag.compare(tmp_path / "fp32", tmp_path / "fp16").metrics
    assert (metric.metric, metric.a, metric.b) == ("accuracy", (0.75,), (0.7,))


def test_a_metric_without_a_run_is_no_error(monkeypatch):
    from mpdiag import training_log

    monkeypatch.setattr(training_log, "_latest", [])
    mpdiag.log_metric("accuracy", 1)
