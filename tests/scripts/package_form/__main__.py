"""Its script, with an import relative to the package, and an exit code of its own."""

import hashlib
import sys

import torch

from .model import build

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
net = build()
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
for _ in range(60):
    x = torch.rand(64, 4)
    loss = (net(x) - x.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
digest = hashlib.sha256()
for parameter in net.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print("digest", digest.hexdigest(), "metric", loss.item())
sys.exit(5)
