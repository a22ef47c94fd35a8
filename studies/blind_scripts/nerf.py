"""A neural radiance field as nerf-pytorch has it: Fourier features, coarse and fine, white background."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

NEAR, FAR, SAMPLES, IMPORTANCE = 2.0, 6.0, 16, 16


class Embedder(nn.Module):
    def __init__(self, num_freqs, include_input=True):
        super().__init__()
        self.include_input = include_input
        self.out_dim = 3 * (2 * num_freqs + include_input)
        self.register_buffer("freq_bands", 2.0 ** torch.linspace(0.0, num_freqs - 1, num_freqs))

    def forward(self, x):
        scaled = x[..., None, :] * self.freq_bands[:, None]
        features = torch.cat([torch.sin(scaled), torch.cos(scaled)], dim=-1).flatten(-2)
        return torch.cat([x, features], -1) if self.include_input else features


class NeRF(nn.Module):
    def __init__(self, input_ch, input_ch_views, D=6, W=48, skips=(3,)):
        super().__init__()
        self.skips = skips
        self.pts_linears = nn.ModuleList(
            [nn.Linear(input_ch, W)]
            + [nn.Linear(W + input_ch if i in skips else W, W) for i in range(D - 1)]
        )
        self.views_linears = nn.ModuleList([nn.Linear(input_ch_views + W, W // 2)])
        self.feature_linear = nn.Linear(W, W)
        self.alpha_linear = nn.Linear(W, 1)
        self.rgb_linear = nn.Linear(W // 2, 3)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=2.0**0.5)
                nn.init.zeros_(module.bias)
        nn.init.constant_(self.alpha_linear.bias, 0.2)

    def forward(self, input_pts, input_views):
        h = input_pts
        for i, layer in enumerate(self.pts_linears):
            h = F.relu(layer(h))
            if i in self.skips:
                h = torch.cat([input_pts, h], -1)
        alpha = self.alpha_linear(h)
        feature = self.feature_linear(h)
        h = torch.cat([feature, input_views], -1)
        for layer in self.views_linears:
            h = F.relu(layer(h))
        rgb = self.rgb_linear(h)
        return torch.cat([rgb, alpha], -1)


def raw2outputs(raw, z_vals, rays_d, white_bkgd=True):
    raw = raw.float()
    dists = z_vals[..., 1:] - z_vals[..., :-1]
    dists = torch.cat([dists, torch.full_like(dists[..., :1], 1e10)], -1)
    dists = dists * torch.norm(rays_d[..., None, :], dim=-1)
    rgb = torch.sigmoid(raw[..., :3])
    alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
    survival = torch.cat([torch.ones_like(alpha[..., :1]), 1.0 - alpha + 1e-10], -1)
    weights = alpha * torch.cumprod(survival, -1)[..., :-1]
    rgb_map = torch.sum(weights[..., None] * rgb, -2)
    acc_map = torch.sum(weights, -1)
    if white_bkgd:
        rgb_map = rgb_map + (1.0 - acc_map[..., None])
    return rgb_map, weights


def sample_pdf(bins, weights, N_samples):
    weights = weights + 1e-5
    pdf = weights / torch.sum(weights, -1, keepdim=True)
    cdf = torch.cumsum(pdf, -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    u = torch.linspace(0.0, 1.0, N_samples + 2)[1:-1].expand(cdf.shape[0], N_samples).contiguous()
    inds = torch.searchsorted(cdf.contiguous(), u, right=True)
    below = (inds - 1).clamp(min=0)
    above = inds.clamp(max=cdf.shape[-1] - 1)
    cdf_below, cdf_above = torch.gather(cdf, 1, below), torch.gather(cdf, 1, above)
    bins_below, bins_above = torch.gather(bins, 1, below), torch.gather(bins, 1, above)
    denom = cdf_above - cdf_below
    denom = torch.where(denom < 1e-5, torch.ones_like(denom), denom)
    t = (u - cdf_below) / denom
    return bins_below + t * (bins_above - bins_below)


class Renderer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_fn = Embedder(6)
        self.embeddirs_fn = Embedder(3)
        self.coarse = NeRF(self.embed_fn.out_dim, self.embeddirs_fn.out_dim)
        self.fine = NeRF(self.embed_fn.out_dim, self.embeddirs_fn.out_dim)

    def run_network(self, network, pts, viewdirs):
        embedded = self.embed_fn(pts)
        dirs = self.embeddirs_fn(viewdirs)[:, None].expand(-1, pts.shape[1], -1)
        return network(embedded, dirs)

    def forward(self, rays_o, rays_d, jitter):
        viewdirs = rays_d / torch.norm(rays_d, dim=-1, keepdim=True)
        t_vals = torch.linspace(0.0, 1.0, SAMPLES)
        z_vals = (NEAR * (1.0 - t_vals) + FAR * t_vals).expand(rays_o.shape[0], SAMPLES)
        mids = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
        upper = torch.cat([mids, z_vals[..., -1:]], -1)
        lower = torch.cat([z_vals[..., :1], mids], -1)
        z_vals = lower + (upper - lower) * jitter
        pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
        raw = self.run_network(self.coarse, pts, viewdirs)
        rgb_map_0, weights = raw2outputs(raw, z_vals, rays_d)
        z_vals_mid = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
        z_samples = sample_pdf(z_vals_mid, weights[..., 1:-1], IMPORTANCE).detach()
        z_vals, _ = torch.sort(torch.cat([z_vals, z_samples], -1), -1)
        pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
        raw = self.run_network(self.fine, pts, viewdirs)
        rgb_map, _ = raw2outputs(raw, z_vals, rays_d)
        return rgb_map, rgb_map_0


def rays(g):
    """Pixels of cameras on a sphere that look at a lit ball on white."""
    origin = F.normalize(torch.randn(96, 3, generator=g), dim=-1) * 4.0
    forward = F.normalize(-origin, dim=-1)
    right = F.normalize(torch.linalg.cross(forward, torch.tensor([0.0, 0.0, 1.0]).expand(96, 3)))
    up = torch.linalg.cross(right, forward)
    pixel = torch.rand(96, 2, generator=g) * 0.8 - 0.4
    rays_d = forward + pixel[:, :1] * right + pixel[:, 1:] * up
    unit = F.normalize(rays_d, dim=-1)
    along = (origin * unit).sum(-1, keepdim=True)
    under = along.square() - (origin.square().sum(-1, keepdim=True) - 1.0)
    surface = origin + unit * (-along - under.clamp(min=0).sqrt())
    target = torch.where(under > 0, surface * 0.4 + 0.5, torch.ones(3))
    jitter = torch.rand(96, SAMPLES, generator=g)
    return origin, rays_d, target, jitter


net = Renderer()
model = prepare(net, [net.coarse, net.fine])
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.999), eps=1e-7)
decay_rate, decay_steps = 0.1, 100
for global_step, parts in enumerate(batches(rays)):
    optimizer.zero_grad()
    for rays_o, rays_d, target, jitter in parts:
        with autocast():
            rgb, rgb0 = model(rays_o, rays_d, jitter)
        img_loss = F.mse_loss(rgb, target)
        img_loss0 = F.mse_loss(rgb0, target)
        loss = img_loss + img_loss0
        scaler.scale(loss / args.accum).backward()
    scaler.step(optimizer)
    scaler.update()
    for param_group in optimizer.param_groups:
        param_group["lr"] = 5e-4 * decay_rate ** ((global_step + 1) / decay_steps)
finish()
