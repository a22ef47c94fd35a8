"""A diffusion transformer, fine-tuned: adaLN, dropped labels, min-SNR weights, averaged weights."""

import math
from copy import deepcopy

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

SIZE, CHANNELS, CLASSES, T = 12, 4, 10, 1000


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, hidden_size, frequency_size=64):
        super().__init__()
        self.frequency_size = frequency_size
        self.mlp = nn.Sequential(
            nn.Linear(frequency_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def timestep_embedding(self, t, max_period=10000):
        half = self.frequency_size // 2
        freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32) / half)
        angles = t[:, None].float() * freqs[None]
        return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)

    def forward(self, t):
        return self.mlp(self.timestep_embedding(t))


class LabelEmbedder(nn.Module):
    """Labels, and one more row for labels that are dropped."""

    def __init__(self, num_classes, hidden_size):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table = nn.Embedding(num_classes + 1, hidden_size)

    def forward(self, labels, drop):
        labels = torch.where(drop, self.num_classes, labels)
        return self.embedding_table(labels)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class DiTBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio=4):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, mlp_ratio * hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(mlp_ratio * hidden_size, hidden_size),
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(
            c
        ).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x


class FinalLayer(nn.Module):
    def __init__(self, hidden_size, patch_size, out_channels):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


def sincos_1d(dim, places):
    omega = 1.0 / 10000 ** (torch.arange(dim // 2) / (dim / 2))
    out = places.reshape(-1)[:, None] * omega[None]
    return torch.cat([out.sin(), out.cos()], dim=1)


def sincos_2d(dim, grid):
    rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    return torch.cat([sincos_1d(dim // 2, rows), sincos_1d(dim // 2, columns)], dim=1)


class DiT(nn.Module):
    def __init__(self, hidden_size=64, depth=3, num_heads=4, patch_size=2):
        super().__init__()
        self.patch_size = patch_size
        self.x_embedder = nn.Conv2d(CHANNELS, hidden_size, patch_size, stride=patch_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(CLASSES, hidden_size)
        self.register_buffer("pos_embed", sincos_2d(hidden_size, SIZE // patch_size)[None])
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, num_heads) for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, patch_size, CHANNELS)
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.5)

    def unpatchify(self, x):
        p, h = self.patch_size, SIZE // self.patch_size
        x = x.reshape(x.shape[0], h, h, p, p, CHANNELS)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(x.shape[0], CHANNELS, h * p, h * p)

    def forward(self, x, t, y, drop):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y, drop)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))


betas = torch.linspace(1e-4, 0.02, T, dtype=torch.float64)
alphas_cumprod = torch.cumprod(1.0 - betas, dim=0).float()


def extract(values, t):
    return values[t][:, None, None, None]


def q_sample(x_start, t, noise):
    return (
        extract(alphas_cumprod.sqrt(), t) * x_start
        + extract((1.0 - alphas_cumprod).sqrt(), t) * noise
    )


def min_snr(t, gamma=5.0):
    snr = alphas_cumprod[t] / (1.0 - alphas_cumprod[t])
    return snr.clamp(max=gamma) / snr


@torch.no_grad()
def update_ema(ema_model, model, decay=0.99):
    for averaged, parameter in zip(ema_model.parameters(), model.parameters(), strict=True):
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        averaged.mul_(decay).add_(value, alpha=1 - decay)


def latents(g):
    x = torch.randn(16, CHANNELS, SIZE, SIZE, generator=g)
    noise = torch.randn(x.shape, generator=g)
    t = torch.randint(0, T, (16,), generator=g)
    y = torch.randint(0, CLASSES, (16,), generator=g)
    return x, noise, t, y, torch.rand(16, generator=g) < 0.25


net = DiT()
ema = deepcopy(net).requires_grad_(False)
model = prepare(net, net.blocks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for parts in batches(latents):
    for x, noise, t, y, drop in parts:
        x_t = q_sample(x, t, noise)
        with autocast():
            predicted = model(x_t, t, y, drop)
        loss = ((predicted.float() - noise) ** 2).mean(dim=(1, 2, 3))
        loss = (loss * min_snr(t)).mean()
        scaler.scale(loss / args.accum).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    update_ema(ema, net)
finish()
