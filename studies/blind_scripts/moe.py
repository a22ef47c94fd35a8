"""A mixture of experts: top-2 routing with a capacity and a balance loss, over a small MLP trunk."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class MoE(nn.Module):
    def __init__(self, dim, experts=4, top=2, factor=1.0):
        super().__init__()
        self.top, self.factor = top, factor
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, 2 * dim) for _ in range(experts))

    def forward(self, x):
        n, count = x.shape[0], len(self.experts)
        with torch.autocast("cpu", enabled=False):
            scores = self.router(x.float()).softmax(-1)
        gate, chosen = scores.topk(self.top, dim=-1)
        gate = gate / gate.sum(-1, keepdim=True)
        capacity = math.ceil(self.factor * self.top * n / count)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            token, slot = token[:capacity], slot[:capacity]
            y = expert(x[token]) * gate[token, slot][:, None]
            out = out.index_add(0, token, y.to(out.dtype))
        share = F.one_hot(chosen[:, 0], count).float().mean(0)
        return out, count * (share * scores.mean(0)).sum()


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)
        self.moe = MoE(dim)

    def forward(self, x):
        x = x + torch.tanh(self.mix(x))
        y, balance = self.moe(self.norm(x))
        return x + y, balance


class Net(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.inner = nn.Linear(12, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(2))
        self.out = nn.Linear(dim, 5)

    def forward(self, x):
        x, total = self.inner(x), 0.0
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.out(x), total


def data(g):
    x = torch.randn(64, 12, generator=g)
    return x, x[:, :5].argmax(-1)


model = Net()
model = prepare(model, model.layers)
experts = [p for n, p in model.named_parameters() if ".experts." in n]
trunk = [p for n, p in model.named_parameters() if ".experts." not in n]
optimizer = torch.optim.Adam(
    [{"params": trunk, "lr": 2e-3}, {"params": experts, "lr": 4e-3}], betas=(0.9, 0.98)
)
for parts in batches(data):
    for x, y in parts:
        with autocast():
            logits, balance = model(x)
            loss = F.cross_entropy(logits, y) + 0.05 * balance
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
finish()
