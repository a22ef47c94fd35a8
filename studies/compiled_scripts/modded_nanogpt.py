"""A compiled model under DDP with a compiled Muon, in the shape of ``train_gpt2.py`` of KellerJordan/modded-nanogpt."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(args.seed)


@torch.compile
def zeropower_via_newtonschulz5(G, steps=5, eps=1e-7):
    X = G / (G.norm() + eps)
    X = X.T if G.size(0) > G.size(1) else X
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buf.mul_(group["momentum"]).add_(p.grad)
                g = zeropower_via_newtonschulz5(p.grad.add(buf, alpha=group["momentum"]))
                p.data.add_(g, alpha=-group["lr"] * max(1, g.size(0) / g.size(1)) ** 0.5)


class Block(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(n, n, bias=False) for _ in range(4))
        self.c_fc, self.c_out = nn.Linear(n, 4 * n, bias=False), nn.Linear(4 * n, n, bias=False)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        h = F.rms_norm(x, (x.size(-1),))
        q, k, v = (f(h).unflatten(-1, (2, -1)) for f in (self.c_q, self.c_k, self.c_v))
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.relu(self.c_fc(F.rms_norm(x, (x.size(-1),)))).square())


class GPT(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.wte, self.h = nn.Embedding(64, n), nn.ModuleList([Block(n) for _ in range(3)])
        self.lm_head = nn.Linear(n, 64, bias=False)

    def forward(self, idx, target):
        x = x0 = F.rms_norm(self.wte(idx), (32,))
        for block in self.h:
            x = block(x, x0)
        logits = 30 * torch.tanh(self.lm_head(F.rms_norm(x, (32,))) / 30)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


raw_model = GPT()
model = DDP(torch.compile(raw_model, dynamic=False))
optimizers = [
    torch.optim.Adam([raw_model.wte.weight, raw_model.lm_head.weight], lr=0.01),
    Muon([p for p in raw_model.h.parameters() if p.ndim == 2]),
    torch.optim.Adam([p for p in raw_model.h.parameters() if p.ndim < 2], lr=0.02),
]
torch.manual_seed(args.seed + dist.get_rank())
for _ in range(30):
    tokens = (torch.randint(64, (8, 1)) + torch.randint(1, 4, (8, 1)) * torch.arange(25)) % 64
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    for opt in optimizers:
        opt.step()
    model.zero_grad(set_to_none=True)
if args.save and dist.get_rank() == 0:
    torch.save(raw_model.state_dict(), args.save)
dist.all_reduce(loss)
print(f"train loss: {loss.item() / dist.get_world_size():.6f}")
dist.destroy_process_group()
