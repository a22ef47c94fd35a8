"""The vision Transformer, and the plain network."""

from __future__ import annotations

import pytest
import torch

from studies.workloads.vgg import PlainNet, Vgg
from studies.workloads.vit import VisionTransformer, Vit


def test_a_vision_transformer_sees_all_16_patches():
    torch.manual_seed(0)
    model = VisionTransformer(16, 2, 2)
    images = torch.rand(2, 1, 8, 8, requires_grad=True)
    logits = model(images)
    assert logits.shape == (2, 10)
    logits.sum().backward()
    assert (images.grad.abs() > 0).all()


def test_the_plain_network_has_no_batch_norm():
    model = PlainNet(4)
    assert not [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len([m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]) == 6
    assert model(torch.rand(3, 1, 8, 8)).shape == (3, 10)


@pytest.mark.parametrize("workload", [Vgg, Vit])
def test_digits_are_learned(workload):
    from mpdiag.workloads.protocol import start

    with torch.random.fork_rng():
        session = start(workload(), steps=100, seed=0)
        session.run()
        assert session.evaluate() > 0.75


@pytest.mark.parametrize("workload", [Vgg, Vit])
def test_large_is_the_same_only_larger(workload):
    small, large = (
        sum(p.numel() for p in workload(size=size).model().parameters())
        for size in ("small", "large")
    )
    assert large > 50 * small
