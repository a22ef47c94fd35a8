"""Experts and a compiled optimizer step, in the shape of ``compiling_optimizer.rst`` of pytorch/tutorials."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()
torch.manual_seed(args.seed)


class GroupedExperts(nn.Module):
    def __init__(self, n, experts):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, n, 2 * n) / n**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * n, n) / (2 * n) ** 0.5)

    def forward(self, x):
        return torch.bmm(F.silu(torch.bmm(x, self.w1)), self.w2)


class MoE(nn.Module):
    def __init__(self, n=32, experts=4):
        super().__init__()
        self.norm, self.router, self.experts = (
            nn.LayerNorm(n),
            nn.Linear(n, experts),
            GroupedExperts(n, experts),
        )

    def forward(self, x):
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(2, -1)
        gates = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights)
        y = self.experts(h.flatten(0, -2).expand(4, -1, -1)).unflatten(1, x.shape[:-1])
        return x + torch.einsum("ebtn,bte->btn", y, gates)


model = nn.Sequential(nn.Embedding(64, 32), nn.GRU(32, 32, batch_first=True))
head = nn.Sequential(MoE(), MoE(), nn.Linear(32, 64))
compiled_head = torch.compile(head, fullgraph=True)
opt = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=torch.tensor(0.01))
sched = torch.optim.lr_scheduler.LinearLR(opt, total_iters=20)


@torch.compile(fullgraph=False)
def fn():
    opt.step()
    sched.step()


for _ in range(50):
    tokens = (torch.randint(64, (8, 1)) + torch.randint(1, 4, (8, 1)) * torch.arange(17)) % 64
    loss = F.cross_entropy(
        compiled_head(model(tokens[:, :-1])[0]).flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    fn()
    opt.zero_grad()
if args.save:
    torch.save([model.state_dict(), head.state_dict()], args.save)
print(f"loss: {loss.item():.6f}")
