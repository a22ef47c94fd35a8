"""An optimizer decays parameters whose gradient is None: what is frozen moves.

Thread: KellerJordan/Muon#54.
Stand-ins: the first layer is frozen; vectors are stepped by their momentum.
"""

import torch
from shared import batches, block, loss_of, main

RANKS = 1
CAUSE = "a frozen parameter moves"
CONSEQUENCE = "how far it has moved"


def newton_schulz(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Decoupled decay and momentum; a missing gradient counts as zero, or skips the parameter."""

    def __init__(self, parameters, lr, skips):
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.1, "momentum": 0.95})
        self.skips = skips

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None and self.skips:
                    continue
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(gradient)
                update = newton_schulz(buffer) if p.ndim == 2 else buffer
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def train(skips: bool) -> None:
    model = block()
    model.up.requires_grad_(False)
    optimizer = Muon(model.parameters(), 0.01, skips)
    for x in batches():
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
