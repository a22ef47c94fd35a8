"""Glow on small pictures: ActNorm, invertible 1x1 convolutions, affine couplings, a split, bits per dim."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

SIZE, BITS = 8, 5


class ActNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.logs = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.inited = False

    @torch.no_grad()
    def initialize(self, x):
        self.bias.copy_(-x.mean(dim=(0, 2, 3), keepdim=True))
        variance = (x + self.bias).square().mean(dim=(0, 2, 3), keepdim=True)
        self.logs.copy_(torch.log(1.0 / (variance.sqrt() + 1e-6)))
        self.inited = True

    def forward(self, x, logdet):
        height, width = x.shape[2:]
        x = (x + self.bias) * torch.exp(self.logs)
        return x, logdet + self.logs.sum() * height * width


class InvertibleConv1x1(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0].contiguous())

    def forward(self, x, logdet):
        height, width = x.shape[2:]
        z = F.conv2d(x, self.weight[:, :, None, None])
        dlogdet = torch.slogdet(self.weight.float())[1] * height * width
        return z, logdet + dlogdet


class Conv2dZeros(nn.Module):
    def __init__(self, in_channels, out_channels, logscale_factor=3.0):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.logs = nn.Parameter(torch.zeros(out_channels, 1, 1))
        self.logscale_factor = logscale_factor
        nn.init.normal_(self.conv.weight, std=0.01)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x):
        return self.conv(x) * torch.exp(self.logs * self.logscale_factor)


class AffineCoupling(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.conv1 = nn.Conv2d(channels // 2, hidden, 3, padding=1)
        self.conv2 = nn.Conv2d(hidden, hidden, 1)
        self.conv3 = Conv2dZeros(hidden, channels)

    def forward(self, x, logdet):
        z1, z2 = x.chunk(2, dim=1)
        h = self.conv3(F.relu(self.conv2(F.relu(self.conv1(z1)))))
        shift, scale = h[:, 0::2].float(), h[:, 1::2].float()
        scale = torch.sigmoid(scale + 2.0)
        z2 = (z2 + shift) * scale
        logdet = logdet + torch.log(scale).sum(dim=(1, 2, 3))
        return torch.cat([z1.float(), z2], dim=1), logdet


class FlowStep(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.actnorm = ActNorm(channels)
        self.invconv = InvertibleConv1x1(channels)
        self.coupling = AffineCoupling(channels, hidden)

    def forward(self, x, logdet):
        if not self.actnorm.inited:
            self.actnorm.initialize(x)
        x, logdet = self.actnorm(x, logdet)
        x, logdet = self.invconv(x, logdet)
        return self.coupling(x.float(), logdet)


def gaussian_logp(x, mean, logs):
    logp = -0.5 * (math.log(2 * math.pi) + 2.0 * logs + (x - mean) ** 2 / torch.exp(2.0 * logs))
    return logp.sum(dim=(1, 2, 3))


class Split(nn.Module):
    """Half of the channels leave; what stays tells their mean and deviation."""

    def __init__(self, channels):
        super().__init__()
        self.prior = Conv2dZeros(channels // 2, channels)

    def forward(self, x, logdet):
        z1, z2 = x.chunk(2, dim=1)
        mean, logs = self.prior(z1).float().chunk(2, dim=1)
        return z1, logdet + gaussian_logp(z2, mean, logs)


class SqueezeLayer(nn.Module):
    def forward(self, x):
        B, C, H, W = x.shape
        x = x.view(B, C, H // 2, 2, W // 2, 2)
        x = x.permute(0, 1, 3, 5, 2, 4).contiguous()
        return x.view(B, C * 4, H // 2, W // 2)


class Level(nn.Module):
    def __init__(self, channels, hidden, K, last):
        super().__init__()
        self.squeeze = SqueezeLayer()
        self.steps = nn.ModuleList(FlowStep(4 * channels, hidden) for _ in range(K))
        self.split = None if last else Split(4 * channels)

    def forward(self, x, logdet):
        x = self.squeeze(x)
        for step in self.steps:
            x, logdet = step(x, logdet)
        return (x, logdet) if self.split is None else self.split(x, logdet)


class Glow(nn.Module):
    def __init__(self, hidden=32, K=2, L=2):
        super().__init__()
        self.levels = nn.ModuleList(
            Level(3 * 2**level, hidden, K, last=level == L - 1) for level in range(L)
        )
        channels = 3 * 2 ** (L + 1)
        self.prior_mean = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.prior_logs = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x):
        logdet = x.new_zeros(x.shape[0])
        for level in self.levels:
            x, logdet = level(x, logdet)
        return gaussian_logp(x, self.prior_mean, self.prior_logs) + logdet


def preprocess(g):
    """Smooth pictures of 5 bits, dequantised, in -0.5 … 0.5."""
    coarse = torch.rand(12, 3, 3, 3, generator=g)
    x = F.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear") * 255
    n_bins = 2.0**BITS
    x = torch.floor(x / 2 ** (8 - BITS))
    x = x / n_bins - 0.5
    x = x + torch.rand(x.shape, generator=g) / n_bins
    return (x,)


net = Glow()
with torch.no_grad():
    net(preprocess(torch.Generator().manual_seed(99))[0])
model = prepare(net, net.levels)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.9999), weight_decay=0)
warmup = 5
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
dims = 3 * SIZE * SIZE
for parts in batches(preprocess):
    optimizer.zero_grad()
    for (x,) in parts:
        with autocast():
            log_likelihood = model(x)
        nll = -(log_likelihood - BITS * math.log(2.0) * dims) / (math.log(2.0) * dims)
        loss = nll.mean()
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 50.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
