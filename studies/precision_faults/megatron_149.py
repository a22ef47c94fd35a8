"""Gradients of micro-batches add up in BF16 and become FP32 only when they are reduced.

Thread: ISEEKYAN/Megatron-LM#149 (grad_norm 3.5e-5 off), repaired in #146 (FP32 ``main_grad``).
Stand-ins: one process for the reduce-scatter, an AdamW with FP32 masters for the distributed optimizer.
"""

import torch
from shared import BF16, MasterAdamW, batches, block, loss_of, main

RANKS = 1
MICRO = 8
CAUSE = "gradients add up in BF16 over micro-batches"
CONSEQUENCE = "how far the sum is from FP32's"


def train(main_grad: bool) -> None:
    model = block().to(BF16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    data = batches(4 * MICRO)
    for _ in range(4):
        for _ in range(MICRO):
            loss_of(model, next(data).to(BF16)).backward()
            if main_grad:
                for p in model.parameters():
                    p.main_grad = getattr(p, "main_grad", torch.zeros(p.shape)) + p.grad.float()
                    p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            if main_grad:
                p.main_grad.zero_()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
