"""Fully sharded (FSDP2) under torchrun; alone without it. Each rank takes its part of the batch."""

import os

import torch
import torch.distributed as dist
from script_end import error_of, report, seed
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(8, 15)  # an odd size: one rank holds a row more than the other
        self.blocks = nn.ModuleList([Block(15), Block(15)])
        self.head = nn.Linear(15, 1)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(seed):
    parts = int(os.environ.get("WORLD_SIZE", "1"))
    part = int(os.environ.get("RANK", "0"))
    torch.manual_seed(seed)
    model = Net()
    if parts > 1:
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (parts,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    torch.manual_seed(100 * seed)
    for _ in range(30):
        x = torch.randn(32, 8)
        y = x[:, :2].prod(1, keepdim=True)
        loss = nn.functional.mse_loss(model(x[part::parts]), y[part::parts])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    report(model, error_of(model), part)
    if parts > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(seed())
