"""The gradient norm, by which gradients are clipped, is added over pipeline stages in BF16.

Thread: NVIDIA-NeMo/Automodel#825 (local norms are cast to FP32 before they are reduced).
Stand-ins: 2 gloo ranks with a stage and a loss each, without sends between them.
"""

import torch
import torch.distributed as dist
from shared import BF16, MasterAdamW, batches, block, loss_of, main, rank

RANKS = 2
CAUSE = "the gradient norm is added over ranks in BF16"
CONSEQUENCE = "how far the norm, and with it the clipped gradient, is from FP32's"


def clip(parameters: list[torch.nn.Parameter], in_fp32: bool, most: float = 0.1) -> None:
    gradients = [p.grad for p in parameters]
    norm = torch.nn.utils.get_total_norm(gradients)
    if in_fp32:
        norm = torch.nn.utils.get_total_norm([g.float() for g in gradients])
    norm = norm**2
    dist.all_reduce(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm**0.5)


def train(in_fp32: bool) -> None:
    model = block(seed=rank()).to(BF16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    for x in batches():
        loss_of(model, x.to(BF16)).backward()
        clip(list(model.parameters()), in_fp32)
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
