"""Rotary tables are computed in the model's BF16: far positions get another angle.

Thread: EleutherAI/gpt-neox#1003 (repaired by computing them in FP32 and casting the result).
Stand-ins: one head of attention over 512 positions; an AdamW with FP32 masters.
"""

import torch
from shared import BF16, FP32, MasterAdamW, main
from torch import nn
from torch.nn import functional

RANKS = 1
LENGTH, WIDTH = 512, 32
CAUSE = "the rotary table is computed in BF16"
CONSEQUENCE = "positions beyond 256 collide, or how far the angles are from FP32's"


class RotaryEmbedding(nn.Module):
    """Cosine and sine tables (LENGTH, WIDTH), computed in a dtype of choice."""

    def __init__(self, computed_in: torch.dtype | None) -> None:
        super().__init__()
        self.computed_in = computed_in
        frequencies = 10000.0 ** -(torch.arange(0, WIDTH, 2).float() / WIDTH)
        self.register_buffer("inv_freq", frequencies)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self.computed_in or x.dtype
        frequencies = self.inv_freq.to(dtype)
        if self.computed_in is not None:
            frequencies = 10000.0 ** -(torch.arange(0, WIDTH, 2).float() / WIDTH)
        positions = torch.arange(LENGTH).to(dtype)
        angles = torch.einsum("i,j->ij", positions, frequencies)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Attention(nn.Module):
    """One head."""

    def __init__(self, computed_in: torch.dtype | None) -> None:
        super().__init__()
        self.rotary_emb = RotaryEmbedding(computed_in)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary_emb(x)

        def rotated(t: torch.Tensor) -> torch.Tensor:
            one, other = t.chunk(2, -1)
            return t * cos + torch.cat((-other, one), -1) * sin

        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(functional.scaled_dot_product_attention(rotated(q), rotated(k), v))


def train(computed_in: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = Attention(computed_in).to(BF16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(2, LENGTH, WIDTH, generator=generator).to(BF16)
        (model(x) - x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(None)


def twin() -> None:
    train(FP32)


if __name__ == "__main__":
    main(fault, twin, RANKS)
