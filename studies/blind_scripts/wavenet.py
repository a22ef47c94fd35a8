"""WaveNet on short tones: dilated causal convolutions, gates, skips, features and speakers."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch
from torch.nn.utils.parametrizations import weight_norm

QUANTIZE, SAMPLES, BATCH, SPEAKERS, FEATURES = 64, 192, 8, 5, 6
SCALES = (4, 4)
HOP = math.prod(SCALES)


class CausalConv1d(nn.Module):
    """Pads both ends and cuts the right one off."""

    def __init__(self, in_channels, out_channels, kernel_size, dilation):
        super().__init__()
        padding = (kernel_size - 1) * dilation
        self.conv = nn.Conv1d(
            in_channels, out_channels, kernel_size, padding=padding, dilation=dilation
        )

    def forward(self, x):
        return self.conv(x)[:, :, : x.size(-1)]


class ResidualConv1dGLU(nn.Module):
    """A dilated convolution, gated, conditioned on local features and on a speaker."""

    def __init__(self, residual, gate, skip, local, speaker, dilation, last=False):
        super().__init__()
        self.dropout = nn.Dropout(args.dropout)
        self.conv = CausalConv1d(residual, gate, kernel_size=3, dilation=dilation)
        self.conv1x1c = nn.Conv1d(local, gate, kernel_size=1, bias=False)
        self.conv1x1g = nn.Conv1d(speaker, gate, kernel_size=1, bias=False)
        self.conv1x1_skip = nn.Conv1d(gate // 2, skip, kernel_size=1)
        # nothing reads the residual of the last layer
        self.conv1x1_out = None if last else nn.Conv1d(gate // 2, residual, kernel_size=1)

    def forward(self, x, c, g):
        residual = x
        x = self.conv(self.dropout(x))
        a, b = x.split(x.size(1) // 2, dim=1)
        c = self.conv1x1c(c)
        ca, cb = c.split(c.size(1) // 2, dim=1)
        a, b = a + ca, b + cb
        g = self.conv1x1g(g)
        ga, gb = g.split(g.size(1) // 2, dim=1)
        a, b = a + ga, b + gb
        x = torch.tanh(a) * torch.sigmoid(b)
        s = self.conv1x1_skip(x)
        if self.conv1x1_out is None:
            return None, s
        return (self.conv1x1_out(x) + residual) * math.sqrt(0.5), s


class Stretch2d(nn.Module):
    def __init__(self, x_scale):
        super().__init__()
        self.x_scale = x_scale

    def forward(self, x):
        return F.interpolate(x, scale_factor=(1, self.x_scale), mode="nearest")


class UpsampleNetwork(nn.Module):
    """Frames become samples: each is repeated and smoothed, once for every scale."""

    def __init__(self, channels, kernel_size=3):
        super().__init__()
        self.conv_in = nn.Conv1d(channels, channels, kernel_size, padding=1, bias=False)
        self.up_layers = nn.ModuleList()
        for scale in SCALES:
            smooth = nn.Conv2d(1, 1, (1, 2 * scale + 1), padding=(0, scale), bias=False)
            self.up_layers += [Stretch2d(scale), smooth, nn.LeakyReLU(0.4)]

    def forward(self, c):
        c = self.conv_in(c).unsqueeze(1)
        for layer in self.up_layers:
            c = layer(c)
        return c.squeeze(1)


class WaveNet(nn.Module):
    def __init__(self, layers=8, stacks=2, residual=24, gate=48, skip=24, speaker=8):
        super().__init__()
        self.embed_speakers = nn.Embedding(SPEAKERS, speaker)
        self.upsample_net = UpsampleNetwork(FEATURES)
        self.first_conv = nn.Conv1d(QUANTIZE, residual, kernel_size=1)
        self.conv_layers = nn.ModuleList()
        for layer in range(layers):
            dilation = 2 ** (layer % (layers // stacks))
            self.conv_layers.append(
                ResidualConv1dGLU(
                    residual, gate, skip, FEATURES, speaker, dilation, layer == layers - 1
                )
            )
        self.last_conv_layers = nn.Sequential(
            nn.ReLU(),
            nn.Conv1d(skip, skip, kernel_size=1),
            nn.ReLU(),
            nn.Conv1d(skip, QUANTIZE, kernel_size=1),
        )
        self.reset_parameters()
        self.apply_weight_norm()

    def reset_parameters(self):
        torch.manual_seed(31)
        nn.init.normal_(self.embed_speakers.weight, std=0.3)
        for m in self.modules():
            if isinstance(m, nn.Conv1d):
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
            elif isinstance(m, nn.Conv2d):
                nn.init.constant_(m.weight, 1.0 / m.weight.numel())

    def apply_weight_norm(self):
        for m in list(self.modules()):
            if isinstance(m, nn.Conv1d | nn.Conv2d):
                weight_norm(m)

    def forward(self, x, c, g):
        """Samples are [B, T], features are [B, C, T / hop] and speakers are [B]."""
        g = self.embed_speakers(g).unsqueeze(-1)
        c = self.upsample_net(c)
        x = F.one_hot(x, QUANTIZE).transpose(1, 2).float()
        x = self.first_conv(x)
        skips = 0
        for f in self.conv_layers:
            x, h = f(x, c, g)
            skips = skips + h
        skips = skips * math.sqrt(1.0 / len(self.conv_layers))
        return self.last_conv_layers(skips)


def mulaw_quantize(x, mu=QUANTIZE - 1):
    y = torch.sign(x) * torch.log1p(mu * x.abs()) / math.log1p(mu)
    return ((y + 1) / 2 * mu + 0.5).long()


def tones(g):
    """Each speaker's voice has its own harmonics; pitch and loudness wander from frame to frame."""
    timbres = torch.rand(SPEAKERS, 4, generator=torch.Generator().manual_seed(8)) + 0.1
    speakers = torch.randint(0, SPEAKERS, (BATCH,), generator=g)
    frames = SAMPLES // HOP
    pitch = torch.randn(BATCH, frames, generator=g).cumsum(1) * 0.08
    pitch = pitch + 2.0 * torch.rand(BATCH, 1, generator=g)
    loudness = torch.sigmoid(torch.randn(BATCH, frames, generator=g).cumsum(1) * 0.5)
    voiced = (torch.rand(BATCH, frames, generator=g) < 0.85).float()
    per_sample = {"size": SAMPLES, "mode": "linear"}
    frequency = 0.02 * torch.exp(0.5 * F.interpolate(pitch[:, None], **per_sample)[:, 0])
    amplitude = F.interpolate((loudness * voiced)[:, None], **per_sample)[:, 0]
    phase = 2 * math.pi * frequency.cumsum(1)
    harmonics = torch.sin(phase[:, None] * torch.arange(1, 5)[:, None])
    timbre = timbres[speakers] / timbres[speakers].sum(1, keepdim=True)
    wave = amplitude * (harmonics * timbre[:, :, None]).sum(1)
    wave = wave + 0.03 * torch.randn(wave.shape, generator=g)
    c = [pitch, loudness, voiced, loudness * voiced, pitch.sin(), pitch.cos()]
    return mulaw_quantize(wave.clamp(-1, 1)), torch.stack(c, dim=1), speakers


net = WaveNet()
model = prepare(net, net.conv_layers)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, eps=1e-8)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
for parts in batches(tones):
    for x, c, g in parts:
        with autocast():
            y_hat = model(x, c, g)
        # the output at a sample predicts the next one
        loss = criterion(y_hat[:, :, :-1].float(), x[:, 1:]) / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
