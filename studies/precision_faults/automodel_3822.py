"""Parameters that tensor-parallel ranks hold as copies start differently and drift apart.

Threads: NVIDIA-NeMo/Automodel#1291, repaired in #3822 (broadcast once, gradients reduced each step).
Stand-ins: a hand-made column-parallel pair of layers on 2 gloo ranks; the norm is the copy.
"""

import torch
import torch.distributed as dist
from shared import loss_of, main, rank
from torch import nn
from torch.distributed.nn.functional import all_reduce

RANKS = 2
CAUSE = "copies of one parameter differ over ranks"
CONSEQUENCE = "how far apart they are"


class Parallel(nn.Module):
    """A norm that every rank has whole, and a pair of layers of which each rank has its half."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16) * 0.1 + 1)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(self.down(torch.relu(self.up(x * self.scale))))


def train(synchronizes: bool) -> None:
    torch.manual_seed(rank())
    model = Parallel()
    if synchronizes:
        dist.broadcast(model.scale.detach(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        loss_of(model, torch.randn(32, 16, generator=generator)).backward()
        if synchronizes:
            dist.all_reduce(model.scale.grad)
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
