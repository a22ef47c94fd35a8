"""``A`` is drawn in BF16, where some draws are 0: ``A_log`` is -inf, and those heads never learn.

Threads: huggingface/transformers#47831, repaired in #47944 (``A`` is drawn in FP32).
Stand-ins: 960 heads in one layer, as many as the 30 layers of the thread have; FP32 masters.
"""

import torch
from shared import BF16, FP32, MasterAdamW, batches, main
from torch import nn
from torch.nn import functional

RANKS = 1
HEADS = 960
CAUSE = "A_log holds -inf from the start"
CONSEQUENCE = "those elements have no gradient and never move"


class GatedDeltaNet(nn.Module):
    """A state that decays by ``exp(-exp(A_log) softplus(a + dt_bias))`` in each of 4 steps."""

    def __init__(self, drawn_in: torch.dtype) -> None:
        super().__init__()
        self.in_proj = nn.Linear(16, HEADS)
        self.gate_proj = nn.Linear(16, HEADS)
        drawn = torch.empty(HEADS, dtype=drawn_in).uniform_(0, 16)
        self.A_log = nn.Parameter(drawn.log())
        self.dt_bias = nn.Parameter(torch.ones(HEADS))
        self.out_proj = nn.Linear(HEADS, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.gate_proj(x).float() + self.dt_bias.float()
        decay, value = (-self.A_log.float().exp() * functional.softplus(a)).exp(), self.in_proj(x)
        state = torch.zeros_like(decay)
        for _ in range(4):
            state = decay * state + value
        return self.out_proj(state.to(x.dtype))


def train(drawn_in: torch.dtype) -> None:
    torch.manual_seed(0)
    model = GatedDeltaNet(drawn_in).to(BF16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for x in batches(6):
        (model(x.to(BF16)).float() - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(BF16)


def twin() -> None:
    train(FP32)


if __name__ == "__main__":
    main(fault, twin, RANKS)
