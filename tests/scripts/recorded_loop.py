"""FSDP2 in BF16 by its policy; recorded by ``record_loop`` if a second word is given, a folder."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from script_end import report
from sharded import Block
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mpdiag.integrations.loop import record_loop


def main(folder):
    dist.init_process_group("gloo")
    part, parts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 15), Block(15), nn.Linear(15, 1))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"mesh": dist.init_device_mesh("cpu", (parts,)), "mp_policy": policy}
    fully_shard(model[1], **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    watched = nullcontext()
    if folder:
        watched = record_loop(
            [model], optimizer, folder, every=1, report_to=Path(folder) / "series.jsonl"
        )
    torch.manual_seed(1)
    with watched:
        for _ in range(6):
            x = torch.randn(32, 8)[part::parts]
            loss = nn.functional.mse_loss(model(x).float(), x[:, :2].prod(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report(model, loss.item(), part)
    del model, optimizer, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
