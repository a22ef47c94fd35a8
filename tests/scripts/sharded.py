"""Parameters in shards under torchrun, whole without it; FSDP2 or tensor parallel, as the word says.

FSDP's ranks take a part of the batch each; under tensor parallelism every rank sees all of it. Of
four ranks or more, FSDP2 shards what tensor parallelism has split.
"""

import os
import sys

import torch
import torch.distributed as dist
from script_end import error_of, report
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main(way):
    parts, part = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    if way == "fsdp":  # an odd size: one rank holds a row more than the other
        model = nn.Sequential(nn.Linear(8, 15), Block(15), Block(15), nn.Linear(15, 1))
    else:
        model = nn.Sequential(Block(8), nn.Linear(8, 1))
    if parts > 1:
        dist.init_process_group("gloo")
        split = 1 if way == "fsdp" else 2
        mesh = dist.init_device_mesh(
            "cpu", (parts // split, split), mesh_dim_names=("data", "tensor")
        )
        if way == "fsdp":
            for block in model[1:3]:
                fully_shard(block, mesh=mesh["data"])
        else:
            tensor = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model[0], mesh["tensor"], tensor)
        if parts > split:
            fully_shard(model, mesh=mesh["data"])
    if way == "fsdp":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    rows = slice(part, None, parts) if way == "fsdp" else slice(None)
    for _ in range(30):
        x = torch.randn(32, 8)
        loss = nn.functional.mse_loss(model(x[rows]), x[rows, :2].prod(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        if way == "fsdp":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    report(model, error_of(model), part)
    if parts > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
