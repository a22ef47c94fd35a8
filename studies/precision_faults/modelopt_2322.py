"""FP32 master weights are lost when a training resumes: norm weights stop where they are.

Thread: NVIDIA/Model-Optimizer#2322 (the resumed model is built by another path, with the
checkpoint's BF16).
Stand-ins: two layers for the draft, a state in memory for the checkpoint.
"""

import torch
from shared import BF16, batches, block, loss_of, main

RANKS = 1
CAUSE = "after the resume the weights are BF16 without FP32 masters"
CONSEQUENCE = "the norm's weights do not move"


def resumed(checkpoint: dict[str, torch.Tensor], calls_modify: bool) -> torch.nn.Module:
    model = block().to(BF16)
    model.load_state_dict(checkpoint)
    return model.float() if calls_modify else model


def train(calls_modify: bool) -> None:
    checkpoint = {name: value.to(BF16) for name, value in block().state_dict().items()}
    model = resumed(checkpoint, calls_modify)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for x in batches():
        with torch.autocast("cpu", BF16):
            loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
