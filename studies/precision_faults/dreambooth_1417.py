"""The moving average of the weights is kept in BF16: nearly all of its updates round to nothing.

Threads: d8ahazard/sd_dreambooth_extension#1415, #1417 (the average is FP32).
Stand-ins: two layers for a U-Net; the trained weights have FP32 masters, so that only the average errs.
"""

import copy

import torch
from shared import BF16, FP32, MasterAdamW, batches, block, loss_of, main

RANKS = 1
CAUSE = "the averaged copy of the model is BF16"
CONSEQUENCE = "the averaged weights do not move"


def train(average_dtype: torch.dtype) -> None:
    model = block().to(BF16)
    average = copy.deepcopy(model).to(average_dtype).requires_grad_(False)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    for x in batches():
        loss_of(model, x.to(BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.sub_(0.001 * (mean - p.to(mean.dtype)))


def fault() -> None:
    train(BF16)


def twin() -> None:
    train(FP32)


if __name__ == "__main__":
    main(fault, twin, RANKS)
