"""Loops that clip: the loss scale is limited by the gradients before it."""

import math

import pytest
import torch
from torch import nn

import mpdiag


def recorded(folder, clip):
    """An analysis, and the largest weight gradient before clipping in the first step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    largest = 0.0
    with mpdiag.record(net, optimizer, folder):
        for step in range(12):
            (net(torch.randn(16, 8)) * 100).square().mean().backward()
            if step == 0:
                largest = max(float(p.grad.abs().max()) for p in net.parameters())
            clip(list(net.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    return mpdiag.analyze(folder), largest


CLIPS = {
    "norm": lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
    "norm, one by one": lambda ps: nn.utils.clip_grad_norm_(ps, 1.0, foreach=False),
    "value": lambda ps: nn.utils.clip_grad_value_(ps, 0.5, foreach=False),
    "by hand": lambda ps: [p.grad.mul_(0.01) for p in ps],
}
IDLE = {
    "none": lambda ps: None,
    "never reached": lambda ps: nn.utils.clip_grad_norm_(ps, 1e9),
}


@pytest.mark.parametrize("name", CLIPS)
def test_the_scale_is_limited_by_gradients_before_clipping(tmp_path, name):
    analysis, largest = recorded(tmp_path / "run", CLIPS[name])
    unclipped, _ = recorded(tmp_path / "unclipped", IDLE["none"])
    (finding,) = [f for f in analysis.findings if f.code == "gradients-clipped"]
    assert finding.evidence["steps"][0] == 0
    upper = analysis.plan.loss_scale.upper
    assert upper == 2.0 ** math.floor(math.log2(65504 / largest))
    assert upper >= unclipped.plan.loss_scale.upper


@pytest.mark.parametrize("name", IDLE)
def test_a_loop_that_does_not_clip_is_told_nothing(tmp_path, name):
    analysis, _ = recorded(tmp_path / "run", IDLE[name])
    assert "gradients-clipped" not in {f.code for f in analysis.findings}
