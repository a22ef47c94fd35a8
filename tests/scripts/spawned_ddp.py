"""DistributedDataParallel in processes that the script spawns itself."""

import os
import socket

import torch.distributed as dist
import torch.multiprocessing as mp
from ddp import train
from script_end import seed


def worker(rank, seed, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    train(seed)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    mp.spawn(worker, (seed(), free), nprocs=2)
