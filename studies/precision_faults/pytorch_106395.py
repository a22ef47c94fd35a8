"""Gradients are added over ranks in BF16: stable on 96 GPUs, unstable on 384.

Thread: pytorch/pytorch#106395 (``reduce_dtype=None`` repaired it; autocast computes in BF16).
Stand-ins: FSDP1 on 2 gloo ranks, two layers.
"""

import torch
from shared import BF16, batches, block, loss_of, main
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

RANKS = 2
CAUSE = "gradients are added over ranks in BF16"
CONSEQUENCE = "how far the sum can be from FP32's, and how that grows with ranks"


def train(reduce_dtype: torch.dtype | None) -> None:
    model = FullyShardedDataParallel(
        block(),
        mixed_precision=MixedPrecision(reduce_dtype=reduce_dtype),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in batches():
        with torch.autocast("cpu", BF16):
            loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(BF16)


def twin() -> None:
    train(None)


if __name__ == "__main__":
    main(fault, twin, RANKS)
