"""DistributedDataParallel in processes that the script spawns itself."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from script_end import report, seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def worker(rank, seed, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(seed)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 * seed + rank)
    for _ in range(30):
        x = torch.randn(32, 6)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) + 0.1 * torch.randn(32, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    report(model, (model.module.weight - 1).norm().item(), rank)
    # A model that outlives its group takes the group's threads along when it goes, which may hang.
    del model, optimizer, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    mp.spawn(worker, (seed(), free), nprocs=2)
