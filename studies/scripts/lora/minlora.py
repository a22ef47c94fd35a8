"""LoRA by parametrisation, in the shape of ``minlora/model.py`` and ``demo.ipynb`` of cccntu/minLoRA.

``torch.nn.utils.parametrize`` puts ``W + B A * scaling`` in the place of each linear layer's weight; only
the factors are given to the optimizer. An image classifier learns half of the digits' classes and is then
fine-tuned on all of them.
"""

import argparse
import math

import torch
import torch.nn.utils.parametrize as parametrize
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--pretrain", type=int, default=300)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--rank", type=int, default=4)
parser.add_argument("--alpha", type=float, default=8.0)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()


class LoRAParametrization(nn.Module):
    def __init__(self, fan_in, fan_out, rank, dropout_p, alpha):
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros((rank, fan_in)))
        self.lora_B = nn.Parameter(torch.zeros(fan_out, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / rank
        self.lora_dropout = nn.Dropout(p=dropout_p) if dropout_p > 0 else lambda x: x

    def forward(self, X):
        return (
            X
            + torch.matmul(self.lora_B, self.lora_dropout(self.lora_A)).view(X.shape) * self.scaling
        )

    @classmethod
    def from_linear(cls, layer):
        fan_out, fan_in = layer.weight.shape
        return cls(fan_in, fan_out, args.rank, args.dropout, args.alpha)


def add_lora(layer):
    if isinstance(layer, nn.Linear):
        parametrize.register_parametrization(
            layer, "weight", LoRAParametrization.from_linear(layer)
        )


def get_lora_params(model):
    for name, param in model.named_parameters():
        if "lora_" in name:
            yield param


def merge_lora(layer):
    if hasattr(layer, "parametrizations"):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)


class Mixer(nn.Module):
    """Four patches of 4 × 4, mixed along the patches and along the channels."""

    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Linear(16, dim)
        self.tokens = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = x.view(-1, 2, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(-1, 4, 16)
        x = self.embed(x)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))


def train(model, optimizer, x, y, steps):
    for step in range(steps):
        index = torch.randint(len(x), (32,))
        loss = nn.functional.cross_entropy(model(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}")


torch.manual_seed(args.seed)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
half = y[:1200] < 5
model = Mixer()
train(
    model,
    torch.optim.AdamW(model.parameters(), lr=2e-3),
    x[:1200][half],
    y[:1200][half],
    args.pretrain,
)

model.apply(add_lora)
optimizer = torch.optim.AdamW([{"params": list(get_lora_params(model))}], lr=args.lr)
train(model, optimizer, x[:1200], y[:1200], args.steps)

model.apply(merge_lora)
with torch.no_grad():
    right = model(x[1200:]).argmax(1) == y[1200:]
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"accuracy: {right.double().mean().item():.6f}")
