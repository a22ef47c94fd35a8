"""Whether a loss scale is needed: what a layer's own gradients do not show."""

from __future__ import annotations

import torch
from recorded_steps import Layers, record_steps
from torch import nn

import mpdiag


def recorded(folder, unit):
    """A small displacement, trained by its own slope: its gradients have two sizes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    model = Layers(lambda m, x: 1e-4 * m.net(x), net=net)

    def loss(model, step):
        x = torch.rand(16, 1, generator=torch.Generator().manual_seed(step)).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope - unit * 1e-4 * torch.cos(x)).div(unit).square().mean()

    return record_steps(folder, model, loss, 12, torch.optim.Adam, 1e-3)


def test_weights_gradients_that_a_gradient_of_a_gradient_hides_make_a_scale_needed(tmp_path):
    analysis = mpdiag.analyze(recorded(tmp_path / "run", 1.0))
    scale = analysis.plan.loss_scale
    assert scale.needed
    assert "of the sum of all weights' gradients in the later half" in scale.reason
    lost = analysis.figures.find("all-weights-sum")
    assert lost is not None
    assert lost.value > 0.9
    assert analysis.figures.find("layer-sum").value < 0.25
    smallest = 2.0**-25 / scale.recommended
    gradients = analysis.layers.of_kind("weight_grad").histograms
    assert float(gradients.abs_sum(-25).value.sum()) > 0
    assert smallest < float(gradients.absmax.max())


def test_without_a_loss_of_weights_gradients_nothing_is_said_of_them(tmp_path):
    analysis = mpdiag.analyze(recorded(tmp_path / "run", 1e-4))
    assert analysis.figures.find("all-weights-sum") is None
