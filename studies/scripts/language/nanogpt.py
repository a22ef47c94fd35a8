"""A small GPT on characters, in the shape of ``train.py`` and ``model.py`` of karpathy/nanoGPT.

Weights of the embedding and the output are one; AdamW over groups with and without decay; a rate that
warms up and falls by a cosine; micro batches whose loss is divided by their number; a GradScaler that
is disabled; the loss estimated now and then in evaluation mode. The text is English that ships with Python.
"""

import argparse
import inspect
import math
from contextlib import nullcontext
from pydoc_data import topics

import torch
import torch.nn as nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--n_layer", type=int, default=2)
parser.add_argument("--n_head", type=int, default=4)
parser.add_argument("--n_embd", type=int, default=48)
parser.add_argument("--block_size", type=int, default=48)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--learning_rate", type=float, default=4e-3)
parser.add_argument("--max_iters", type=int, default=140)
parser.add_argument("--warmup_iters", type=int, default=20)
parser.add_argument("--min_lr", type=float, default=4e-4)
parser.add_argument("--weight_decay", type=float, default=1e-1)
parser.add_argument("--grad_clip", type=float, default=1.0)
parser.add_argument("--eval_interval", type=int, default=70)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--seed", type=int, default=1337)
parser.add_argument("--save", default="")
args = parser.parse_args()


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_embd, self.n_head = n_embd, n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, args.n_embd),
                "wpe": nn.Embedding(args.block_size, args.n_embd),
                "h": nn.ModuleList([Block(args.n_embd, args.n_head) for _ in range(args.n_layer)]),
                "ln_f": nn.LayerNorm(args.n_embd),
            }
        )
        self.lm_head = nn.Linear(args.n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        params = [p for p in self.parameters() if p.requires_grad]
        optim_groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
        extra = {"fused": False} if fused else {}
        return torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas, **extra)


torch.manual_seed(args.seed)
text = "".join(topics.topics[key] for key in sorted(topics.topics))
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text[:200000]])
train_data, val_data = data[:180000], data[180000:]


def get_batch(split, generator=None):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - args.block_size, (args.batch_size,), generator=generator)
    x = torch.stack([source[i : i + args.block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + args.block_size] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss(eval_iters):
    model.eval()
    generator = torch.Generator().manual_seed(0)
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        _, loss = model(*get_batch("val", generator))
        losses[k] = loss.item()
    model.train()
    return losses.mean().item()


def get_lr(it):
    if it < args.warmup_iters:
        return args.learning_rate * (it + 1) / args.warmup_iters
    decay_ratio = (it - args.warmup_iters) / (args.max_iters - args.warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return args.min_lr + coeff * (args.learning_rate - args.min_lr)


model = GPT(len(chars))
scaler = torch.amp.GradScaler("cpu", enabled=(args.dtype == "float16"))
optimizer = model.configure_optimizers(args.weight_decay, args.learning_rate, (0.9, 0.95))
ctx = nullcontext()

X, Y = get_batch("train")
for iter_num in range(args.max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % args.eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss(4):.4f}")
    for _ in range(args.gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / args.gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if args.grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

val_loss = estimate_loss(30)
if args.save:
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(checkpoint, args.save)
print(f"val loss: {val_loss:.6f}")
