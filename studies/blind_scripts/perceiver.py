"""Point clouds: neighbourhoods as in PointNet++, latents that attend to them as in a Perceiver."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

SHAPES, POINTS, CENTROIDS, NEIGHBOURS, BATCH = 6, 128, 24, 8, 8
BANDS, MAX_FREQ, DIM, LATENTS, LATENT_DIM, HEADS = 4, 6.0, 32, 12, 48, 4


def index_points(points, idx):
    """Rows of ``points`` (batch, N, C) at ``idx`` (batch, ...)."""
    batch = torch.arange(points.size(0)).view(-1, *[1] * (idx.dim() - 1))
    return points[batch, idx]


@torch.no_grad()
def farthest_point_sample(xyz, npoint):
    """Starts at the first point; then always the one farthest from those that there are."""
    farthest = torch.zeros(xyz.size(0), dtype=torch.long)
    distance = torch.full(xyz.shape[:2], 1e10)
    centroids = []
    for _ in range(npoint):
        centroids.append(farthest)
        centroid = index_points(xyz, farthest).unsqueeze(1)
        distance = torch.minimum(distance, ((xyz - centroid) ** 2).sum(-1))
        farthest = distance.argmax(-1)
    return torch.stack(centroids, dim=1)


def fourier_encode(x):
    """Sines and cosines of each coordinate at some frequencies, and the coordinate."""
    scales = torch.linspace(1.0, MAX_FREQ / 2, BANDS)
    angles = x.unsqueeze(-1) * scales * math.pi
    encoded = torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return torch.cat((encoded, x), dim=-1)


class SetAbstraction(nn.Module):
    """Each centroid sees its nearest points, relative to itself, and keeps the largest answers."""

    def __init__(self, in_channel, mlp):
        super().__init__()
        self.mlp_convs, self.mlp_norms = nn.ModuleList(), nn.ModuleList()
        last_channel = in_channel
        for out_channel in mlp:
            self.mlp_convs.append(nn.Conv2d(last_channel, out_channel, 1))
            self.mlp_norms.append(nn.GroupNorm(4, out_channel))
            last_channel = out_channel

    def forward(self, xyz, normals):
        new_xyz = index_points(xyz, farthest_point_sample(xyz, CENTROIDS))
        sqrdists = ((new_xyz[:, :, None] - xyz[:, None]) ** 2).sum(-1)
        group_idx = sqrdists.topk(NEIGHBOURS, dim=-1, largest=False, sorted=False).indices
        grouped_xyz = index_points(xyz, group_idx) - new_xyz[:, :, None]
        grouped = torch.cat((grouped_xyz, index_points(normals, group_idx)), dim=-1)
        new_points = grouped.permute(0, 3, 1, 2)
        for conv, norm in zip(self.mlp_convs, self.mlp_norms, strict=True):
            new_points = F.relu(norm(conv(new_points)))
        return new_xyz, new_points.max(dim=-1).values.transpose(1, 2)


class GEGLU(nn.Module):
    def forward(self, x):
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


class FeedForward(nn.Module):
    def __init__(self, dim, mult=2):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.net = nn.Sequential(
            nn.Linear(dim, dim * mult * 2),
            GEGLU(),
            nn.Linear(dim * mult, dim),
            nn.Dropout(args.dropout),
        )

    def forward(self, x):
        return self.net(self.norm(x))


class Attention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=HEADS, dim_head=12):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        inner_dim = heads * dim_head
        self.norm = nn.LayerNorm(query_dim)
        self.norm_context = nn.LayerNorm(context_dim) if context_dim else None
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(context_dim or query_dim, inner_dim * 2, bias=False)
        self.dropout = nn.Dropout(args.dropout)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def split(self, t):
        b, n, _ = t.shape
        return t.view(b, n, self.heads, -1).transpose(1, 2)

    def forward(self, x, context=None):
        x = self.norm(x)
        context = x if context is None else self.norm_context(context)
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = self.split(q), self.split(k), self.split(v)
        sim = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        attn = self.dropout(sim.softmax(dim=-1))
        out = torch.matmul(attn, v).transpose(1, 2)
        return self.to_out(out.flatten(2))


class LatentBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn, self.ff = Attention(dim), FeedForward(dim)

    def forward(self, x):
        x = self.attn(x) + x
        return self.ff(x) + x


class PerceiverLayer(nn.Module):
    def __init__(self, dim, context_dim, self_per_cross=2):
        super().__init__()
        self.cross_attn, self.cross_ff = Attention(dim, context_dim), FeedForward(dim)
        self.latent_blocks = nn.ModuleList(LatentBlock(dim) for _ in range(self_per_cross))

    def forward(self, x, context):
        x = self.cross_attn(x, context) + x
        x = self.cross_ff(x) + x
        for block in self.latent_blocks:
            x = block(x)
        return x


class PointPerceiver(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.sa = SetAbstraction(6, [16, 32, DIM])
        context_dim = DIM + 3 * (2 * BANDS + 1)
        self.latents = nn.Parameter(torch.randn(LATENTS, LATENT_DIM) * 0.2)
        self.layers = nn.ModuleList(PerceiverLayer(LATENT_DIM, context_dim) for _ in range(depth))
        self.norm = nn.LayerNorm(LATENT_DIM)
        self.to_logits = nn.Linear(LATENT_DIM, SHAPES)

    def forward(self, points):
        xyz, normals = points.split(3, dim=-1)
        new_xyz, features = self.sa(xyz, normals)
        context = torch.cat((features.float(), fourier_encode(new_xyz)), dim=-1)
        x = self.latents.expand(points.size(0), -1, -1)
        for layer in self.layers:
            x = layer(x, context)
        return self.to_logits(self.norm(x.mean(dim=1)))


def clouds(g):
    """Superquadrics: a class has its exponent and proportions. Turned, scaled, jittered points."""
    labels = torch.randint(0, SHAPES, (BATCH,), generator=g)
    fixed = torch.Generator().manual_seed(4)
    exponents = 0.6 + 3.0 * torch.rand(SHAPES, generator=fixed)
    axes = 0.4 + 0.6 * torch.rand(SHAPES, 3, generator=fixed)
    p = exponents[labels][:, None, None]
    rays = torch.randn(BATCH, POINTS, 3, generator=g)
    rays = rays / rays.abs().pow(p).sum(-1, keepdim=True).pow(1 / p)
    normals = rays.sign() * rays.abs().pow((p - 1).clamp(min=0)) / axes[labels][:, None]
    normals = F.normalize(normals, dim=-1)
    xyz = rays * axes[labels][:, None]
    angle = 2 * math.pi * torch.rand(BATCH, generator=g)
    c, s, zero, one = angle.cos(), angle.sin(), torch.zeros(BATCH), torch.ones(BATCH)
    turn = torch.stack((c, -s, zero, s, c, zero, zero, zero, one), dim=1).view(BATCH, 3, 3)
    scale = 0.8 + 0.4 * torch.rand(BATCH, 1, 1, generator=g)
    xyz = scale * (xyz @ turn) + 0.01 * torch.randn(BATCH, POINTS, 3, generator=g)
    return torch.cat((xyz - xyz.mean(1, keepdim=True), normals @ turn), dim=-1), labels


net = PointPerceiver()
model = prepare(net, net.layers)
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.9, 0.999), weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=1e-5)
for parts in batches(clouds):
    for points, labels in parts:
        with autocast():
            pred = model(points)
        loss = F.cross_entropy(pred.float(), labels, label_smoothing=0.2)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
