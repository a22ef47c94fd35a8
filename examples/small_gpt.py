"""A small language model that learns to continue sums such as 27+58=085.

    python examples/small_gpt.py [--bf16] [--unscaled]

``--bf16`` trains under BF16 autocast. ``--unscaled`` plants a mistake: attention in the second block
does not divide by the root of the head's size.
"""

import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

STEPS, BATCH, WIDTH, HEADS = 60, 64, 128, 4
SIGNS = "0123456789+="


class Block(nn.Module):
    """Attention, then an MLP, each beside a residual stream."""

    def __init__(self, scale=None):
        super().__init__()
        self.scale = scale
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class SmallGPT(nn.Module):
    """Tokens of shape (batch, 8) to logits of shape (batch, 8, signs)."""

    def __init__(self, scale=None):
        super().__init__()
        self.token, self.position = nn.Embedding(len(SIGNS), WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(scale))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(SIGNS))

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight
        return self.head(self.norm(self.blocks(x)))


def batch():
    """Sums as tokens, of shape (BATCH, 9)."""
    a, b = torch.randint(0, 100, (2, BATCH))
    lines = [f"{x:02}+{y:02}={x + y:03}" for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return torch.tensor([[SIGNS.index(sign) for sign in line] for line in lines])


torch.manual_seed(0)
model = SmallGPT(scale=1.0 if "--unscaled" in sys.argv else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
bf16 = torch.autocast("cpu", torch.bfloat16) if "--bf16" in sys.argv else nullcontext()
for _ in range(STEPS):
    tokens = batch()
    with bf16:
        logits = model(tokens[:, :-1])
    loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
