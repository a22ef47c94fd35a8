"""Embedding and head were tied and are two parameters after materialization: they part.

Thread: NVIDIA-NeMo/Automodel#2213 (the repair calls ``tie_weights`` again); verl#7834 is its relative.
Stand-ins: ``to_empty`` on one process for FSDP2's replacement, a state in memory for the checkpoint.
"""

import torch
from shared import main
from torch import nn

RANKS = 1
WORDS, WIDTH = 32, 16
CAUSE = "embed and head, tied before, are two parameters"
CONSEQUENCE = "equal at the first step, they differ afterwards"


class LanguageModel(nn.Module):
    """Predicts the next of WORDS words from one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(words))))


def train(ties: bool) -> None:
    torch.manual_seed(0)
    checkpoint = LanguageModel().state_dict()
    with torch.device("meta"):
        model = LanguageModel()
    model.to_empty(device="cpu")
    if ties:
        model.tie_weights()
    model.load_state_dict(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        words = torch.randint(0, WORDS, (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(words), (3 * words + 1) % WORDS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fault() -> None:
    train(False)


def twin() -> None:
    train(True)


if __name__ == "__main__":
    main(fault, twin, RANKS)
