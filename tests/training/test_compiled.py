"""Native levels under ``torch.compile`` with inductor: skips, buffers and weights as without it."""

from __future__ import annotations

import pytest
import torch
from support import backoff, batch, network
from torch import nn

import mpdiag

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports


def train(level, compiled):
    torch._dynamo.reset()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    overrides = mpdiag.PrecisionOverrides(dtype=None if level == "O0" else "bf16")
    given = torch.compile(model) if compiled == "before" else model
    mp = mpdiag.MixedPrecision(
        given, optimizer, backoff(64.0), level=level, backend="native", overrides=overrides
    )
    call = torch.compile(model) if compiled == "after" else given
    skipped = []
    for i in range(4):
        x, y = batch(i)
        if i == 2:
            x = x * float("inf")
        with mp.autocast():
            loss = nn.functional.cross_entropy(call(x).float(), y)
        skipped.append(mp.step(loss).skipped)
    mp.close()
    return skipped, model.state_dict()


@pytest.mark.parametrize(
    ("level", "compiled"), [("O0", "after"), ("O1", "before"), ("O1", "after"), ("O2", "after")]
)
def test_a_compiled_model_trains_as_an_eager_one(level, compiled):
    skipped, eager = train(level, "")
    assert skipped == [False, False, True, False]
    again, state = train(level, compiled)
    assert again == skipped
    for name, value in eager.items():
        torch.testing.assert_close(state[name], value, rtol=2e-2, atol=2e-3)
