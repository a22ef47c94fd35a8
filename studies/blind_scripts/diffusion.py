"""A small U-Net that predicts the noise of a diffusion step, with an average of its weights."""

import copy
import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, t):
        half = self.dim // 2
        rates = torch.exp(-math.log(10000.0) * torch.arange(half) / half)
        angle = t.float()[:, None] * rates
        return self.mlp(torch.cat([angle.sin(), angle.cos()], -1))


class ResBlock(nn.Module):
    def __init__(self, inside, outside, dim):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.shift = nn.Linear(dim, outside)
        self.norm2 = nn.GroupNorm(4, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.match = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.shift(F.silu(time))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.match(x)


class UNet(nn.Module):
    def __init__(self, width=8, dim=16):
        super().__init__()
        self.time = TimeEmbedding(dim)
        self.enter = nn.Conv2d(2, width, 3, padding=1)
        self.down1 = ResBlock(width, width, dim)
        self.down2 = ResBlock(width, 2 * width, dim)
        self.middle = ResBlock(2 * width, 2 * width, dim)
        self.up2 = ResBlock(4 * width, width, dim)
        self.up1 = ResBlock(2 * width, width, dim)
        self.leave = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, x, t):
        time = self.time(t)
        a = self.down1(self.enter(x), time)
        b = self.down2(F.avg_pool2d(a, 2), time)
        h = self.middle(b, time)
        h = self.up2(torch.cat([h, b], 1), time)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = self.up1(torch.cat([h, a], 1), time)
        return self.leave(F.silu(h))


betas = torch.linspace(1e-4, 0.05, 100)
alphas = torch.cumprod(1 - betas, 0)


def data(g):
    clean = torch.rand(8, 2, 8, 8, generator=g) * 2 - 1
    return clean, torch.randn(8, 2, 8, 8, generator=g), torch.randint(0, 100, (8,), generator=g)


model = UNet()
average = copy.deepcopy(model).requires_grad_(False)
model = prepare(model, [model.down1, model.down2, model.middle, model.up2, model.up1])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
for step, parts in enumerate(batches(data)):
    optimizer.zero_grad()
    for clean, noise, t in parts:
        kept = alphas[t][:, None, None, None]
        noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
        with autocast():
            guess = model(noisy, t)
        loss = F.mse_loss(guess.float(), noise)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if not args.fsdp:
        with torch.no_grad():
            keep = min(0.99, (1 + step) / (10 + step))
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 1 - keep)
            average(noisy, t)
finish()
