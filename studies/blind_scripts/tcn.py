"""Sales of many shops forecast by a temporal convolutional network: quantiles of each next day."""

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world
from torch.nn.utils.parametrizations import weight_norm

SHOPS, SERIES, DAYS, KERNEL = 30, 16, 36, 3
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


class Chomp1d(nn.Module):
    """Cuts what the padding has added at the end."""

    def __init__(self, chomp_size):
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x):
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_inputs, n_outputs, dilation):
        super().__init__()
        padding = (KERNEL - 1) * dilation
        self.conv1 = weight_norm(
            nn.Conv1d(n_inputs, n_outputs, KERNEL, padding=padding, dilation=dilation)
        )
        self.chomp1 = Chomp1d(padding)
        self.dropout1 = nn.Dropout(args.dropout)
        self.conv2 = weight_norm(
            nn.Conv1d(n_outputs, n_outputs, KERNEL, padding=padding, dilation=dilation)
        )
        self.chomp2 = Chomp1d(padding)
        self.dropout2 = nn.Dropout(args.dropout)
        self.downsample = nn.Conv1d(n_inputs, n_outputs, 1) if n_inputs != n_outputs else None

    def forward(self, x):
        out = self.dropout1(F.relu(self.chomp1(self.conv1(x))))
        out = self.dropout2(F.relu(self.chomp2(self.conv2(out))))
        res = x if self.downsample is None else self.downsample(x)
        return F.relu(out + res)


class TemporalConvNet(nn.Module):
    def __init__(self, num_inputs, num_channels):
        super().__init__()
        layers = []
        for i, out_channels in enumerate(num_channels):
            dilation_size = 2**i
            in_channels = num_inputs if i == 0 else num_channels[i - 1]
            layers.append(TemporalBlock(in_channels, out_channels, dilation_size))
        self.network = nn.Sequential(*layers)

    def forward(self, x):
        return self.network(x)


class MeanScaler(nn.Module):
    """Divides each series by the mean of its observed days, at least by a small number."""

    def __init__(self, minimum=1e-3):
        super().__init__()
        self.minimum = minimum

    def forward(self, data, observed):
        total = (data.abs() * observed).sum(dim=1, keepdim=True)
        count = observed.sum(dim=1, keepdim=True)
        scale = total / count.clamp(min=1.0)
        scale = scale.clamp(min=self.minimum)
        return data / scale, scale


class FeatureEmbedder(nn.Module):
    def __init__(self, cardinalities, dims):
        super().__init__()
        self.embedders = nn.ModuleList(
            nn.Embedding(c, d) for c, d in zip(cardinalities, dims, strict=True)
        )

    def forward(self, features):
        embedded = [embed(features[..., index]) for index, embed in enumerate(self.embedders)]
        return torch.cat(embedded, dim=-1)


class Forecaster(nn.Module):
    def __init__(self, channels=(32, 32, 48, 48)):
        super().__init__()
        self.scaler = MeanScaler()
        self.static = FeatureEmbedder([SHOPS, 4], [8, 3])
        self.calendar = FeatureEmbedder([7], [4])
        self.tcn = TemporalConvNet(1 + 1 + 1 + 11 + 4, channels)
        self.norm = nn.LayerNorm(channels[-1])
        self.proj = nn.Linear(channels[-1], len(QUANTILES))

    def forward(self, past, observed, static, weekday):
        """Forecasts, in units of the series, of the day after each day but the last."""
        scaled, scale = self.scaler(past, observed)
        length = past.shape[1] - 1
        lagged = scaled[:, :-1] * observed[:, :-1]
        fixed = self.static(static).unsqueeze(1).expand(-1, length, -1)
        level = torch.log(scale).unsqueeze(1).expand(-1, length, 1)
        features = torch.cat(
            [
                lagged.unsqueeze(-1),
                observed[:, :-1].unsqueeze(-1),
                level,
                fixed,
                self.calendar(weekday[:, 1:].unsqueeze(-1)),
            ],
            dim=-1,
        )
        hidden = self.tcn(features.transpose(1, 2)).transpose(1, 2)
        return self.proj(self.norm(hidden)), scale


def quantile_loss(forecast, target, observed):
    """The sum of the pinball losses over the observed days."""
    errors = target.unsqueeze(-1) - forecast
    losses = torch.maximum(QUANTILES * errors, (QUANTILES - 1) * errors)
    return (losses.sum(dim=-1) * observed).sum()


def sales(g):
    """Weekly patterns at each shop's level; some days are missing."""
    shop = torch.randint(0, SHOPS, (SERIES,), generator=g)
    kind = shop % 4
    first = torch.randint(0, 7, (SERIES, 1), generator=g)
    weekday = (first + torch.arange(DAYS)) % 7
    level = torch.exp(1.5 * torch.randn(SERIES, 1, generator=g) + 1.0)
    week = 1.0 + 0.5 * torch.sin(weekday * 0.9 + kind[:, None])
    past = level * week * (0.6 + 0.8 * torch.rand(SERIES, DAYS, generator=g))
    observed = (torch.rand(SERIES, DAYS, generator=g) > 0.15).float()
    return past, observed, torch.stack([shop, kind], dim=1), weekday


net = Forecaster()
model = prepare(net, net.tcn.network)
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
for parts in batches(sales):
    optimizer.zero_grad()
    days = sum(observed[:, 1:].sum() for _, observed, *_ in parts)
    if world > 1:
        dist.all_reduce(days)
    for past, observed, static, weekday in parts:
        with autocast():
            forecast, scale = model(past, observed, static, weekday)
        target = past[:, 1:] / scale
        loss = quantile_loss(forecast.float(), target, observed[:, 1:]) * world / days
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
