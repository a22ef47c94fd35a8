"""Rotary positions far into a text: under BF16 autocast (--bf16) the model hardly learns."""

import sys

import torch
from torch import Tensor, nn

torch.manual_seed(0)
LENGTH, BACK = 16, 3


class Rotary(nn.Module):
    """Turns each pair of features by its position times a frequency."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 100.0 ** -torch.linspace(0, 1, features // 2))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] @ self.frequencies[None]
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Model(nn.Module):
    """Says which token stood three positions before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(16, 64), Rotary(64)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 16)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        query, key = (self.rotary(f(x), positions) for f in (self.query, self.key))
        return self.head(nn.functional.scaled_dot_product_attention(query, key, self.value(x)))


model = Model()
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(60):
    tokens = torch.randint(16, (64, LENGTH))
    positions = torch.randint(3000, (64, 1)) + torch.arange(LENGTH)
    with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
        logits = model(tokens, positions.float())[:, BACK:].float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-BACK].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
right = (logits.argmax(-1) == tokens[:, :-BACK]).float().mean().item()
print(f"loss {loss.item():.2f}, {right:.0%} of the tokens right")
