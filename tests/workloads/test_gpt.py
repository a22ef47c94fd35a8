"""The GPT: its attention, and what it does not see."""

import math

import torch
import torch.nn.functional as F

from mpdiag.workloads.gpt import Block, GptModel


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
