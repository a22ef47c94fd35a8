"""Muon without a ZeRO stage runs no Newton-Schulz iteration: it is SGD, and only the loss is worse.

Threads: deepspeedai/DeepSpeed#8441, repaired in #8442.
Stand-ins: DeepSpeed's ``MuonWithAuxAdam`` by its formulas, without an engine; FP32 throughout.
"""

import torch
from shared import batches, block, loss_of, main

RANKS = 1
CAUSE = "Muon's step() runs no matrix product"
CONSEQUENCE = "the update is the gradient times the learning rate: SGD"


def newton_schulz(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class MuonWithAuxAdam(torch.optim.Optimizer):
    """Muon for matrices, Adam for the rest; it takes orthogonalized gradients for granted."""

    def __init__(self, groups, orthogonalizes):
        super().__init__(groups, {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0})
        self.orthogonalizes = orthogonalizes

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if group["use_muon"]:
                    self._muon(group, p)
                else:
                    self._adam(group, p)

    def _muon(self, group, p):
        update = p.grad
        if self.orthogonalizes:
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - group["momentum"])
            update = newton_schulz(p.grad.lerp(buffer, group["momentum"]))
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _adam(self, group, p):
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 0.1)
        state["exp_avg_sq"].lerp_(p.grad.square(), 0.05)
        root = (state["exp_avg_sq"] / (1 - 0.95 ** state["step"])).sqrt() + 1e-8
        p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - 0.9 ** state["step"]))


def train(orthogonalizes: bool) -> None:
    model = block()
    muon = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": muon, "use_muon": True},
        {"params": rest, "use_muon": False, "lr": 1e-3},
    ]
    optimizer = MuonWithAuxAdam(groups, orthogonalizes)
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
