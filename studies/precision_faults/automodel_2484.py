"""``A_log`` and ``dt_bias`` of a gated delta net are cast to BF16 with the rest of the model.

Thread: NVIDIA-NeMo/Automodel#2484 (both stay FP32; FP32 masters alone are not enough).
Stand-ins: a gated recurrence of 64 steps for GatedDeltaNet, an AdamW with FP32 masters for TE's.
"""

import torch
from shared import BF16, MasterAdamW, batches, main
from torch import nn
from torch.nn import functional

RANKS = 1
CAUSE = "A_log and dt_bias are BF16"
CONSEQUENCE = "how far the decay that they give is from FP32's"


class GatedDeltaNet(nn.Module):
    """A state that decays by ``exp(-exp(A_log) softplus(a + dt_bias))`` in each of 64 steps."""

    def __init__(self, heads: int = 16) -> None:
        super().__init__()
        self.in_proj = nn.Linear(16, heads)
        self.gate_proj = nn.Linear(16, heads)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.linspace(-7.0, -2.0, heads))
        self.out_proj = nn.Linear(heads, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = -self.A_log.exp() * functional.softplus(self.gate_proj(x) + self.dt_bias)
        decay, value = gate.exp(), self.in_proj(x)
        state = torch.zeros_like(value)
        for _ in range(64):
            state = decay * state + value
        return self.out_proj(state.to(x.dtype))


def train(keeps_fp32: bool) -> None:
    torch.manual_seed(0)
    model = GatedDeltaNet()
    kept = {"A_log", "dt_bias"} if keeps_fp32 else set()
    for name, p in model.named_parameters():
        if name not in kept:
            p.data = p.data.to(BF16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    for x in batches(6):
        (model(x.to(BF16)).float() - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
