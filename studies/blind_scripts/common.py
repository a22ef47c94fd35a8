"""What the scripts share: options, ranks, precision and wrappers."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--amp", choices=("fp32", "bf16", "fp16"), default="fp32")
parser.add_argument("--compile", metavar="BACKEND")
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--steps", type=int, default=2)
args = parser.parse_args()

torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.amp]
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=args.amp == "fp16")


def autocast():
    return torch.autocast("cpu", dtype, enabled=args.amp != "fp32")


def prepare(model, blocks=()):
    """Shards or replicates the model over the ranks, then compiles it."""
    if world > 1 and args.fsdp:
        from torch.distributed.fsdp import fully_shard

        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    elif world > 1:
        model = DistributedDataParallel(model)
    return torch.compile(model, backend=args.compile) if args.compile else model


def batches(make):
    """The batches of each step, this rank's rows of them, in parts for accumulation."""
    for step in range(args.steps):
        batch = make(torch.Generator().manual_seed(1000 + step))
        rows = [tensor[rank::world] for tensor in batch]
        yield list(zip(*(tensor.chunk(args.accum) for tensor in rows), strict=True))


def finish():
    if world > 1:
        dist.destroy_process_group()


__all__ = ["args", "autocast", "batches", "dist", "finish", "nn", "prepare", "rank", "scaler"]
__all__ += ["torch", "world"]
