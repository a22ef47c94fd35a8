"""A router casts its probabilities to BF16 before it chooses experts: near ones tie.

Thread: ViperEkura/AstrAI#57 (probabilities stay FP32 through ``topk``).
Stand-ins: 8 experts of one layer each, 512 tokens; an AdamW with FP32 masters.
"""

import torch
from shared import BF16, MasterAdamW, batches, main
from torch import nn

RANKS = 1
EXPERTS, CHOSEN = 8, 2
CAUSE = "the router's probabilities are BF16 where topk chooses"
CONSEQUENCE = "how many tokens tie, or go to another expert than in FP32"


class MoE(nn.Module):
    """A router and its experts."""

    def __init__(self, casts_first: bool) -> None:
        super().__init__()
        self.casts_first = casts_first
        self.router = nn.Linear(16, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.router(x).float(), -1)
        if self.casts_first:
            scores = scores.to(x.dtype)
        weights, chosen = scores.topk(CHOSEN, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


def train(casts_first: bool) -> None:
    torch.manual_seed(0)
    model = MoE(casts_first).to(BF16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    for x in batches(6, size=512):
        (model(x.to(BF16)).float() - x.square()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(True)


def twin() -> None:
    train(False)


if __name__ == "__main__":
    main(fault, twin, RANKS)
