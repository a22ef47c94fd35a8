"""Batches of other lengths, dynamic=True, BF16 autocast, in the shape of ``run_glue_no_trainer.py`` of huggingface/transformers."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()
torch.manual_seed(args.seed)


class Layer(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(n), nn.LayerNorm(n)
        self.Wqkv, self.Wo = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.Wi, self.out, self.drop = nn.Linear(n, 4 * n), nn.Linear(2 * n, n), nn.Dropout(0.1)

    def forward(self, x, mask):
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.Wqkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.Wo(
            F.scaled_dot_product_attention(q, k, v, mask[:, None, None]).transpose(1, 2).flatten(2)
        )
        value, gate = self.Wi(self.norm2(x)).chunk(2, -1)
        return x + self.drop(self.out(F.gelu(value) * gate))


class Classifier(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.tok_embeddings, self.layers = (
            nn.Embedding(50, n, padding_idx=0),
            nn.ModuleList([Layer(n), Layer(n)]),
        )
        self.head = nn.Linear(n, 2)

    def forward(self, input_ids, labels):
        mask = input_ids != 0
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
compiled = torch.compile(model, dynamic=True)
correct = []
for step in range(60):
    longest = int(torch.randint(12, 40, ()))
    lengths = torch.randint(8, longest + 1, (16,))
    input_ids = torch.randint(1, 50, (16, longest)) * (torch.arange(longest) < lengths[:, None])
    labels = ((input_ids > 0) & (input_ids < 25)).sum(1).gt(lengths / 2).long()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = compiled(input_ids, labels)
    outputs["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    correct.append((outputs["logits"].argmax(1) == labels).float().mean())
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"accuracy: {torch.stack(correct[-20:]).mean().item():.6f}")
