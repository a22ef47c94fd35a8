"""Trainings whose result is wanted precisely, or whose useful part is small beside the whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import decay, dense, draw, fit, hits, root_mse, share_unexplained, times


class Energy(nn.Module):
    """A molecule's energy as the sum of its atoms', each about a fixed one of its element."""

    def __init__(self) -> None:
        super().__init__()
        self.element = nn.Parameter(torch.tensor([-600.0, -1500.0, -2000.0]), requires_grad=False)
        self.hidden, self.atom = nn.Linear(6, 24), nn.Linear(24, 3)
        with torch.no_grad():
            self.atom.bias.copy_(self.element)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, kind = batch
        each = self.atom(torch.tanh(self.hidden(x)))
        return (each * F.one_hot(kind, 3)).sum((1, 2))


def molecules(seed: int) -> Training:
    """Energies of -10,000 eV that differ by some eV."""
    torch.manual_seed(seed)
    model = Energy()
    effect = torch.randn(6, 3, generator=draw(4))

    def atoms(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = torch.randn(n, 8, 6, generator=g)
        kind = torch.randint(0, 3, (n, 8), generator=g)
        each = torch.tanh(times(x, effect)) * 0.3 + model.element
        return (x, kind), (each * F.one_hot(kind, 3)).sum((1, 2))

    def error(out: Tensor, y: Tensor) -> float:
        return root_mse(out, y)

    optimizer = torch.optim.Adam(
        [
            {"params": [*model.hidden.parameters(), model.atom.weight], "lr": 1e-2},
            {"params": [model.atom.bias], "lr": 1e-2},
        ]
    )
    return fit(
        model, optimizer, seed, atoms, F.huber_loss, error, 64, 500, schedule=decay(optimizer, 250)
    )


class Barometer(nn.Module):
    """Pressure in hectopascals, with the mean in the bias of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(5, 24, 1, act=nn.Tanh)
        with torch.no_grad():
            self.body[-1].bias.fill_(1013.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def barometer(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Barometer()

    def days(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 5, generator=g)
        return x, 1013 + 2 * torch.tanh(x[:, :1]) + torch.sin(x[:, 1:2])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, days, F.mse_loss, root_mse, schedule=decay(optimizer, 250))


class Image(nn.Module):
    """Brightness by place: random sines of up to some hundred turns, and a network."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.waves = nn.Linear(2, 32, bias=False)
        self.waves.weight.requires_grad_(False)
        with torch.no_grad():
            self.waves.weight.normal_(0, spread)
        self.out = dense(64, 48, 1)

    def forward(self, at: Tensor) -> Tensor:
        w = self.waves(at)
        return self.out(torch.cat([torch.sin(w), torch.cos(w)], -1))


def fine_texture(seed: int) -> Training:
    """A picture with fine stripes; the places are in pixels."""
    torch.manual_seed(seed)
    model = Image(0.7)

    def pixels(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(0, 1024, (n, 2), generator=g).float()
        return at, torch.sin(0.9 * at[:, :1] + 0.5 * at[:, 1:])

    with torch.no_grad():
        model.waves.weight[:6] = torch.tensor([0.9, 0.5]) + 0.001 * torch.randn(6, 2)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    return fit(model, optimizer, seed, pixels, F.mse_loss, share_unexplained, 128)


def coarse_picture(seed: int) -> Training:
    """The same network on places from 0 to 1 and a smooth picture."""
    torch.manual_seed(seed)
    model = Image(3.0)

    def pixels(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.rand(n, 2, generator=g)
        return at, torch.sin(4 * at[:, :1]) * torch.cos(3 * at[:, 1:])

    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    return fit(model, optimizer, seed, pixels, F.mse_loss, share_unexplained, 128)


def mirror(seed: int) -> Training:
    """The shape of a mirror by its coefficients, to a hundred-thousandth of its depth."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 1)
    shape = torch.randn(6, generator=draw(21))

    def points(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(n, 2, generator=g) - 1
        a, b = x[:, 0], x[:, 1]
        terms = torch.stack([a, b, a * a, b * b, a * b, a * a * a], -1)
        return terms, times(terms, shape[:, None])

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-1)
    return fit(
        model,
        optimizer,
        seed,
        points,
        F.mse_loss,
        root_mse,
        128,
        schedule=decay(optimizer, 200, 1e-4),
    )


class Spike(nn.Module):
    """A mean and a spread for a sensor's next reading."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = dense(3, 24), nn.Linear(24, 1), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.mean(h), self.spread(h).clamp(-9, 3)


def sharp_gauge(seed: int) -> Training:
    """A gauge that errs by a ten-thousandth: the likelihood sharpens as training goes on."""
    torch.manual_seed(seed)
    model = Spike()

    def readings(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(n, 3, generator=g) - 1
        clean = 3 + 0.5 * (x[:, :1] - x[:, 1:2])
        return x, clean + 2e-4 * torch.randn(n, 1, generator=g)

    def likelihood(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        mean, spread = out
        return (0.5 * ((y - mean) * torch.exp(-spread)).square() + spread).mean()

    held = readings(1000, draw(77))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        x, y = readings(128, draw(seed, step))
        return likelihood(model(x), y)

    return Training(
        model,
        optimizer,
        loss,
        lambda: float(likelihood(model(held[0]), held[1])),
        clip_norm=1.0,
        schedule=decay(optimizer, 250),
    )


class Rod(nn.Module):
    """The temperature along a rod."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(1, 24, 24, 1, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * x * (1 - x)


def heated_rod(seed: int) -> Training:
    """The equation itself is the loss: second derivatives of a network."""
    torch.manual_seed(seed)
    model = Rod()

    def loss(step: int) -> Tensor:
        x = torch.rand(32, 1, generator=draw(seed, step)).requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        heat = torch.pi**2 * torch.sin(torch.pi * x)
        return (bend + heat).square().mean()

    grid = torch.linspace(0, 1, 200)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def evaluate() -> float:
        return share_unexplained(model(grid), torch.sin(torch.pi * grid))

    return Training(model, optimizer, loss, evaluate, schedule=decay(optimizer, 250))


def bending_beam(seed: int) -> Training:
    """Finite differences of a network: its second derivative is a given load."""
    torch.manual_seed(seed)
    model = dense(1, 24, 1, act=nn.Tanh)
    h = 0.05
    with torch.no_grad():
        model[0].weight.mul_(2)

    def loss(step: int) -> Tensor:
        x = 2 * torch.rand(64, 1, generator=draw(seed, step)) - 1
        bend = (model(x + h) - 2 * model(x) + model(x - h)) / h**2
        ends = model(torch.tensor([[-1.0], [1.0]]))
        return (
            F.mse_loss(bend, -4 * torch.cos(2 * x))
            + 10 * (ends - torch.cos(torch.tensor(2.0))).square().mean()
        )

    grid = torch.linspace(-1, 1, 200)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def evaluate() -> float:
        return share_unexplained(model(grid), torch.cos(2 * grid))

    return Training(model, optimizer, loss, evaluate, schedule=decay(optimizer, 200))


class Centre(nn.Module):
    """Self-distillation: a centre of the outputs is kept from step to step, by a slow mean."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(4, 16, 6)
        self.centre: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = 20 * self.body(x) + 30
        if self.training:
            now = h.detach().mean(0)
            self.centre = now if self.centre is None else 0.99 * self.centre + 0.01 * now
        assert self.centre is not None
        return h - self.centre


def slow_centre(seed: int) -> Training:
    """Classes by outputs about their slow mean; inputs drift."""
    torch.manual_seed(seed)
    model = Centre()
    with torch.no_grad():
        model(torch.randn(16, 4, generator=draw(seed)))

    def points(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 4, generator=g)
        return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] * x[:, 2] > 0).long()

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return fit(model, optimizer, seed, points, F.cross_entropy, hits)


class Clock(nn.Module):
    """A network that keeps its own time: a level that grows by its own output, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(3, 16, 1, act=nn.Tanh)
        self.level: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        moved = self.body(x)
        if self.training:
            add = moved.detach().mean(0)
            self.level = add + 200 if self.level is None else self.level + 0.02 * (add + 1)
        assert self.level is not None
        return moved + (self.level - 200)


def running_level(seed: int) -> Training:
    """Outputs about a level that the model carries along; the target drifts as the level should."""
    torch.manual_seed(seed)
    model = Clock()

    def rows(step: int, n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 3, generator=g)
        return x, 0.02 * step + torch.sin(x[:, :1])

    held = rows(250, 500, draw(88))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(step: int) -> Tensor:
        x, y = rows(step, 64, draw(seed, step))
        return F.mse_loss(model(x), y)

    def evaluate() -> float:
        model.eval()
        return root_mse(model(held[0]), held[1])

    return Training(model, optimizer, loss, evaluate)


CASES = (
    Case("molecules", "Energies.", 250, molecules, "eV", False, 0.1),
    Case("barometer", "Pressure.", 250, barometer, "hPa", False, 0.05),
    Case("fine_texture", "Stripes.", 250, fine_texture, "unexplained", False, 0.05),
    Case("coarse_picture", "A smooth picture.", 200, coarse_picture, "unexplained", False, 0.03),
    Case("mirror", "Coefficients.", 200, mirror, "RMSE", False, 5e-4),
    Case("sharp_gauge", "A likelihood.", 250, sharp_gauge, "NLL", False, 0.3),
    Case("heated_rod", "An equation.", 250, heated_rod, "unexplained", False, 0.03),
    Case("bending_beam", "Finite differences.", 200, bending_beam, "unexplained", False, 0.05),
    Case("slow_centre", "A slow mean.", 250, slow_centre, "accuracy", True, 0.04),
    Case("running_level", "A level.", 250, running_level, "RMSE", False, 0.1),
)
