"""FP16 autocast without a GradScaler: gradients of bounded loss terms underflow.

Thread: engichang1467/Open-Rig3R#35 (the repair: BF16, which needs no scaler).
Stand-ins: two heads for Rig3R; FP16 is named, since on a CPU autocast's default is BF16.
"""

import torch
from shared import BF16, FP16, batches, block, main
from torch import nn
from torch.nn import functional

RANKS = 1
CAUSE = "autocast computes in FP16, and no loss scale is used"
CONSEQUENCE = "the share of gradients that underflow in FP16"


class TwoHeads(nn.Module):
    """A trunk, points in metres, and rays of which only the direction counts."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = block()
        self.points = nn.Linear(16, 3)
        self.rays = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x)
        return self.points(hidden), self.rays(hidden)


def train(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in batches(size=1024):
        with torch.autocast("cpu", dtype):
            points, rays = model(x)
        cosine = functional.cosine_similarity(rays.float(), x[:, :3])
        loss = (points.float() - 10 * x[:, 3:6]).square().mean() + 1e-3 * (1 - cosine).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(FP16)


def twin() -> None:
    train(BF16)


if __name__ == "__main__":
    main(fault, twin, RANKS)
