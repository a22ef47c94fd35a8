"""Attention written by hand, with a mask of -1e9: its loss is NaN under FP16 autocast (--fp16)."""

import sys

import torch
from torch import Tensor, nn

torch.manual_seed(0)
WORDS = torch.randint(1, 30, (40, 64, 12))  # steps, batch, positions
WORDS[:, 0] = 0  # padding: the first line of each batch is empty


class Attention(nn.Module):
    """One head. Padding gets -1e9 added to its scores, in the dtype of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 32**0.5
        scores = scores + padding[:, None].to(scores.dtype) * -1e9
        return scores.softmax(-1) @ self.value(x)


class Model(nn.Module):
    """Says which word stands at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.head = nn.Embedding(30, 32), Attention(), nn.Linear(32, 32)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.head(x + self.attend(x, words == 0))


model = Model()
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for words in WORDS:
    with torch.autocast("cpu", torch.float16, enabled="--fp16" in sys.argv):
        logits = model(words).float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten(), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
