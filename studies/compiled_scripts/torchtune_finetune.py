"""Layers compiled in place and a compiled loss, in the shape of ``full_finetune_single_device.py`` of pytorch/torchtune."""

import argparse
import os

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()
torch.manual_seed(args.seed)


class TransformerSelfAttentionLayer(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.sa_norm, self.mlp_norm, self.q_proj = nn.RMSNorm(n), nn.RMSNorm(n), nn.Linear(n, n)
        self.attn = nn.MultiheadAttention(n, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(n, 64), nn.SiLU(), nn.Linear(64, n))

    def forward(self, x, mask):
        h = self.sa_norm(x)
        x = x + self.attn(self.q_proj(h), h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))


class TransformerDecoder(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.tok_embeddings, self.norm, self.output = (
            nn.Embedding(64, n),
            nn.RMSNorm(n),
            nn.Linear(n, 64),
        )
        self.layers = nn.ModuleList([TransformerSelfAttentionLayer(n) for _ in range(3)])

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = checkpoint(layer, h, mask, use_reentrant=False)
        return self.output(self.norm(h))


class CEWithChunkedOutputLoss(nn.Module):
    def compute_cross_entropy(self, logits, labels):
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    def forward(self, logits, labels):
        pairs = zip(logits.chunk(4, 1), labels.chunk(4, 1), strict=True)
        return (
            sum(self.compute_cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in pairs)
            / labels.numel()
        )


backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")
model, loss_fn = TransformerDecoder(), CEWithChunkedOutputLoss()
for m in reversed(list(model.modules())):
    if isinstance(m, TransformerSelfAttentionLayer):
        m.compile(backend=backend)
loss_fn.compute_cross_entropy = torch.compile(loss_fn.compute_cross_entropy, backend=backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for idx in range(60):
    tokens = (torch.randint(64, (8, 1)) + torch.randint(1, 4, (8, 1)) * torch.arange(25)) % 64
    loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
    (loss / 2).backward()
    if idx % 2:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"loss: {loss.item():.6f}")
