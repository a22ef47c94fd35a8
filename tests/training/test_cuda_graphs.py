"""A step under capture in a CUDA graph, which a stand-in for the stream's answer plays."""

from unittest.mock import Mock

import pytest
import torch
from support import BF16, backoff, wrapped
from torch import nn

from mpdiag.errors import UsageError


def begin_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def loss_of(model, mp):
    with mp.autocast():
        return model(torch.randn(8, 4)).square().mean()


def trained(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    mp = wrapped(model, backoff(64.0), optimizer, level=level, overrides=BF16)
    mp.step(loss_of(model, mp))
    return model, optimizer, mp


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_under_capture_is_refused_before_anything_is_read_or_changed(level, monkeypatch):
    model, optimizer, mp = trained(level)
    scaler = mp.scaler()
    loss = loss_of(model, mp)
    begin_capture(monkeypatch)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    calls = {
        "autocast": lambda: mp.autocast().__enter__(),
        "a forward pass alone": lambda: model(torch.randn(8, 4)),
        "backward": lambda: mp.backward(loss),
        "step(loss)": lambda: mp.step(loss),
        "step": mp.step,
        "unscale": mp.unscale,
        "scaler.scale": lambda: scaler.scale(loss),
        "scaler.unscale_": lambda: scaler.unscale_(optimizer),
        "scaler.step": lambda: scaler.step(optimizer),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match="cannot be captured in a CUDA graph"):
            call()
            pytest.fail(name)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert mp.steps == 1
    mp.close()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_evaluation_may_be_captured(level, monkeypatch):
    model, _, mp = trained(level)
    expected = model.eval()(x := torch.randn(8, 4)).detach()

    random_state = Mock(side_effect=AssertionError("random state cannot be read under capture"))
    monkeypatch.setattr("mpdiag.training.skips.step_start.capture_random", random_state)
    begin_capture(monkeypatch)
    with torch.no_grad(), mp.autocast():
        found = model(x)
    assert torch.allclose(found.float(), expected.float(), atol=0.05)
    mp.close()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_module_captured_before_it_is_wrapped(level):
    """As ``torch.cuda.make_graphed_callables`` leaves it: its graph reads the weights where they are."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def new_fwd(x):
        return nn.functional.linear(x, model[0].weight, model[0].bias)

    new_fwd.__module__ = "torch.cuda.graphs"
    model[0].forward = new_fwd
    if level == "O2":
        with pytest.raises(UsageError, match="module '0' was captured in a CUDA graph"):
            wrapped(model, level=level, overrides=BF16)
        assert model[1].weight.dtype == torch.float32
        return
    with wrapped(model, level=level, overrides=BF16) as mp:
        assert not mp.step(loss_of(model, mp)).skipped
