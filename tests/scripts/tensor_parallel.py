"""Tensor parallel under torchrun (DTensor parameters), of four ranks under FSDP2; alone without it."""

import os

import torch
import torch.distributed as dist
from script_end import error_of, report, seed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def main(seed):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(seed)
    model = Net()
    if ranks > 1:
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(
            model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        if ranks > 2:
            fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    torch.manual_seed(100 * seed)
    for _ in range(30):
        x = torch.randn(32, 8)  # every rank sees the whole batch
        loss = nn.functional.mse_loss(model(x), x[:, :2].prod(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    report(model, error_of(model), int(os.environ.get("RANK", "0")))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(seed())
