"""An optimizer decays parameters whose gradient is None: what is frozen moves.

Thread: KellerJordan/Muon#54.
Stand-ins: the update is the momentum without Newton-Schulz; one layer is frozen.
"""

import torch
from shared import batches, block, loss_of, main

RANKS = 1
CAUSE = "a frozen parameter moves"
CONSEQUENCE = "how far it has moved"


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
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(buffer, alpha=-group["lr"])


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
