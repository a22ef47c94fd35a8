"""The GPT and the vision Transformer, and the plain network."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mpdiag.workloads.gpt import Block, GptModel
from mpdiag.workloads.vgg import PlainNet, Vgg
from mpdiag.workloads.vit import VisionTransformer, Vit


def test_a_block_is_attention_and_two_layers_beside_shortcuts():
    torch.manual_seed(0)
    block, x = Block(8, 2, causal=False), torch.randn(3, 5, 8)
    q, k, v = block.attend(block.norm1(x)).chunk(3, dim=2)
    seen = []
    for head in (slice(0, 4), slice(4, 8)):
        scores = q[..., head] @ k[..., head].transpose(1, 2) / math.sqrt(4)
        seen.append(scores.softmax(2) @ v[..., head])
    y = x + block.project(torch.cat(seen, dim=2))
    y = y + block.narrow(F.gelu(block.widen(block.norm2(y))))
    torch.testing.assert_close(block(x), y)


def test_a_gpt_does_not_see_what_is_to_come():
    torch.manual_seed(0)
    model = GptModel(length=10, width=16, heads=2, blocks=2).eval()
    text = torch.randint(97, (1, 10))
    other = text.clone()
    other[0, 6] = (text[0, 6] + 1) % 97
    with torch.no_grad():
        a, b = model(text), model(other)
    assert torch.equal(a[:, :6], b[:, :6])
    assert not torch.allclose(a[:, 6:], b[:, 6:])


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
    from mpdiag.workloads.protocol import train

    with torch.random.fork_rng():
        assert train(workload(), steps=100, seed=0).metric > 0.75


@pytest.mark.parametrize("workload", [Vgg, Vit])
def test_large_is_the_same_only_larger(workload):
    small, large = (
        sum(p.numel() for p in workload(size=size).model().parameters())
        for size in ("small", "large")
    )
    assert large > 50 * small
