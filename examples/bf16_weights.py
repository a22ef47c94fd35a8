"""All in BF16: weights, gradients and Adam's states, as a checkpoint in BF16 is often fine-tuned."""

import sys

import torch
from torch import nn

STEPS = 500
torch.manual_seed(0)
teacher = nn.Linear(16, 4)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
if "--fp32" not in sys.argv:
    model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(STEPS):
    x = torch.randn(64, 16)
    loss = nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), teacher(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
