"""PatchTST: a forecaster of many series with reversible instance norm, patches, residual attention."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

CONTEXT, HORIZON, SERIES, PATCH, STRIDE = 96, 24, 5, 16, 8


class RevIN(nn.Module):
    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.affine_weight = nn.Parameter(torch.linspace(0.8, 1.2, num_features))
        self.affine_bias = nn.Parameter(torch.linspace(-0.1, 0.1, num_features))

    def normalize(self, x):
        self.mean = torch.mean(x, dim=1, keepdim=True).detach()
        self.stdev = torch.sqrt(
            torch.var(x, dim=1, keepdim=True, unbiased=False) + self.eps
        ).detach()
        x = (x - self.mean) / self.stdev
        return x * self.affine_weight + self.affine_bias

    def denormalize(self, x):
        x = (x - self.affine_bias) / (self.affine_weight + self.eps * self.eps)
        return x * self.stdev + self.mean

    def forward(self, x, mode):
        return self.normalize(x) if mode == "norm" else self.denormalize(x)


class MultiheadAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.scale = self.d_k**-0.5
        self.W_Q = nn.Linear(d_model, d_model)
        self.W_K = nn.Linear(d_model, d_model)
        self.W_V = nn.Linear(d_model, d_model)
        self.to_out = nn.Linear(d_model, d_model)
        self.attn_dropout = nn.Dropout(args.dropout)

    def forward(self, x, prev=None):
        bs, length, _ = x.shape
        q_s = self.W_Q(x).view(bs, length, self.n_heads, self.d_k).transpose(1, 2)
        k_s = self.W_K(x).view(bs, length, self.n_heads, self.d_k).permute(0, 2, 3, 1)
        v_s = self.W_V(x).view(bs, length, self.n_heads, self.d_k).transpose(1, 2)
        attn_scores = torch.matmul(q_s, k_s) * self.scale
        if prev is not None:
            attn_scores = attn_scores + prev
        attn_weights = self.attn_dropout(F.softmax(attn_scores, dim=-1))
        output = torch.matmul(attn_weights, v_s)
        output = output.transpose(1, 2).contiguous().view(bs, length, -1)
        return self.to_out(output), attn_scores


class TSTEncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.self_attn = MultiheadAttention(d_model, n_heads)
        self.dropout_attn = nn.Dropout(args.dropout)
        self.norm_attn = nn.LayerNorm(d_model)
        self.ff = nn.Sequential(
            nn.Linear(d_model, d_ff),
            nn.GELU(),
            nn.Dropout(args.dropout),
            nn.Linear(d_ff, d_model),
        )
        self.norm_ffn = nn.LayerNorm(d_model)

    def forward(self, src, prev=None):
        src2, scores = self.self_attn(src, prev)
        src = self.norm_attn(src + self.dropout_attn(src2))
        src = self.norm_ffn(src + self.ff(src))
        return src, scores


class FlattenHead(nn.Module):
    def __init__(self, d_model, patch_num):
        super().__init__()
        self.linear = nn.Linear(d_model * patch_num, HORIZON)

    def forward(self, x):
        return self.linear(x.transpose(-1, -2).flatten(start_dim=-2))


class PatchTST(nn.Module):
    def __init__(self, d_model=48, n_layers=3, n_heads=4):
        super().__init__()
        self.revin_layer = RevIN(SERIES)
        patch_num = (CONTEXT - PATCH) // STRIDE + 2
        self.W_P = nn.Linear(PATCH, d_model)
        self.W_pos = nn.Parameter(torch.empty(patch_num, d_model).uniform_(-0.2, 0.2))
        self.dropout = nn.Dropout(args.dropout)
        self.layers = nn.ModuleList(
            TSTEncoderLayer(d_model, n_heads, 2 * d_model) for _ in range(n_layers)
        )
        self.head = FlattenHead(d_model, patch_num)

    def forward(self, z):
        z = self.revin_layer(z, "norm")
        z = z.permute(0, 2, 1)
        z = F.pad(z, (0, STRIDE), mode="replicate")
        z = z.unfold(dimension=-1, size=PATCH, step=STRIDE)
        bs, n_vars, patch_num, _ = z.shape
        u = self.W_P(z).reshape(bs * n_vars, patch_num, -1)
        u = self.dropout(u + self.W_pos)
        scores = None
        for layer in self.layers:
            u, scores = layer(u, scores)
        z = u.reshape(bs, n_vars, patch_num, -1)
        z = self.head(z).permute(0, 2, 1)
        return self.revin_layer(z.float(), "denorm")


def windows(g):
    """Seasonal series with a level each; what follows the window has gaps."""
    time = torch.arange(CONTEXT + HORIZON, dtype=torch.float32)[None, :, None]
    phase = torch.rand(16, 1, SERIES, generator=g) * 2 * math.pi
    level = torch.randn(16, 1, SERIES, generator=g) * 3
    slope = torch.randn(16, 1, SERIES, generator=g) * 0.02
    series = torch.sin(2 * math.pi * time / 24 + phase) + level + slope * time
    series = series + 0.2 * torch.randn(series.shape, generator=g)
    batch_x, batch_y = series[:, :CONTEXT], series[:, CONTEXT:]
    observed = torch.rand(batch_y.shape, generator=g) > 0.15
    return batch_x, batch_y, observed


def masked_loss(outputs, batch_y, observed):
    huber = F.smooth_l1_loss(outputs, batch_y, beta=0.5, reduction="none")
    horizon = torch.linspace(1.2, 0.8, HORIZON)[None, :, None]
    return (huber * horizon * observed).sum()


net = PatchTST()
model = prepare(net, net.layers)
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=2e-3, total_steps=20, pct_start=0.3, cycle_momentum=False
)
for parts in batches(windows):
    optimizer.zero_grad()
    count = torch.tensor(float(sum(observed.sum() for _, _, observed in parts)))
    if world > 1:
        dist.all_reduce(count)
    for batch_x, batch_y, observed in parts:
        with autocast():
            outputs = model(batch_x)
        loss = masked_loss(outputs, batch_y, observed)
        loss = loss * world / count
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
