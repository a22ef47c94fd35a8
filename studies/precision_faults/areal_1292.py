"""AdamW over BF16 parameters keeps its moments in BF16 under FSDP2's policy: thrice the final loss.

Thread: areal-project/AReaL#1292, repaired in #1369 (parameters in FP32, the policy computes in BF16).
Stand-ins: two layers for Qwen3-8B, 2 gloo ranks for 8.
"""

import torch
from shared import BF16, FP32, batches, block, loss_of, main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 2
EVERY = 20
CAUSE = "AdamW's exp_avg and exp_avg_sq are BF16, and there are no FP32 masters"
CONSEQUENCE = "the second moment cannot fall; how far it is from FP32's"


def train(dtype: torch.dtype) -> None:
    model = block().to(dtype)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (RANKS,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for x in batches(120):  # of fewer the second moment says nothing
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(BF16)


def twin() -> None:
    train(FP32)


if __name__ == "__main__":
    main(fault, twin, RANKS)
