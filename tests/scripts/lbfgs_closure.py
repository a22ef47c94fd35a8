"""LBFGS with a closure that it evaluates many times, on a classifier of three overlapping clouds."""

import torch
from script_end import report, seed
from torch import nn

torch.manual_seed(seed())
labels = torch.arange(300) % 3
x = torch.randn(300, 4) + 1.5 * nn.functional.one_hot(labels, 4)
net = nn.Linear(4, 3)
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), labels)
    loss = loss + 1e-3 * net.weight.square().sum()
    loss.backward()
    return loss


for _ in range(6):
    value = optimizer.step(closure)
    assert torch.is_tensor(value)

report(net, closure().item())
