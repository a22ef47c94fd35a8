"""Gradients are clipped while they are still multiplied by the loss scale.

Threads: milesial/Pytorch-UNet#468, repaired in #470; the same in harubaru/waifu-diffusion#64.
Stand-ins: two layers for a U-Net; FP16 autocast and a GradScaler on a CPU.
"""

import torch
from shared import FP16, batches, block, loss_of, main

RANKS = 1
CAUSE = "clip_grad_norm_ runs before the scaler's unscale_"
CONSEQUENCE = "gradients are smaller than the limit by the loss scale"


def train(unscales: bool) -> None:
    model = block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x in batches():
        with torch.autocast("cpu", FP16):
            loss = loss_of(model, x)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
