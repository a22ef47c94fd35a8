"""In a BF16 training every norm weight stays exactly 1.0: its updates are below half a step of BF16.

Threads: vllm-project/speculators#668, #765 (parameters in FP32, computed in BF16), #711 (figures).
Stand-ins: two layers for a draft model, one process, autocast for FSDP2's policy in the twin.
"""

import torch
from shared import BF16, batches, block, loss_of, main

RANKS = 1
CAUSE = "the norm's weights are BF16 without FP32 masters"
CONSEQUENCE = "none of the norm's weights moves"


def fault() -> None:
    model = block().to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    for x in batches():
        loss_of(model, x.to(BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()


def twin() -> None:
    model = block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    for x in batches():
        with torch.autocast("cpu", BF16):
            loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(fault, twin, RANKS)
