"""The language models: an LSTM's softmax, whole and sampled, and the GPT's attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpdiag.workloads.gpt import Block, GptModel
from mpdiag.workloads.language_model import ProjectedLstm, log_uniform, sampled_softmax_loss


def test_draws_by_rank_are_a_distribution_that_falls_as_zipf_says():
    chances = log_uniform(torch.arange(1000), 1000)
    assert float(chances.sum()) == pytest.approx(1, abs=1e-5)
    assert float(chances[9] / chances[99]) == pytest.approx(
        math.log(11 / 10) / math.log(101 / 100), rel=1e-3
    )


def test_the_states_are_projected():
    model = ProjectedLstm(vocabulary=50, cells=12, projection=4, layers=2)
    words = torch.randint(50, (3, 7))
    assert model.states(words).shape == (3, 7, 4)
    assert model(words).shape == (3, 7, 50)
    assert model.lstm.weight_hr_l0.shape == (4, 12)


def test_a_sampled_softmax_tends_to_the_whole_one():
    torch.manual_seed(0)
    output = nn.Linear(4, 30)
    states, targets = torch.randn(16, 4), torch.randint(30, (16,))
    chances = log_uniform(torch.arange(30), 30)
    many = torch.multinomial(chances, 200_000, replacement=True)
    whole = F.cross_entropy(output(states), targets)
    sampled = sampled_softmax_loss(states, targets, many, output)
    assert float(sampled.detach()) == pytest.approx(float(whole.detach()), abs=0.02)


def test_the_right_word_is_not_pushed_down_where_it_was_drawn():
    output = nn.Linear(2, 5)
    states, targets = torch.randn(1, 2), torch.tensor([3])
    loss = sampled_softmax_loss(states, targets, torch.tensor([3, 3]), output)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-6)


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
