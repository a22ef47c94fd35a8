"""DistributedDataParallel: two processes on a CPU, one run folder. `python examples/ddp.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpdiag


def build():
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def batches(rank):
    torch.manual_seed(100 + rank)
    for _ in range(30):
        x = torch.randn(32, 8)
        yield x, x[:, :2].prod(1, keepdim=True)


def recommend_then_train(rank: int) -> None:
    model, optimizer = build()
    with mpdiag.record(model, optimizer, "runs/ddp"):  # each rank writes files of its own
        for x, y in batches(rank):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.barrier()

    plan = mpdiag.analyze("runs/ddp").plan
    model, optimizer = build()
    with mpdiag.MixedPrecision(model, optimizer, plan, run="runs/ddp-fp16") as mp:
        for x, y in batches(rank):
            with mp.autocast():
                loss = nn.functional.mse_loss(model(x), y)
            mp.step(loss)  # ranks agree on skipping it or not
    dist.barrier()
    if rank == 0:
        print("loss scale:", plan.loss_scale.reason)
        print(mpdiag.compare("runs/ddp", "runs/ddp-fp16", margin=0.1))


def main(rank: int, ranks: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    recommend_then_train(rank)  # its models end before their process group, which may else hang
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.multiprocessing.spawn(main, (2,), nprocs=2)
