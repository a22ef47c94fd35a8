"""Which modules a plan names, where others already make them FP32."""

from collections import OrderedDict

import pytest
import torch
from recorded_steps import record_steps
from torch import nn

import mpdiag

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def growing():
    """A residual block whose first layer leaves FP16's range, and all after it."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    block[0].weight.data.mul_(3e5)
    return nn.Sequential(
        OrderedDict(into=nn.Linear(4, 8), block=block, norm=nn.LayerNorm(8), out=nn.Linear(8, 1))
    )


def loss_of(model, _step=0):
    return model(X).square().mean()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("growing") / "run"
    run = record_steps(folder, growing(), loss_of, 12, torch.optim.Adam, 1e-4, budget=None)
    largest = {o.module: t.absmax for o in run.operations() for t in o.outputs if not o.node}
    assert largest["block.1"] > 65504  # the ReLU's output leaves the range itself
    return mpdiag.analyze(run).plan


def test_what_follows_fp32_is_not_named(plan):
    named = {c.module for c in (*plan.fp32_modules, *plan.fp32_operations)}
    assert "block.1" not in named
    assert {"block.0", "block.2"} <= named


def test_what_is_not_named_is_fp32_by_the_plan_all_the_same(plan):
    model = growing()
    seen = []
    model.block[1].register_forward_hook(lambda _m, _args, out: seen.append(out))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    with mpdiag.MixedPrecision(model, optimizer, plan, backend="emulated") as trainer:
        with trainer.autocast():
            loss = loss_of(model)
        assert not trainer.step(loss).skipped
    (out,) = seen
    assert out.dtype == torch.float32
    assert 65504 < out.abs().max() < float("inf")
