"""An ordinary training script, which ``mpdiag profile -- script.py`` runs as it is."""

from __future__ import annotations

import sys

import torch
from torch import nn


class Network(nn.Module):
    """Convolutions and linear layers, some of them of odd sizes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.widen = nn.Linear(width, 16 * width)
        self.odd = nn.Linear(16 * width, 16 * width - 1)
        self.head = nn.Linear(16 * width - 1, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.body(torch.relu(self.stem(x))))
        return self.head(torch.relu(self.odd(torch.relu(self.widen(x.mean((2, 3)))))))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    """A step in BF16."""
    count, side = (256, 32) if device == "cuda" else (4, 8)
    x = torch.randn(count, 3, side, side, device=device)
    y = torch.randint(10, (count,), device=device)
    optimizer.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


def main(device: str) -> None:
    """Some steps."""
    model = Network(64 if device == "cuda" else 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        train_step(model, optimizer, device)


if __name__ == "__main__":
    main(sys.argv[1])
