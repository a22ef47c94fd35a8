"""WaveNet, in the shape of ``wavenet_model.py`` and ``wavenet_training.py`` of vincentherrmann/pytorch-wavenet.

Dilated convolutions with gates, residual and skip connections over one-hot samples, quantised by the
mu law, and a softmax over the next one. The sound: notes of harmonics with a decay.
"""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=5)
parser.add_argument("--blocks", type=int, default=2)
parser.add_argument("--channels", type=int, default=16)
parser.add_argument("--classes", type=int, default=64)
parser.add_argument("--output-length", type=int, default=64)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()


def sound(length, rng):
    """Notes of a scale, each with three harmonics that fade; from -1 to 1."""
    pieces = []
    while sum(map(len, pieces)) < length:
        t = np.arange(400)
        pitch = 0.02 * 2 ** (rng.choice([0, 2, 4, 5, 7, 9, 11]) / 12)
        note = sum(np.sin(2 * np.pi * pitch * k * t) / k for k in (1, 2, 3))
        pieces.append(0.5 * note * np.exp(-t / 250))
    return np.clip(np.concatenate(pieces)[:length], -1, 1)


def mu_law_encode(x, classes):
    mu = classes - 1
    y = np.sign(x) * np.log1p(mu * np.abs(x)) / np.log1p(mu)
    return torch.tensor(((y + 1) / 2 * mu + 0.5).astype(np.int64))


class WaveNetModel(nn.Module):
    def __init__(self, layers, blocks, channels, classes):
        super().__init__()
        self.classes = classes
        self.start_conv = nn.Conv1d(classes, channels, 1)
        self.filter_convs, self.gate_convs = nn.ModuleList(), nn.ModuleList()
        self.residual_convs, self.skip_convs = nn.ModuleList(), nn.ModuleList()
        self.receptive_field = 1
        for _ in range(blocks):
            for i in range(layers):
                self.filter_convs.append(nn.Conv1d(channels, channels, 2, dilation=2**i))
                self.gate_convs.append(nn.Conv1d(channels, channels, 2, dilation=2**i))
                self.residual_convs.append(nn.Conv1d(channels, channels, 1))
                self.skip_convs.append(nn.Conv1d(channels, 2 * channels, 1))
                self.receptive_field += 2**i
        self.end_conv_1 = nn.Conv1d(2 * channels, 2 * channels, 1)
        self.end_conv_2 = nn.Conv1d(2 * channels, classes, 1)

    def forward(self, input):
        x = self.start_conv(input)
        skip = 0
        layers = zip(self.filter_convs, self.gate_convs, self.residual_convs, self.skip_convs)
        for filter_conv, gate_conv, residual_conv, skip_conv in layers:
            residual = x
            x = torch.tanh(filter_conv(x)) * torch.sigmoid(gate_conv(x))
            s = skip_conv(x)
            if isinstance(skip, torch.Tensor):
                skip = skip[:, :, -s.size(2) :]
            skip = s + skip
            x = residual_conv(x) + residual[:, :, -x.size(2) :]
        x = F.relu(self.end_conv_1(F.relu(skip)))
        x = self.end_conv_2(x)
        return x[:, :, -args.output_length :].transpose(1, 2).reshape(-1, self.classes)


def batch(wave, starts, model):
    length = model.receptive_field + args.output_length
    pieces = torch.stack([wave[s : s + length] for s in starts])
    one_hot = F.one_hot(pieces[:, :-1], args.classes).float().transpose(1, 2)
    return one_hot, pieces[:, -args.output_length :].reshape(-1)


np.random.seed(args.seed)
torch.manual_seed(args.seed)
train_wave = mu_law_encode(sound(20000, np.random.default_rng(0)), args.classes)
test_wave = mu_law_encode(sound(4000, np.random.default_rng(1)), args.classes)
model = WaveNetModel(args.layers, args.blocks, args.channels, args.classes)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
limit = len(train_wave) - model.receptive_field - args.output_length

for step in range(args.steps):
    x, target = batch(train_wave, torch.randint(limit, (args.batch_size,)), model)
    output = model(x)
    loss = F.cross_entropy(output.squeeze(), target.squeeze())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"loss at step {step}: {loss.item():.4f}")

model.eval()
with torch.no_grad():
    starts = range(0, len(test_wave) - model.receptive_field - args.output_length, 240)
    x, target = batch(test_wave, starts, model)
    nll = F.cross_entropy(model(x), target)
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"nll: {nll.item():.6f}")
