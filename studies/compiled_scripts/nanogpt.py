"""A GPT compiled as a whole, in the shape of ``train.py`` of karpathy/nanoGPT."""

import argparse
import math
from pydoc_data import topics

import torch
import torch.nn as nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1337)
parser.add_argument("--save", default="")
args = parser.parse_args()
torch.manual_seed(args.seed)
text = "".join(topics.topics.values())[:60000]
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n), nn.LayerNorm(n)
        self.c_attn, self.c_proj = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.mlp = nn.Sequential(
            nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n), nn.Dropout(0.1)
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        x = x + self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, n=48):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n), nn.Embedding(32, n)
        self.h, self.ln_f = nn.ModuleList([Block(n) for _ in range(3)]), nn.LayerNorm(n)
        self.lm_head = nn.Linear(n, len(chars), bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    ix = torch.randint(len(data) - 33, (8,))
    return torch.stack([data[i : i + 32] for i in ix]), torch.stack(
        [data[i + 1 : i + 33] for i in ix]
    )


@torch.no_grad()
def estimate_loss():
    model.eval()
    mean = torch.stack([model(*get_batch())[1] for _ in range(4)]).mean().item()
    model.train()
    return mean


raw_model = GPT()
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=3e-3, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)
model = torch.compile(raw_model)
for it in range(40):
    optimizer.param_groups[0]["lr"] = (
        3e-3 * (it + 1) / 5 if it < 5 else 1.5e-3 * (1 + math.cos(it / 40 * math.pi))
    )
    if it % 20 == 0:
        print(f"step {it}: val loss {estimate_loss():.4f}")
    for _ in range(2):
        logits, loss = model(*get_batch())
        scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
if args.save:
    torch.save(raw_model.state_dict(), args.save)
print(f"val loss: {estimate_loss():.6f}")
