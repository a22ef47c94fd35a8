"""Blocks compiled one by one, in the shape of ``parallelize.py`` of pytorch/torchtitan: checkpoint, compile, shard."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(args.seed)


class TransformerBlock(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(n), nn.RMSNorm(n)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(n, n, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = nn.Linear(n, 64), nn.Linear(n, 64), nn.Linear(64, n)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        x = x + self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.tok_embeddings, self.norm, self.output = (
            nn.Embedding(64, n),
            nn.RMSNorm(n),
            nn.Linear(n, 64),
        )
        self.layers = nn.ModuleDict({str(i): TransformerBlock(n) for i in range(3)})

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


model = Transformer()
for name, block in model.layers.named_children():
    model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
for name, block in model.layers.named_children():
    model.layers.register_module(name, torch.compile(block, backend="inductor", fullgraph=True))
policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
settings = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": policy}
for part in (model.tok_embeddings, *model.layers.values(), model.norm, model.output, model):
    fully_shard(part, **settings)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
torch.manual_seed(args.seed + dist.get_rank())
for _ in range(30):
    start, stride = torch.randint(64, (8, 1)), torch.randint(1, 4, (8, 1))
    tokens = (start + stride * torch.arange(25)) % 64
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.all_reduce(loss)
weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
if args.save and dist.get_rank() == 0:
    torch.save(weights, args.save)
print(f"global loss: {loss.item() / dist.get_world_size():.6f}")
dist.destroy_process_group()
