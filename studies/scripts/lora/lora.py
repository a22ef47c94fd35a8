"""LoRA, with a layer in the shape of ``loralib/layers.py`` of microsoft/LoRA and a loop like ``examples/NLG/src/gpt2_ft.py``.

A small transformer learns half of the text; then its weights are frozen, all but the low-rank factors,
whose second one starts at zero, and a new optimizer fine-tunes it on the other half. ``eval()`` merges the
factors into the weights by ``weight.data +=``, and ``train()`` takes them out again.
"""

import argparse
import math
from pydoc_data import topics

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--pretrain", type=int, default=150)
parser.add_argument("--max_step", type=int, default=120)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--lora_dim", type=int, default=4)
parser.add_argument("--lora_alpha", type=int, default=8)
parser.add_argument("--lora_dropout", type=float, default=0.05)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=110)
parser.add_argument("--save", default="")
args = parser.parse_args()
DIM, LENGTH = 48, 32


class LoRALinear(nn.Linear):
    def __init__(self, in_features, out_features, r, lora_alpha, lora_dropout):
        super().__init__(in_features, out_features)
        self.lora_dropout = nn.Dropout(lora_dropout)
        self.lora_A = nn.Parameter(self.weight.new_zeros((r, in_features)))
        self.lora_B = nn.Parameter(self.weight.new_zeros((out_features, r)))
        self.scaling = lora_alpha / r
        self.merged = False
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def train(self, mode=True):
        nn.Linear.train(self, mode)
        if mode and self.merged:
            self.weight.data -= (self.lora_B @ self.lora_A) * self.scaling
            self.merged = False
        elif not mode and not self.merged:
            self.weight.data += (self.lora_B @ self.lora_A) * self.scaling
            self.merged = True
        return self

    def forward(self, x):
        result = F.linear(x, self.weight, bias=self.bias)
        if not self.merged:
            low = self.lora_dropout(x) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)
            result += low * self.scaling
        return result


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = LoRALinear(DIM, 3 * DIM, args.lora_dim, args.lora_alpha, args.lora_dropout)
        self.proj = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.attn(self.ln_1(x)).view(b, t, 3, 4, DIM // 4).permute(2, 0, 3, 1, 4)
        w = q @ k.transpose(-2, -1) / math.sqrt(DIM // 4)
        mask = torch.tril(torch.ones(t, t))
        w = w * mask - 1e4 * (1 - mask)
        x = x + self.proj((w.softmax(-1) @ v).transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.ln_2(x))


class GPT2LMModel(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.ln_f = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, vocab, bias=False)

    def forward(self, input_ids, lm_labels):
        x = self.wte(input_ids) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        lm_logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(lm_logits.flatten(0, 1), lm_labels.flatten())


def mark_only_lora_as_trainable(model):
    for n, p in model.named_parameters():
        if "lora_" not in n:
            p.requires_grad = False


def lora_state_dict(model):
    return {k: v for k, v in model.state_dict().items() if "lora_" in k}


def batch(data, size=16, generator=None):
    ix = torch.randint(len(data) - LENGTH - 1, (size,), generator=generator)
    rows = torch.stack([data[i : i + LENGTH + 1] for i in ix])
    return rows[:, :-1], rows[:, 1:]


def train(model, data, optimizer, steps):
    model.train()
    for train_step in range(steps):
        loss = model(*batch(data))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if train_step % 50 == 0:
            print(f"step {train_step} loss {loss.item():.3f}")


def evaluate(model, data):
    model.eval()
    with torch.no_grad():
        loss = model(*batch(data, 400, torch.Generator().manual_seed(0)))
    model.train()
    return loss.item()


torch.manual_seed(args.seed)
text = "".join(topics.topics[key] for key in sorted(topics.topics))[:200000]
chars = sorted(set(text))
ids = torch.tensor([chars.index(c) for c in text])
# the other language: the same text backwards
other = ids.flip(0)
lm_net = GPT2LMModel(len(chars))
base = [p for n, p in lm_net.named_parameters() if "lora_" not in n]
train(lm_net, ids, torch.optim.AdamW(base, lr=4e-3), args.pretrain)
before = evaluate(lm_net, other[100000:])

mark_only_lora_as_trainable(lm_net)
optimizer = torch.optim.AdamW([p for p in lm_net.parameters() if p.requires_grad], lr=args.lr)
train(lm_net, other[:100000], optimizer, args.max_step)
after = evaluate(lm_net, other[100000:])
print(f"loss before fine-tuning {before:.3f}")
if args.save:
    torch.save({"model": lm_net.state_dict(), "lora": lora_state_dict(lm_net)}, args.save)
print(f"val loss: {after:.6f}")
