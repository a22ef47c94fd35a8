"""N-BEATS on generated series: trend and seasonality stacks that share weights, a generic stack."""

import math

from common import args, autocast, batches, finish, nn, prepare, scaler, torch

HISTORY, HORIZON, BATCH = 36, 12, 24
LAYER_SIZE, LAYERS = 48, 4
TREND_BLOCKS, SEASONALITY_BLOCKS, GENERIC_BLOCKS = 2, 2, 3
DEGREE, HARMONICS = 3, 1


class NBeatsBlock(nn.Module):
    """Fully connected layers, then the coefficients of a basis: of the past and of the future."""

    def __init__(self, input_size, theta_size, basis_function, layers, layer_size):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(input_size, layer_size)]
            + [nn.Linear(layer_size, layer_size) for _ in range(layers - 1)]
        )
        self.dropout = nn.Dropout(args.dropout)
        self.basis_parameters = nn.Linear(layer_size, theta_size)
        self.basis_function = basis_function

    def forward(self, x):
        block_input = x
        for layer in self.layers:
            block_input = self.dropout(torch.relu(layer(block_input)))
        basis_parameters = self.basis_parameters(block_input)
        return self.basis_function(basis_parameters)


class GenericBasis(nn.Module):
    """The coefficients are the values themselves."""

    def __init__(self, backcast_size, forecast_size):
        super().__init__()
        self.backcast_size = backcast_size
        self.forecast_size = forecast_size

    def forward(self, theta):
        return theta[:, : self.backcast_size], theta[:, -self.forecast_size :]


class TrendBasis(nn.Module):
    """Polynomials of time."""

    def __init__(self, degree_of_polynomial, backcast_size, forecast_size):
        super().__init__()
        self.polynomial_size = degree_of_polynomial + 1
        backcast_time = torch.arange(backcast_size).float() / backcast_size
        forecast_time = torch.arange(forecast_size).float() / forecast_size
        self.backcast_time = nn.Parameter(
            torch.stack([backcast_time**i for i in range(self.polynomial_size)]),
            requires_grad=False,
        )
        self.forecast_time = nn.Parameter(
            torch.stack([forecast_time**i for i in range(self.polynomial_size)]),
            requires_grad=False,
        )

    def forward(self, theta):
        backcast_theta = theta[:, self.polynomial_size :]
        forecast_theta = theta[:, : self.polynomial_size]
        backcast = torch.einsum("bp,pt->bt", backcast_theta, self.backcast_time)
        forecast = torch.einsum("bp,pt->bt", forecast_theta, self.forecast_time)
        return backcast, forecast


class SeasonalityBasis(nn.Module):
    """Cosines and sines of the harmonics that the horizon resolves."""

    def __init__(self, harmonics, backcast_size, forecast_size):
        super().__init__()
        count = math.ceil(harmonics / 2 * forecast_size) - (harmonics - 1)
        frequency = torch.cat(
            [torch.zeros(1), torch.arange(harmonics, harmonics / 2 * forecast_size) / harmonics]
        )[None, :]
        backcast_grid = (
            -2 * math.pi * (torch.arange(backcast_size)[:, None] / forecast_size) * frequency
        )
        forecast_grid = (
            2 * math.pi * (torch.arange(forecast_size)[:, None] / forecast_size) * frequency
        )
        self.params_per_harmonic = count
        self.backcast_cos_template = self._template(torch.cos(backcast_grid))
        self.backcast_sin_template = self._template(torch.sin(backcast_grid))
        self.forecast_cos_template = self._template(torch.cos(forecast_grid))
        self.forecast_sin_template = self._template(torch.sin(forecast_grid))

    @staticmethod
    def _template(grid):
        return nn.Parameter(grid.transpose(0, 1).contiguous(), requires_grad=False)

    def forward(self, theta):
        n = self.params_per_harmonic
        backcast_cos = torch.einsum(
            "bp,pt->bt", theta[:, 2 * n : 3 * n], self.backcast_cos_template
        )
        backcast_sin = torch.einsum("bp,pt->bt", theta[:, 3 * n :], self.backcast_sin_template)
        backcast = backcast_sin + backcast_cos
        forecast_cos = torch.einsum("bp,pt->bt", theta[:, :n], self.forecast_cos_template)
        forecast_sin = torch.einsum("bp,pt->bt", theta[:, n : 2 * n], self.forecast_sin_template)
        forecast = forecast_sin + forecast_cos
        return backcast, forecast


class NBeats(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x, input_mask):
        residuals = x.flip(dims=(1,))
        input_mask = input_mask.flip(dims=(1,))
        forecast = x[:, -1:]
        for block in self.blocks:
            backcast, block_forecast = block(residuals)
            residuals = (residuals - backcast) * input_mask
            forecast = forecast + block_forecast
        return forecast


def build_model():
    """The blocks of a stack with a fixed basis are one block, used repeatedly."""
    trend_block = NBeatsBlock(
        HISTORY, 2 * (DEGREE + 1), TrendBasis(DEGREE, HISTORY, HORIZON), LAYERS, LAYER_SIZE
    )
    basis = SeasonalityBasis(HARMONICS, HISTORY, HORIZON)
    seasonality_block = NBeatsBlock(
        HISTORY, 4 * basis.params_per_harmonic, basis, LAYERS, LAYER_SIZE
    )
    generic_blocks = [
        NBeatsBlock(HISTORY, HISTORY + HORIZON, GenericBasis(HISTORY, HORIZON), LAYERS, LAYER_SIZE)
        for _ in range(GENERIC_BLOCKS)
    ]
    return NBeats(
        nn.ModuleList(
            [trend_block] * TREND_BLOCKS + [seasonality_block] * SEASONALITY_BLOCKS + generic_blocks
        )
    )


def divide_no_nan(a, b):
    return torch.where(b == 0, torch.zeros_like(a), a / b.masked_fill(b == 0, 1.0))


def smape_2_loss(forecast, target, mask):
    forecast = forecast.float()
    errors = divide_no_nan(2 * (forecast - target).abs(), forecast.abs() + target.abs())
    return (errors * mask).mean()


def windows(g):
    """Cuts of monthly series: a level, a trend, a season and noise. Young series are padded."""
    time = torch.arange(HISTORY + HORIZON).float()
    level = 1 + 4 * torch.rand(BATCH, 1, generator=g)
    slope = 0.03 * torch.randn(BATCH, 1, generator=g)
    phase = 2 * math.pi * torch.rand(BATCH, 1, generator=g)
    strength = 0.4 * torch.rand(BATCH, 1, generator=g)
    season = torch.sin(2 * math.pi * time / 12 + phase) + 0.4 * torch.cos(math.pi * time / 3)
    noise = 0.05 * torch.randn(BATCH, HISTORY + HORIZON, generator=g)
    series = level * (1 + slope * time / 12 + strength * season * 0.5 + noise)
    insample, outsample = series[:, :HISTORY], series[:, HISTORY:]
    age = torch.randint(HISTORY // 2, HISTORY + 1, (BATCH, 1), generator=g)
    age[::2] = HISTORY
    insample_mask = (torch.arange(HISTORY) >= HISTORY - age).float()
    known = torch.randint(HORIZON - 3, HORIZON + 1, (BATCH, 1), generator=g)
    outsample_mask = (torch.arange(HORIZON) < known).float()
    return insample * insample_mask, insample_mask, outsample * outsample_mask, outsample_mask


net = build_model()
model = prepare(net, dict.fromkeys(net.blocks))
optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
for parts in batches(windows):
    for x, x_mask, y, y_mask in parts:
        with autocast():
            forecast = model(x, x_mask)
        loss = smape_2_loss(forecast, y, y_mask) / args.accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
finish()
