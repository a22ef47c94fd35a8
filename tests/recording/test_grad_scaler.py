"""A training that uses ``GradScaler`` already: its scale and its skips are seen."""

import copy
import gc

import torch
from recorded import assert_same_histogram, model_and_optimizer, rows, step
from torch import nn

import mpdiag
from mpdiag.recording.grad_scaler import ScalerWatch


def three_steps(model, optimizer, folder):
    """Record three steps, of which the second overflows; returns the weight's gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradients = []
    with mpdiag.record(model, optimizer, folder, every=1) as recorder:
        for i in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 8)).square().mean()
            scaler.scale(loss * (float("inf") if i == 1 else 1.0)).backward()
            gradients.append(next(model.parameters()).grad.clone())
            scaler.step(optimizer)
            scaler.update()
    assert recorder.failures == []
    assert "step" not in vars(scaler)
    return gradients


def test_grad_scaler_is_seen_with_its_scale_and_its_skips(tmp_path):
    three_steps(*model_and_optimizer(), tmp_path / "run")
    activations = rows(tmp_path / "run", kind="activation_grad", name="2")
    assert activations["scale"].tolist() == [1024.0, 1024.0, 512.0]
    assert activations["skipped"].tolist() == [False, True, False]
    updates = rows(tmp_path / "run", kind="update", name="2.weight")
    assert updates["step"].tolist() == [0, 2]
    assert (rows(tmp_path / "run", kind="weight_grad")["scale"] == 1).all()


def test_a_fused_optimizer_under_a_grad_scaler(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=True)
    gradients = three_steps(model, optimizer, tmp_path / "run")
    found = rows(tmp_path / "run", kind="weight_grad", name="weight")
    assert found["scale"].tolist() == [1024.0, 1024.0, 512.0]
    assert found["skipped"].tolist() == [False, True, False]
    assert_same_histogram(
        tmp_path / "run", gradients[0] / 1024, kind="weight_grad", name="weight", step=0
    )


def test_unscaling_before_clipping_leaves_true_weight_gradients(tmp_path):
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        scaler.scale(model(torch.randn(5, 8)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        clipped = model[0].weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
    assert_same_histogram(tmp_path / "run", clipped, kind="weight_grad", name="0.weight")
    assert (rows(tmp_path / "run", kind="weight_grad")["scale"] == 1).all()
    assert (rows(tmp_path / "run", kind="activation_grad")["scale"] == 4096).all()


def test_scalers_are_looked_for_once_and_not_in_each_step(tmp_path, monkeypatch):
    """Looking at all live objects takes up to 100 ms."""
    searches, find = [], ScalerWatch.find
    monkeypatch.setattr(ScalerWatch, "find", lambda watch: searches.append(find(watch)))
    three_steps(*model_and_optimizer(), tmp_path / "run")
    assert len(searches) == 2  # as the recording begins, and in its first backward pass


class OwnScaler(torch.amp.GradScaler):
    """A scaler that shares nothing with torch's but its class."""

    def __init__(self):
        self._enabled = True


def a_step(folder):
    """A step of a recorded training; returns the recorder's view of scalers."""
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, folder) as recorder:
        step(model, optimizer)
        return list(recorder._parts.scalers._wrapped)


def test_a_scaler_is_found_however_it_was_made(tmp_path):
    gc.collect()  # scalers of other tests
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert a_step(tmp_path / "none") == []
    scaler = torch.amp.GradScaler("cpu")
    assert a_step(tmp_path / "one") == [scaler]
    again = copy.deepcopy(scaler)
    del scaler
    assert a_step(tmp_path / "copied") == [again]
    assert not off.is_enabled()
    del again
    own = OwnScaler()  # a class that torch does not know is looked for
    assert a_step(tmp_path / "own") == [own]
