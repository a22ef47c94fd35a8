"""DistributedDataParallel under torchrun."""

import os

import torch
import torch.distributed as dist
from script_end import error_of, report, seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(seed):
    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 * seed + rank)
    for step in range(60):
        if rank == 1 and step == int(os.environ.get("DIE_AT", "-1")):
            os.kill(os.getpid(), 9)
        x = torch.randn(32, 8)
        loss = nn.functional.mse_loss(model(x), x[:, :2].prod(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    report(model, error_of(model.module), rank)
    # A model that outlives its group takes the group's threads along when it goes, which may hang.
    del model, optimizer, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(seed())
