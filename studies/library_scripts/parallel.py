"""A small model under torch's wrappers, in BF16 where the wrapper can: ``parallel.py KIND``.

Kinds: ddp, ddp-hook, fsdp1, fsdp2, hsdp (2×2), tp, tp-fsdp2 (2×2, or 2×1 on two ranks).
"""

import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

BF16 = torch.bfloat16


class Block(nn.Module):
    """A residual block of a transformer's feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def wrapped(kind: str, model: nn.Sequential) -> nn.Module:
    """The model as it is called under a wrapper."""
    ranks = dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "ddp-hook":
        whole = DistributedDataParallel(model)
        whole.register_comm_hook(None, fp16_compress_hook)
        return whole
    if kind == "fsdp1":
        narrow = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16)
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(
            model, mixed_precision=narrow, use_orig_params=True, device_id=cpu
        )
    if kind in ("tp", "tp-fsdp2"):
        sizes = (ranks,) if kind == "tp" else (ranks // 2, 2)
        names = ("tp",) if kind == "tp" else ("dp", "tp")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in (model.first, model.second):
            parallelize_module(block, mesh["tp"], plan)
        if kind == "tp":
            return model
        mesh = mesh["dp"]
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for block in (model.first, model.second):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main(kind: str) -> None:
    """Train for six steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    parts = OrderedDict(first=Block(), second=Block(), head=nn.Linear(16, 4))
    model = nn.Sequential(parts)
    called = wrapped(kind, model)
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-3, foreach=kind != "tp")
    torch.manual_seed(1 if kind == "tp" else 1 + dist.get_rank())
    for _ in range(6):
        loss = called(torch.randn(8, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
