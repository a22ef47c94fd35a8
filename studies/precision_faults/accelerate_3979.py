"""An upcast to FP32 binds a local name and leaves the model in BF16: updates vanish.

Thread: huggingface/accelerate#3979 (``param = param.to(float32)`` in ``fsdp2_prepare_model``).
Stand-ins: plain ``fully_shard`` on 2 gloo ranks for accelerate's plugin, which a CPU run ignores.
"""

import torch
from shared import BF16, FP32, batches, block, loss_of, main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 2
CAUSE = "the weights are BF16 without FP32 masters, though they were to be upcast"
CONSEQUENCE = "updates round to nothing"


def train(upcasts: bool) -> None:
    model = block().to(BF16)
    for param in model.parameters():
        if upcasts:
            param.data = param.data.to(FP32)
        else:
            param = param.to(FP32)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (RANKS,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
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
