"""Native levels under ``torch.compile``: compiled from the first step on, and as without it."""

from __future__ import annotations

import warnings

import pytest
import torch
from support import backoff
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mpdiag

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # while torch traces
]


@pytest.fixture(autouse=True)
def _forgotten():
    """Nothing counts as compiled in the tests that follow."""
    yield
    torch._dynamo.reset()


def train(level, compiled, backend="inductor"):
    """Four steps, the third of them skipped; what is compiled, and how often torch compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    overrides = mpdiag.PrecisionOverrides(dtype="bf16")
    count = CompileCounterWithBackend(backend)
    given = torch.compile(model, backend=count) if compiled == "before" else model
    mp = mpdiag.MixedPrecision(
        given, optimizer, backoff(64.0), level=level, backend="native", overrides=overrides
    )
    call = torch.compile(model, backend=count) if compiled == "after" else given
    if compiled == "in place":
        model.compile(backend=count)

    def step(x):
        with mp.autocast():
            loss = call(x).float().square().mean()
        return mp.step(loss)

    scaler = mp.scaler()

    def step_by_scaler(x):
        with mp.autocast():
            loss = call(x).float().square().mean()
        scaler.scale(loss).backward()
        result = scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return result

    if compiled == "step":
        step = torch.compile(step, backend=count)
    elif compiled == "step by scaler":
        step = torch.compile(step_by_scaler, backend=count)
    skipped, graphs = [], []
    for i in range(4):
        x = torch.randn(8, 4) * (float("inf") if i == 2 else 1.0)
        skipped.append(step(x).skipped)
        graphs.append(count.frame_count)
    share = mp.context.monitor.share
    mp.close()
    return skipped, model.state_dict(), graphs, share


@pytest.mark.parametrize(
    ("level", "compiled", "backend"),
    [
        ("O1", "before", "inductor"),
        ("O1", "after", "inductor"),
        ("O1", "in place", "aot_eager"),
        ("O1", "step", "aot_eager"),
        ("O2", "before", "aot_eager"),
        ("O2", "after", "aot_eager"),
        ("O2", "step", "aot_eager"),
        ("O2", "step by scaler", "aot_eager"),
    ],
)
def test_what_is_compiled_trains_as_what_is_not(level, compiled, backend):
    """All of the model is compiled in the first step, and nothing else; no later step compiles more."""
    skipped, eager, _, share = train(level, "")
    assert skipped == [False, False, True, False]
    assert share.share == 1.0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        again, state, graphs, share = train(level, compiled, backend)
    # At O2 the casts of inputs and outputs are graphs of their own, if they are compiled.
    assert graphs == [3 if level == "O2" and compiled != "before" else 1] * 4
    assert share.share is None
    assert "compile" in share.message
    assert again == skipped
    for name, value in eager.items():
        torch.testing.assert_close(state[name], value, rtol=2e-2, atol=2e-3)


def test_what_was_counted_before_something_was_compiled_is_not_claimed():
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    mp = mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.05), backoff(64.0))
    share = mp.context.monitor.share
    for _ in range(2):
        with mp.autocast():
            loss = model(torch.randn(8, 4)).square().mean()
        mp.step(loss)
        known, _ = share.share, torch.compile(nn.Linear(2, 2), backend="eager")(torch.zeros(1, 2))
    assert known is None
    mp.close()
