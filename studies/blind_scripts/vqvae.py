"""A VQ-VAE: residual encoder, codebook by moving averages, straight-through, commitment."""

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

CODES, DIM, CHANNELS = 32, 16, 32


def nonlinearity(x):
    return x * torch.sigmoid(x)


class ResnetBlock(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, in_channels, eps=1e-6)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, out_channels, eps=1e-6)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.nin_shortcut = None
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x):
        h = self.conv1(nonlinearity(self.norm1(x)))
        h = self.conv2(nonlinearity(self.norm2(h)))
        if self.nin_shortcut is not None:
            x = self.nin_shortcut(x)
        return x + h


class AttnBlock(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, in_channels, eps=1e-6)
        self.q = nn.Conv2d(in_channels, in_channels, 1)
        self.k = nn.Conv2d(in_channels, in_channels, 1)
        self.v = nn.Conv2d(in_channels, in_channels, 1)
        self.proj_out = nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        b, c, height, width = q.shape
        q = q.reshape(b, c, height * width).permute(0, 2, 1)
        k = k.reshape(b, c, height * width)
        w = torch.bmm(q, k) * (int(c) ** (-0.5))
        w = F.softmax(w, dim=2)
        v = v.reshape(b, c, height * width)
        h = torch.bmm(v, w.permute(0, 2, 1)).reshape(b, c, height, width)
        return x + self.proj_out(h)


class Downsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.down = nn.Sequential(
            ResnetBlock(CHANNELS, CHANNELS),
            Downsample(CHANNELS),
            ResnetBlock(CHANNELS, 2 * CHANNELS),
            Downsample(2 * CHANNELS),
        )
        self.mid = nn.Sequential(ResnetBlock(2 * CHANNELS, 2 * CHANNELS), AttnBlock(2 * CHANNELS))
        self.norm_out = nn.GroupNorm(8, 2 * CHANNELS, eps=1e-6)
        self.conv_out = nn.Conv2d(2 * CHANNELS, DIM, 3, padding=1)

    def forward(self, x):
        h = self.mid(self.down(self.conv_in(x)))
        return self.conv_out(nonlinearity(self.norm_out(h)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(DIM, 2 * CHANNELS, 3, padding=1)
        self.mid = ResnetBlock(2 * CHANNELS, 2 * CHANNELS)
        self.up = nn.Sequential(
            Upsample(2 * CHANNELS),
            ResnetBlock(2 * CHANNELS, CHANNELS),
            Upsample(CHANNELS),
            ResnetBlock(CHANNELS, CHANNELS),
        )
        self.norm_out = nn.GroupNorm(8, CHANNELS, eps=1e-6)
        self.conv_out = nn.Conv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, z):
        h = self.up(self.mid(self.conv_in(z)))
        return self.conv_out(nonlinearity(self.norm_out(h)))


class VectorQuantizerEMA(nn.Module):
    def __init__(self, decay=0.9, epsilon=1e-5):
        super().__init__()
        self.decay, self.epsilon = decay, epsilon
        embedding = torch.randn(CODES, DIM)
        self.register_buffer("embedding", embedding)
        self.register_buffer("cluster_size", torch.ones(CODES))
        self.register_buffer("embed_avg", embedding.clone())
        self.register_buffer("new_size", torch.zeros(CODES))
        self.register_buffer("new_sum", torch.zeros(CODES, DIM))

    def forward(self, z):
        z = z.float().permute(0, 2, 3, 1)
        flat = z.reshape(-1, DIM)
        distances = (
            flat.pow(2).sum(1, keepdim=True)
            - 2 * flat @ self.embedding.t()
            + self.embedding.pow(2).sum(1)
        )
        encoding_indices = distances.argmin(1)
        quantized = F.embedding(encoding_indices, self.embedding).view(z.shape)
        with torch.no_grad():
            encodings = F.one_hot(encoding_indices, CODES).float()
            self.new_size += encodings.sum(0)
            self.new_sum += encodings.t() @ flat
        commitment = F.mse_loss(quantized.detach(), z)
        quantized = z + (quantized - z).detach()
        return quantized.permute(0, 3, 1, 2), commitment

    @torch.no_grad()
    def update(self):
        if world > 1:
            dist.all_reduce(self.new_size)
            dist.all_reduce(self.new_sum)
        self.cluster_size.mul_(self.decay).add_(self.new_size, alpha=1 - self.decay)
        self.embed_avg.mul_(self.decay).add_(self.new_sum, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        smoothed = (self.cluster_size + self.epsilon) / (n + CODES * self.epsilon) * n
        self.embedding.copy_(self.embed_avg / smoothed.unsqueeze(1))
        self.new_size.zero_()
        self.new_sum.zero_()


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.quant_conv = nn.Conv2d(DIM, DIM, 1)
        self.quantize = VectorQuantizerEMA()
        self.post_quant_conv = nn.Conv2d(DIM, DIM, 1)
        self.decoder = Decoder()

    def forward(self, x):
        h = self.quant_conv(self.encoder(x))
        quant, commitment = self.quantize(h)
        return self.decoder(self.post_quant_conv(quant)), commitment


class Features(nn.Module):
    """A fixed network for a perceptual loss."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.register_buffer("shift", torch.tensor([-0.03, -0.088, -0.188]).view(1, 3, 1, 1))
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.45]).view(1, 3, 1, 1))

    def forward(self, x):
        x = (x - self.shift) / self.scale
        first = F.relu(self.conv1(x))
        second = F.relu(self.conv2(first))
        return first, second


def normalize_tensor(x, eps=1e-10):
    return x / (x.square().sum(dim=1, keepdim=True).sqrt() + eps)


def perceptual_loss(features, reconstruction, images):
    with torch.no_grad():
        wanted = features(images)
    found = features(reconstruction)
    total = 0.0
    for one, other in zip(found, wanted, strict=True):
        difference = (normalize_tensor(one.float()) - normalize_tensor(other.float())).square()
        total = total + difference.sum(dim=1).mean()
    return total


def pictures(g):
    """Smooth pictures in -1 … 1, some of them mirrored."""
    coarse = torch.rand(8, 3, 6, 6, generator=g)
    images = F.interpolate(coarse, size=(32, 32), mode="bilinear") + 0.05 * torch.randn(
        8, 3, 32, 32, generator=g
    )
    flip = torch.rand(8, 1, 1, 1, generator=g) < 0.5
    images = torch.where(flip, images.flip(-1), images)
    return (images.clamp(0, 1) * 2 - 1,)


net = VQVAE()
features = Features().eval().requires_grad_(False)
model = prepare(net, [net.encoder, net.decoder])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9))
for parts in batches(pictures):
    for (images,) in parts:
        with autocast():
            reconstruction, commitment = model(images)
            reconstruction = reconstruction.float()
            rec_loss = F.l1_loss(reconstruction, images) + F.mse_loss(reconstruction, images)
            p_loss = perceptual_loss(features, reconstruction, images)
        loss = rec_loss + 0.5 * p_loss + 0.25 * commitment
        scaler.scale(loss / args.accum).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    net.quantize.update()
finish()
