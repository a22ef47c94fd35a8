"""Under a BF16 default dtype Adam's step counter is BF16 and stops at 256.

Thread: pytorch/ao#4915 (``torch.tensor(0.0)`` takes the default dtype; the repair names FP32).
Stand-ins: the formulas of torchao's ``_AdamW`` for the package; its moments stay FP32 here.
"""

import torch
from shared import BF16, FP32, batches, block, loss_of, main

RANKS = 1
STEPS = 300
EVERY = 20
CAUSE = "the step counter is BF16"
CONSEQUENCE = "it stops at 256, and the bias correction with it"


class AdamW(torch.optim.Optimizer):
    """AdamW whose counter has the default dtype, or FP32."""

    def __init__(self, parameters, lr, betas, counter):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self.counter = counter

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0, dtype=self.counter)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - b1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - b2)
                step = float(state["step"])
                root = (state["exp_avg_sq"] / (1 - b2**step)).sqrt() + 1e-8
                p.addcdiv_(state["exp_avg"], root, value=-lr / (1 - b1**step))


def train(counter: torch.dtype | None) -> None:
    model = block(width=8)
    torch.set_default_dtype(BF16)
    optimizer = AdamW(model.parameters(), 1e-3, (0.9, 0.999), counter)
    for x in batches(STEPS, size=8):
        loss_of(model, x.float()).backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(None)


def twin() -> None:
    train(FP32)


if __name__ == "__main__":
    main(fault, twin, RANKS)
