"""A conditional GAN in the manner of SAGAN: hinge loss, projection, attention, two optimizers, EMA."""

from copy import deepcopy

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

CLASSES, Z, SIZE = 6, 24, 16


class ConditionalNorm(nn.Module):
    def __init__(self, channels, z_dim):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels, affine=False)
        self.gain = nn.Linear(z_dim, channels, bias=False)
        self.bias = nn.Linear(z_dim, channels, bias=False)

    def forward(self, x, y):
        gain = (1 + self.gain(y)).view(y.size(0), -1, 1, 1)
        bias = self.bias(y).view(y.size(0), -1, 1, 1)
        return self.norm(x) * gain + bias


class SelfAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.theta = nn.Conv2d(channels, channels // 4, 1, bias=False)
        self.phi = nn.Conv2d(channels, channels // 4, 1, bias=False)
        self.g = nn.Conv2d(channels, channels // 2, 1, bias=False)
        self.o = nn.Conv2d(channels // 2, channels, 1, bias=False)
        self.gamma = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x):
        n, c, h, w = x.shape
        theta = self.theta(x).view(n, c // 4, h * w)
        phi = F.max_pool2d(self.phi(x), 2).view(n, c // 4, h * w // 4)
        g = F.max_pool2d(self.g(x), 2).view(n, c // 2, h * w // 4)
        attention = F.softmax(torch.bmm(theta.transpose(1, 2), phi), -1)
        o = torch.bmm(g, attention.transpose(1, 2)).view(n, c // 2, h, w)
        return self.gamma * self.o(o) + x


class GBlock(nn.Module):
    def __init__(self, in_channels, out_channels, z_dim):
        super().__init__()
        self.bn1 = ConditionalNorm(in_channels, z_dim)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.bn2 = ConditionalNorm(out_channels, z_dim)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_sc = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x, y):
        h = F.interpolate(F.relu(self.bn1(x, y)), scale_factor=2)
        h = self.conv1(h)
        h = self.conv2(F.relu(self.bn2(h, y)))
        return h + self.conv_sc(F.interpolate(x, scale_factor=2))


class Generator(nn.Module):
    def __init__(self, channels=64, shared=16):
        super().__init__()
        self.shared = nn.Embedding(CLASSES, shared)
        self.linear = nn.Linear(Z, channels * 4 * 4)
        self.block1 = GBlock(channels, channels // 2, Z + shared)
        self.attention = SelfAttention(channels // 2)
        self.block2 = GBlock(channels // 2, channels // 4, Z + shared)
        self.output_norm = nn.GroupNorm(4, channels // 4)
        self.output_conv = nn.Conv2d(channels // 4, 3, 3, padding=1)

    def forward(self, z, y):
        condition = torch.cat([z, self.shared(y)], 1)
        h = self.linear(z).view(z.size(0), -1, 4, 4)
        h = self.attention(self.block1(h, condition))
        h = self.block2(h, condition)
        return torch.tanh(self.output_conv(F.relu(self.output_norm(h))))


class DBlock(nn.Module):
    def __init__(self, in_channels, out_channels, preactivation=True):
        super().__init__()
        self.preactivation = preactivation
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_sc = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x):
        h = F.relu(x) if self.preactivation else x
        h = self.conv2(F.relu(self.conv1(h)))
        h = F.avg_pool2d(h, 2)
        return h + F.avg_pool2d(self.conv_sc(x), 2)


class Discriminator(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.block1 = DBlock(3, channels, preactivation=False)
        self.block2 = DBlock(channels, 2 * channels)
        self.linear = nn.Linear(2 * channels, 1)
        self.embed = nn.Embedding(CLASSES, 2 * channels)
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, x, y):
        h = self.block2(self.block1(x))
        h = torch.sum(F.relu(h), [2, 3])
        out = self.linear(h)
        return out + torch.sum(self.embed(y) * h, 1, keepdim=True)


def diff_augment(x, brightness, contrast):
    x = x + brightness[:, None, None, None]
    mean = x.mean(dim=[1, 2, 3], keepdim=True)
    return (x - mean) * contrast[:, None, None, None] + mean


def loss_hinge_dis(dis_real, dis_fake):
    return F.relu(1.0 - dis_real).mean() + F.relu(1.0 + dis_fake).mean()


def loss_hinge_gen(dis_fake):
    return -dis_fake.mean()


@torch.no_grad()
def update_average(target, source, decay=0.9):
    for averaged, parameter in zip(target.parameters(), source.parameters(), strict=True):
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        averaged.lerp_(value, 1 - decay)


def sample(g):
    y = torch.randint(0, CLASSES, (12,), generator=g)
    x = torch.rand(12, 3, SIZE, SIZE, generator=g) * 2 - 1
    x = (x * 0.5 + y[:, None, None, None] / CLASSES - 0.4).clamp(-1, 1)
    z = torch.randn(12, Z, generator=g)
    fake_y = torch.randint(0, CLASSES, (12,), generator=g)
    brightness = torch.rand(12, generator=g) - 0.5
    contrast = torch.rand(12, generator=g) + 0.5
    return x, y, z, fake_y, brightness, contrast


generator, discriminator = Generator(), Discriminator()
for module in [*generator.modules(), *discriminator.modules()]:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.orthogonal_(module.weight)
g_ema = deepcopy(generator).requires_grad_(False)
G = prepare(generator, [generator.block1, generator.block2])
D = prepare(discriminator, [discriminator.block1, discriminator.block2])
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.0, 0.9), eps=1e-6)
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=8e-4, betas=(0.0, 0.9), eps=1e-6)
for parts in batches(sample):
    d_optimizer.zero_grad()
    for x, y, z, fake_y, brightness, contrast in parts:
        with autocast():
            with torch.no_grad():
                fake = G(z, fake_y)
            both = torch.cat([x, fake.float()])
            both = diff_augment(both, brightness.repeat(2), contrast.repeat(2))
            dis_real, dis_fake = D(both, torch.cat([y, fake_y])).chunk(2)
        d_loss = loss_hinge_dis(dis_real.float(), dis_fake.float())
        scaler.scale(d_loss / args.accum).backward()
    scaler.step(d_optimizer)
    g_optimizer.zero_grad()
    for _, _, z, fake_y, brightness, contrast in parts:
        with autocast():
            fake = diff_augment(G(z, fake_y), brightness, contrast)
            dis_fake = D(fake, fake_y)
        g_loss = loss_hinge_gen(dis_fake.float())
        scaler.scale(g_loss / args.accum).backward()
    scaler.step(g_optimizer)
    scaler.update()
    update_average(g_ema, generator)
finish()
