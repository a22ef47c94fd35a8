"""Gradients of four micro-batches add up to one step; the Transformer is called in two parts."""

import torch
from script_end import report, seed
from torch import nn

torch.manual_seed(seed())
PARTS = 4


class Sorter(nn.Module):
    """Says for each of eight digits whether it is larger than the first."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def encode(self, digits):
        return self.encoder(self.embedding(digits))


model = Sorter()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
norms, losses = [], []
for step in range(240):
    digits = torch.randint(0, 10, (16, 8))
    larger = (digits > digits[:, :1]).long()
    logits = model.head(model.encode(digits))  # the model itself is never called
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), larger.flatten())
    (loss / PARTS).backward()
    losses.append(loss.item())
    if (step + 1) % PARTS == 0:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()

assert max(norms) < 20, "these are no true gradients"
report(model, sum(losses[-40:]) / 40)
