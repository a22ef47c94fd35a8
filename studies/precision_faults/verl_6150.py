"""The forward pass enters a BF16 autocast, whatever precision was configured for FSDP.

Threads: verl-project/verl#5932, repaired in #6150.
Stand-ins: FSDP2 on 2 gloo ranks for verl's engine, two layers for the language model.
"""

import contextlib

import torch
from shared import BF16, FP32, batches, block, loss_of, main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 2
CAUSE = "autocast computes in BF16, though the policy says FP32"
CONSEQUENCE = "the products of the layers are BF16"


def train(autocast_dtype: torch.dtype) -> None:
    model = block()
    policy = MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in batches():
        autocast = contextlib.nullcontext()
        if autocast_dtype != FP32:
            autocast = torch.autocast("cpu", autocast_dtype)
        with autocast:
            loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(BF16)


def twin() -> None:
    train(FP32)


if __name__ == "__main__":
    main(fault, twin, RANKS)
