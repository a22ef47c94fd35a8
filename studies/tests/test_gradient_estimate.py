"""The estimated change of a step's gradients against the change that was measured."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpdiag.errors import UsageError
from mpdiag.sensitivity.measurement import run_once
from studies.gradient_estimate import estimate_gradients


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)


@pytest.fixture
def smooth(net, data):
    x, y = data
    return lambda: F.smooth_l1_loss(net(x), y)


def test_the_estimated_gradient_error_is_the_measured_one(net, smooth):
    """Over many directions it is ‖Δg‖, forward and backward, for every operation."""
    assert len(measured_estimates(net, smooth)) == 4


def test_gradients_that_no_weight_moves_count_as_well(net, data):
    """The last bias's, sixteen times 1: no rounding reaches it, and most of ‖g‖ is its."""
    measured_estimates(net, lambda: net(data[0]).sum())


def test_of_a_model_whose_gradients_no_weight_moves_the_backward_pass_rounds_alone(data):
    net = nn.Linear(6, 2)
    found = measured_estimates(net, lambda: net(data[0]).sum())
    assert [e.forward for e in found] == [0.0, 0.0]
    assert found[0].backward > 0


def measured_estimates(net, step):
    """The estimates, which are what running each site in FP16 gives."""
    found = estimate_gradients(net, step, scale=1024.0, directions=400)
    exact = run_once(net, step, scale=1024.0)
    assert len(found) == len(exact.sites)
    size = math.sqrt(sum(float(g.double().pow(2).sum()) for g in exact.gradients.values()))
    for e in found:
        for part, estimated in (("forward", e.forward), ("backward", e.backward)):
            narrow = run_once(net, step, [e.site], part=part, scale=1024.0)
            error = math.sqrt(
                sum(
                    float((narrow.gradients[n] - g).double().pow(2).sum())
                    for n, g in exact.gradients.items()
                )
            )
            assert estimated == pytest.approx(error / size, rel=0.25, abs=1e-6), (e.site, part)
    return found


def test_what_cannot_be_differentiated_twice_is_said_with_a_way_out():
    q = nn.Parameter(torch.randn(1, 2, 4, 8))

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = q

        def forward(self):
            return F.scaled_dot_product_attention(self.q, self.q, self.q)

    model = Attention()
    with pytest.raises(UsageError, match="SDPBackend"):
        estimate_gradients(model, lambda: model().square().sum())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert estimate_gradients(model, lambda: model().square().sum())
