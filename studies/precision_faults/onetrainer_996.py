"""Weight decay multiplies BF16 weights before the stochastically rounded update: it has no effect.

Thread: Nerogar/OneTrainer#996 (Adam and AdamW; Adafactor there decays in FP32 and rounds once).
Stand-ins: an AdamW of our own with FP32 moments; the noise of the rounding has its own generator.
"""

import torch
from shared import BF16, batches, block, loss_of, main

RANKS = 1
CAUSE = "weight decay is applied to BF16 weights in BF16"
CONSEQUENCE = "it has exactly no effect at this learning rate"


def round_stochastically(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """BF16 of FP32, up or down in proportion to the distance."""
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, generator=generator)
    return ((value.view(torch.int32) + noise) & -65536).view(torch.float32).to(BF16)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW over BF16 weights with FP32 moments and a stochastically rounded update."""

    def __init__(self, parameters, lr, betas, weight_decay, decays_in_fp32):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.decays_in_fp32 = decays_in_fp32
        self.generator = torch.Generator().manual_seed(2)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            decay = 1 - lr * group["weight_decay"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                g = p.grad.float()
                state["exp_avg"].lerp_(g, 1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                if not self.decays_in_fp32:
                    p.mul_(decay)
                value = p.float() * (decay if self.decays_in_fp32 else 1.0)
                mean = state["exp_avg"] / (1 - b1 ** state["step"])
                square = state["exp_avg_sq"] / (1 - b2 ** state["step"])
                value.addcdiv_(mean, square.sqrt() + 1e-8, value=-lr)
                p.copy_(round_stochastically(value, self.generator))


def train(decays_in_fp32: bool) -> None:
    model = block().to(BF16)
    optimizer = StochasticAdamW(model.parameters(), 1e-3, (0.9, 0.999), 0.01, decays_in_fp32)
    for x in batches():
        loss_of(model, x.to(BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
