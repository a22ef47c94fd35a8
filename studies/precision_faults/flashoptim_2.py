"""A fused step rounds its FP32 states to the parameters' BF16 before it stores them.

Thread: databricks/flashoptim#2 (``quantize=False`` with ``fused=True``).
Stand-ins: a plain step for the Triton kernel; FP32 masters for flashoptim's split weights.
"""

import torch
from shared import BF16, batches, block, loss_of, main

RANKS = 1
CAUSE = "the states are FP32, but step() rounds them to BF16"
CONSEQUENCE = "exp_avg_sq holds only BF16 values and cannot fall"


class FlashAdam(torch.optim.Optimizer):
    """Adam with FP32 masters and states, which a step may round on the way."""

    def __init__(self, parameters, lr, betas, through):
        super().__init__(parameters, {"lr": lr, "betas": betas})
        self.through = through

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["master"] = p.float()
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                g = p.grad.float()
                mean = state["exp_avg"] * b1 + g * (1 - b1)
                square = state["exp_avg_sq"] * b2 + g * g * (1 - b2)
                state["exp_avg"].copy_(mean.to(self.through))
                state["exp_avg_sq"].copy_(square.to(self.through))
                root = (square / (1 - b2 ** state["step"])).sqrt() + 1e-8
                state["master"].addcdiv_(mean, root, value=-lr / (1 - b1 ** state["step"]))
                p.copy_(state["master"])


def train(through: torch.dtype) -> None:
    model = block().to(BF16)
    optimizer = FlashAdam(model.parameters(), 1e-3, (0.9, 0.999), through)
    for x in batches():
        loss_of(model, x.to(BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(BF16)


def twin() -> None:
    train(torch.float32)


if __name__ == "__main__":
    main(fault, twin, RANKS)
