"""Native levels under ``torch.compile`` with inductor: skips, buffers and weights as without it."""

from __future__ import annotations

import pytest
import torch
from support import backoff
from torch import nn

import mpdiag

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # while torch traces
]


def train(level, compiled, backend="inductor"):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    overrides = mpdiag.PrecisionOverrides(dtype="bf16")
    given = torch.compile(model, backend=backend) if compiled == "before" else model
    mp = mpdiag.MixedPrecision(
        given, optimizer, backoff(64.0), level=level, backend="native", overrides=overrides
    )
    # While FLOPs are counted, in the first steps, torch runs a compiled model eagerly.
    mp.context.monitor.share.stop("compiled")
    call = torch.compile(model, backend=backend) if compiled == "after" else given
    skipped = []
    for i in range(4):
        x = torch.randn(8, 4) * (float("inf") if i == 2 else 1.0)
        with mp.autocast():
            loss = call(x).float().square().mean()
        skipped.append(mp.step(loss).skipped)
    mp.close()
    return skipped, model.state_dict()


@pytest.mark.parametrize(
    ("level", "compiled", "backend"),
    [
        ("O1", "before", "inductor"),
        ("O1", "after", "aot_eager"),
        ("O2", "before", "aot_eager"),
        ("O2", "after", "aot_eager"),
    ],
)
def test_a_compiled_model_trains_as_an_eager_one(level, compiled, backend):
    skipped, eager = train(level, "")
    assert skipped == [False, False, True, False]
    torch._dynamo.utils.counters.clear()
    again, state = train(level, compiled, backend)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert again == skipped
    for name, value in eager.items():
        torch.testing.assert_close(state[name], value, rtol=2e-2, atol=2e-3)
