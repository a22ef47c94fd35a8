"""Sharded, and in half precision of several kinds; ``fp32`` as the second word: the same without it.

The first word is fsdp2, fsdp2-weights, fsdp2-cast, fsdp1 or ddp-hook. With a third one, a folder, it is
recorded by ``record_loop``.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from script_end import report
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)

BF16 = torch.bfloat16


def made(kind, half):
    """The model as it is wrapped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    if kind == "ddp-hook":
        wrapped = nn.parallel.DistributedDataParallel(model)
        if half:
            wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped
    if kind == "fsdp1":
        policy = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
        return FullyShardedDataParallel(
            model, mixed_precision=policy if half else None, device_id=torch.device("cpu")
        )
    if kind == "fsdp2-weights":
        for p in model.parameters():
            p.data = p.data.to(BF16) if half else p.data.to(BF16).float()
    if kind == "fsdp2-cast":
        model.bfloat16()
    policy = MixedPrecisionPolicy(BF16, BF16) if half and kind == "fsdp2" else None
    options = {"mesh": dist.init_device_mesh("cpu", (dist.get_world_size(),))}
    options |= {} if policy is None else {"mp_policy": policy}
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def recording(model, optimizer, folder):
    from mpdiag.integrations.loop import record_loop

    series = Path(folder) / "series.jsonl"
    return record_loop([model], optimizer, folder, every=1, report_to=series)


def main(kind, how="half", folder=None):
    dist.init_process_group("gloo")
    part, parts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    half = how == "half"
    model = made(kind, half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watched = recording(model, optimizer, folder) if folder else nullcontext()
    torch.manual_seed(1)
    with watched:
        for _ in range(8):
            x = torch.randn(32, 8)
            x = x.to(BF16).float() if kind == "fsdp2-weights" else x
            x = x.to(BF16) if half and kind in ("fsdp2-weights", "fsdp2-cast") else x
            y = x[:, :2].float().prod(1, keepdim=True)
            loss = nn.functional.mse_loss(model(x[part::parts]).float(), y[part::parts])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report(model, loss.item(), part)
    # A model that outlives its group takes the group's threads along when it goes, which may hang.
    del model, optimizer, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
