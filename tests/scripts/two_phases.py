"""Fine-tuning in two phases: first a head on frozen features, then all with another optimizer."""

import torch
from script_end import report, seed
from torch import nn

torch.manual_seed(seed())
x = torch.randn(256, 8)
y = x[:, :2].prod(1, keepdim=True)
model = nn.ModuleDict(
    {"body": nn.Sequential(nn.Linear(8, 32), nn.ReLU()), "head": nn.Linear(32, 1)}
)


def train(optimizer, steps):
    for _ in range(steps):
        rows = torch.randint(0, 256, (64,))
        loss = nn.functional.mse_loss(model["head"](model["body"](x[rows])), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


model["body"].requires_grad_(False)
train(torch.optim.SGD(model["head"].parameters(), lr=0.05), 20)
model["body"].requires_grad_(True)
train(torch.optim.Adam(model.parameters(), lr=5e-3), 60)

with torch.no_grad():
    metric = nn.functional.mse_loss(model["head"](model["body"](x)), y).item()
report(model, metric)
