"""With one shard nothing is wrapped, so the mixed precision that was asked for is FP32.

Thread: pytorch/torchtitan#2886 (``fully_shard`` is skipped for ``dp_shard=1``).
Stand-ins: two layers for Llama 3; the twin wraps on a mesh of one gloo process, as the thread proposes.
"""

import torch
import torch.distributed as dist
from shared import BF16, FP32, batches, block, loss_of, main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 1
CAUSE = "a MixedPrecisionPolicy of BF16 was made, and nothing was wrapped with it"
CONSEQUENCE = "everything computes in FP32"


def parallelize(model: torch.nn.Module, dp_shard: int, always: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    if dp_shard > 1 or always:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)


def train(always: bool) -> None:
    model = block()
    parallelize(model, dp_shard=1, always=always)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in batches():
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
