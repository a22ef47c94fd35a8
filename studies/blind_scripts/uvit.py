"""A U-ViT that predicts v: long skips between halves, sinusoidal times, FiLM in each block."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

SIZE, CHANNELS, PATCH, BATCH, CLASSES = 16, 3, 2, 8, 5
DIM, HEADS, DEPTH, MLP_RATIO, TIME_DIM, GAMMA = 48, 4, 5, 3, 64, 5.0
TOKENS = (SIZE // PATCH) ** 2


def timestep_embedding(timesteps, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half).float() / half)
    args_ = timesteps[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args_), torch.sin(args_)], dim=-1)


class TimeEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_1 = nn.Linear(DIM, TIME_DIM)
        self.act = nn.SiLU()
        self.linear_2 = nn.Linear(TIME_DIM, TIME_DIM)

    def forward(self, t):
        return self.linear_2(self.act(self.linear_1(timestep_embedding(1000.0 * t, DIM))))


class FiLM(nn.Module):
    """A scale and a shift for each channel, from the time and the class."""

    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()
        self.proj = nn.Linear(TIME_DIM, 2 * DIM)

    def forward(self, x, emb):
        scale, shift = self.proj(self.act(emb)).unsqueeze(1).chunk(2, dim=-1)
        return x * (1 + scale) + shift


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = DIM // HEADS
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        B, L, C = x.shape
        qkv = self.qkv(x).reshape(B, L, 3, HEADS, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, L, C)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(DIM, MLP_RATIO * DIM)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(MLP_RATIO * DIM, DIM)
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Block(nn.Module):
    def __init__(self, skip=False):
        super().__init__()
        self.skip_linear = nn.Linear(2 * DIM, DIM) if skip else None
        self.norm1 = nn.LayerNorm(DIM)
        self.film1 = FiLM()
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.film2 = FiLM()
        self.mlp = Mlp()

    def forward(self, x, emb, skip=None):
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(self.film1(self.norm1(x), emb))
        return x + self.mlp(self.film2(self.norm2(x), emb))


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(CHANNELS, DIM, kernel_size=PATCH, stride=PATCH)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class UViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.pos_embed = nn.Parameter(torch.zeros(1, TOKENS, DIM))
        self.time_embed = TimeEmbedding()
        self.label_emb = nn.Embedding(CLASSES + 1, TIME_DIM)
        self.in_blocks = nn.ModuleList([Block() for _ in range(DEPTH // 2)])
        self.mid_block = Block()
        self.out_blocks = nn.ModuleList([Block(skip=True) for _ in range(DEPTH // 2)])
        self.norm = nn.LayerNorm(DIM)
        self.decoder_pred = nn.Linear(DIM, PATCH**2 * CHANNELS)
        self.final_layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        torch.manual_seed(13)
        nn.init.trunc_normal_(self.pos_embed, std=0.1)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight, std=0.2)
        elif isinstance(m, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(m.weight, std=0.1)
            if m.bias is not None:
                nn.init.zeros_(m.bias)

    def unpatchify(self, x):
        side = SIZE // PATCH
        x = x.reshape(x.shape[0], side, side, PATCH, PATCH, CHANNELS)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], CHANNELS, SIZE, SIZE)

    def forward(self, x, t, y):
        emb = self.time_embed(t) + self.label_emb(y)
        x = self.patch_embed(x) + self.pos_embed
        skips = []
        for blk in self.in_blocks:
            x = blk(x, emb)
            skips.append(x)
        x = self.mid_block(x, emb)
        for blk in self.out_blocks:
            x = blk(x, emb, skips.pop())
        x = self.decoder_pred(self.norm(x))
        return self.final_layer(self.unpatchify(x))


def alpha_sigma(t):
    """The cosine schedule."""
    return torch.cos(t * math.pi / 2), torch.sin(t * math.pi / 2)


def diffusion_loss(model, x0, noise, t, y):
    """The squared error of v, weighted by min(SNR, gamma) / (SNR + 1)."""
    alpha, sigma = (coefficient[:, None, None, None] for coefficient in alpha_sigma(t))
    x_t = alpha * x0 + sigma * noise
    v = alpha * noise - sigma * x0
    with autocast():
        pred = model(x_t, t, y)
    loss = F.mse_loss(pred.float(), v, reduction="none").mean(dim=[1, 2, 3])
    snr = (alpha_sigma(t)[0] / alpha_sigma(t)[1]) ** 2
    weight = torch.minimum(snr, torch.full_like(snr, GAMMA)) / (snr + 1)
    return (weight * loss).mean()


def pictures(g):
    """Soft discs: a class is a colour. Some lose their class, for guidance. Times are spread."""
    y = torch.randint(0, CLASSES, (BATCH,), generator=g)
    palette = torch.rand(CLASSES, CHANNELS, generator=torch.Generator().manual_seed(3)) * 2 - 1
    centre = torch.rand(BATCH, 2, generator=g) * 8 + 4
    radius = torch.rand(BATCH, generator=g) * 3 + 2
    grid = torch.arange(SIZE) + 0.5
    rows = (grid[None, :, None] - centre[:, 0, None, None]).square()
    distance = (rows + (grid[None, None, :] - centre[:, 1, None, None]).square()).sqrt()
    disc = torch.sigmoid(2 * (radius[:, None, None] - distance))
    x0 = palette[y][:, :, None, None] * (2 * disc[:, None] - 0.5)
    noise = torch.randn(x0.shape, generator=g)
    start = torch.rand(1, generator=g)
    t = (start + torch.arange(BATCH) / BATCH) % 1 * 0.98 + 0.01
    y = torch.where(torch.rand(BATCH, generator=g) < 0.15, CLASSES, y)
    return x0, noise, t, y


net = UViT()
model = prepare(net, [*net.in_blocks, net.mid_block, *net.out_blocks])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.03, betas=(0.9, 0.99))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 3, 1.0))
for parts in batches(pictures):
    for x0, noise, t, y in parts:
        loss = diffusion_loss(model, x0, noise, t, y) / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
finish()
