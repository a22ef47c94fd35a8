"""A forward pass between ``fully_shard`` and the optimizer: the optimizer holds gathered parameters.

Thread: pytorch/pytorch#149205 (the repair: make the optimizer before the first forward pass).
Stand-ins: 2 gloo ranks, two layers.
"""

import torch
from shared import batches, block, loss_of, main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2
CAUSE = "no optimizer holds the parameters that get gradients"
CONSEQUENCE = "they do not train"


def train(used_first: bool) -> None:
    model = block()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    if used_first:
        model(torch.ones(1, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


def fault() -> None:
    train(True)


def twin() -> None:
    train(False)


if __name__ == "__main__":
    main(fault, twin, RANKS)
