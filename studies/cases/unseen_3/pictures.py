"""Pictures, points and distances: networks of convolutions and what is learned by them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import TEST, accuracy, cosine, mlp, nll, rng
from cases.unseen_3.shared import digits, fit


class Block(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def digits_mixed_up(seed: int) -> Training:
    """Digits by a residual network that learns from mixtures of two."""
    torch.manual_seed(seed)
    x, y = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), Block(16), nn.MaxPool2d(2), Block(16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)

    def loss(step: int) -> Tensor:
        g = rng(seed, step)
        rows, others = torch.randint(0, 1300, (2, 48), generator=g)
        share = 0.5 + 0.5 * float(torch.rand((), generator=g))
        logits = model(share * x[rows] + (1 - share) * x[others])
        return share * F.cross_entropy(logits, y[rows]) + (1 - share) * F.cross_entropy(
            logits, y[others]
        )

    def evaluate() -> float:
        model.eval()
        return accuracy(model(x[1300:]), y[1300:])

    return Training(
        model, optimizer, loss, evaluate, clip_norm=1.0, schedule=cosine(optimizer, 120, 0.05)
    )


def inverted(width: int, inside: int, *, stride: int) -> nn.Sequential:
    """An inverted residual block without its way around."""
    return nn.Sequential(
        nn.Conv2d(width, inside, 1, bias=False),
        nn.BatchNorm2d(inside),
        nn.ReLU6(),
        nn.Conv2d(inside, inside, 3, stride, 1, groups=inside, bias=False),
        nn.BatchNorm2d(inside),
        nn.ReLU6(),
        nn.Conv2d(inside, width, 1, bias=False),
        nn.BatchNorm2d(width),
    )


def digits_by_depthwise(seed: int) -> Training:
    """Digits by a small MobileNet."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), inverted(12, 36, stride=1), inverted(12, 36, stride=2),
        nn.Flatten(), nn.Linear(12 * 16, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return fit(
        model,
        optimizer,
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: accuracy(model(x), y),
        train=1300,
        batch=48,
        schedule=cosine(optimizer, 120),
    )


def digits_without_labels(seed: int) -> Training:
    """Two views of each digit are told from all others."""
    torch.manual_seed(seed)
    x = digits()[0]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def view(x: Tensor, g: torch.Generator) -> Tensor:
        move = torch.randint(-1, 2, (2,), generator=g).tolist()
        noise = 0.08 * torch.randn(x.shape, generator=g)
        return x.roll(move, (2, 3)) * (0.7 + 0.6 * torch.rand(len(x), 1, 1, 1, generator=g)) + noise

    def loss(step: int) -> Tensor:
        g = rng(seed, step)
        chosen = x[torch.randint(0, 1300, (64,), generator=g)]
        a, b = (F.normalize(model(view(chosen, g)), dim=1) for _ in range(2))
        logits = a @ b.T / 0.1
        same = torch.arange(64)
        return 0.5 * (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same))

    def evaluate() -> float:
        model.eval()
        g = rng(TEST)
        a, b = (F.normalize(model(view(x[1300:1500], g)), dim=1) for _ in range(2))
        return nll(a @ b.T / 0.1, torch.arange(200))

    return Training(model, optimizer, loss, evaluate)


class Coder(nn.Module):
    """A variational autoencoder of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = mlp(64, 96, 16), mlp(8, 96, 64)

    def bound(self, x: Tensor, noise: Tensor) -> Tensor:
        """Minus the evidence's bound in nats for each picture."""
        mean, log_var = self.down(x).chunk(2, 1)
        logits = self.up(mean + torch.exp(0.5 * log_var) * noise)
        pixels = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
        return pixels - 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)


def digits_by_their_bound(seed: int) -> Training:
    """Digits by a variational autoencoder, the loss summed over pixels."""
    torch.manual_seed(seed)
    x = digits()[0].flatten(1)
    model = Coder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(step: int) -> Tensor:
        g = rng(seed, step)
        rows = torch.randint(0, 1300, (64,), generator=g)
        return model.bound(x[rows], torch.randn(64, 8, generator=g)).mean()

    def evaluate() -> float:
        return float(model.bound(x[1300:], torch.randn(497, 8, generator=rng(TEST))).mean())

    return Training(model, optimizer, loss, evaluate)


class Codes(nn.Module):
    """An autoencoder that keeps one of 32 codes for each of four parts."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = mlp(64, 64, 32), mlp(32, 64, 64)
        self.book = nn.Embedding(32, 8)
        nn.init.uniform_(self.book.weight, -0.5, 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.down(x).reshape(-1, 8)
        book = self.book.weight
        distance = z.square().sum(1, keepdim=True) - 2 * z @ book.T + book.square().sum(1)
        code = self.book(distance.argmin(1))
        penalty = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return self.up((z + (code - z).detach()).reshape(-1, 32)), penalty


def digits_in_codes(seed: int) -> Training:
    """Digits by a vector-quantized autoencoder."""
    torch.manual_seed(seed)
    model = Codes()

    def loss(x: Tensor, _: Tensor) -> Tensor:
        out, penalty = model(x.flatten(1))
        return F.mse_loss(out, x.flatten(1)) + 0.1 * penalty

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        digits(),
        loss,
        lambda x, _: float(F.mse_loss(model(x.flatten(1))[0], x.flatten(1))),
        train=1300,
    )


class UNet(nn.Module):
    """Two scales of convolutions with a bridge between their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU())
        self.coarse = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        return self.out(torch.cat([fine, self.up(self.coarse(fine))], 1))


def cells_under_a_microscope(seed: int) -> Training:
    """A U-Net finds the pixels of generated cells by Dice's loss and the cross-entropy."""
    torch.manual_seed(seed)
    g = rng(TEST)
    place = torch.arange(24.0)
    centre, radius = (
        24 * torch.rand(400, 4, 2, generator=g),
        2 + 2 * torch.rand(400, 4, generator=g),
    )
    dx, dy = (place - centre[..., i, None] for i in (0, 1))
    far = dx.square()[:, :, None, :] + dy.square()[:, :, :, None]
    y = (far < radius.square()[..., None, None]).any(1, keepdim=True).float()
    x = 0.6 * y + 0.4 * torch.randn(y.shape, generator=g) + 0.5 * place / 24
    model = UNet()

    def dice(p: Tensor, y: Tensor) -> Tensor:
        return (2 * (p * y).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        entropy = F.binary_cross_entropy_with_logits(logits, y)
        return entropy + 1 - dice(torch.sigmoid(logits), y).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, y),
        loss,
        lambda x, y: float(dice((model(x) > 0).float(), y).mean()),
        train=320,
        batch=16,
    )


class Faces(nn.Module):
    """Directions of pictures and of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, 96), nn.BatchNorm1d(96), nn.PReLU(), nn.Linear(96, 24)
        )
        self.centres = nn.Parameter(torch.randn(10, 24))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(self.body(x.flatten(1))), F.normalize(self.centres))


def digits_by_angles(seed: int) -> Training:
    """Digits by ArcFace: an angle is added before the softmax."""
    torch.manual_seed(seed)
    model = Faces()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        cos = model(x).clamp(-1 + 1e-7, 1 - 1e-7)
        margin = 0.3 * F.one_hot(y, 10)
        return F.cross_entropy(30 * torch.cos(torch.acos(cos) + margin), y)

    return fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        seed,
        digits(),
        loss,
        lambda x, y: accuracy(model(x), y),
        train=1300,
    )


class Denoiser(nn.Module):
    """Predicts the noise of a picture at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = mlp(16, 32, 32, act=nn.SiLU)
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.body = nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1))
        self.out = nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 1, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        phase = t[:, None] * torch.exp(torch.arange(8) * 0.7)
        h = self.first(x) + self.time(torch.cat([phase.sin(), phase.cos()], 1))[..., None, None]
        return self.out(h + self.body(h))


def digits_from_noise(seed: int) -> Training:
    """A diffusion model of digits that predicts the noise."""
    torch.manual_seed(seed)
    x = 2 * digits()[0] - 1
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def error(x: Tensor, g: torch.Generator) -> Tensor:
        t = torch.rand(len(x), generator=g)
        noise = torch.randn(x.shape, generator=g)
        a = torch.cos(0.5 * torch.pi * t)[:, None, None, None]
        return F.mse_loss(model(a * x + (1 - a.square()).sqrt() * noise, t), noise)

    def loss(step: int) -> Tensor:
        g = rng(seed, step)
        return error(x[torch.randint(0, 1300, (32,), generator=g)], g)

    return Training(
        model,
        optimizer,
        loss,
        lambda: float(error(x[1300:], rng(TEST))),
        clip_norm=1.0,
    )


class PointNet(nn.Module):
    """A network of each point, and of the maximum over all."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.ReLU()
        )
        self.whole = mlp(64, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.each(x.transpose(1, 2)).amax(-1))


def shapes_by_their_points(seed: int) -> Training:
    """Spheres, cubes, cylinders and discs by points on them, turned at random."""
    torch.manual_seed(seed)
    g = rng(TEST)
    n, points = 800, 64
    ball = F.normalize(torch.randn(n, points, 3, generator=g), dim=-1)
    cube = 2 * torch.rand(n, points, 3, generator=g) - 1
    cube = cube / cube.abs().amax(-1, keepdim=True)
    round_ = F.normalize(ball[..., :2], dim=-1)
    tube = torch.cat([round_, cube[..., 2:]], -1)
    disc = torch.cat([round_ * torch.rand(n, points, 1, generator=g).sqrt(), 0 * cube[..., 2:]], -1)
    y = torch.arange(n) % 4
    x = torch.stack([ball, cube, tube, disc])[y, torch.arange(n)]
    turn = torch.linalg.qr(torch.randn(n, 3, 3, generator=g))[0]
    x = x @ turn + 0.05 * torch.randn(x.shape, generator=g)
    model = PointNet()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, y),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=600,
        batch=32,
    )


class Radiance(nn.Module):
    """Density and brightness of a plane by its Fourier features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2 + 2 * 2 * 6, 64, 64, 2)

    def forward(self, place: Tensor) -> tuple[Tensor, Tensor]:
        phase = (place[..., None] * 2.0 ** torch.arange(6)).flatten(-2)
        out = self.body(torch.cat([place, phase.sin(), phase.cos()], -1))
        return F.softplus(out[..., 0]), torch.sigmoid(out[..., 1])


def shine(density: Tensor, light: Tensor, step: float) -> Tensor:
    """What a camera sees along rays of (n, samples): light that is not covered before."""
    depth = density * step
    covered = torch.cumsum(depth, -1) - depth
    return (torch.exp(-covered) * (1 - torch.exp(-depth)) * light).sum(-1)


def discs_seen_from_around(seed: int) -> Training:
    """A radiance field of three discs in a plane, from rays through them."""
    torch.manual_seed(seed)
    g = rng(TEST)
    angle, shift = (
        6.2832 * torch.rand(2000, 1, generator=g),
        1.6 * torch.rand(2000, 1, generator=g) - 0.8,
    )
    way = torch.cat([angle.cos(), angle.sin()], 1)
    side = torch.cat([-angle.sin(), angle.cos()], 1)
    along = torch.linspace(-1.2, 1.2, 32)
    place = (shift * side)[:, None] + along[:, None] * way[:, None]
    discs = [(0.4, 0.1, 0.25, 0.9), (-0.3, 0.3, 0.2, 0.5), (-0.1, -0.4, 0.3, 0.2)]
    density, light = torch.zeros(2000, 32), torch.zeros(2000, 32)
    for x0, y0, radius, bright in discs:
        inside = ((place - torch.tensor([x0, y0])).square().sum(-1) < radius**2).float()
        density, light = density + 20 * inside, light + bright * inside
    model = Radiance()

    def error(place: Tensor, seen: Tensor) -> Tensor:
        return F.mse_loss(shine(*model(place), 0.075), seen)

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (place, shine(density, light, 0.075)),
        error,
        lambda *data: float(error(*data)) ** 0.5,
        train=1600,
        batch=48,
    )


CASES = (
    Case(
        "digits_mixed_up",
        "Digits by a residual network that learns from mixtures.",
        120,
        digits_mixed_up,
        "accuracy",
        True,
        0.06,
    ),
    Case(
        "digits_by_depthwise",
        "Digits by depthwise convolutions with batch norm.",
        120,
        digits_by_depthwise,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "digits_without_labels",
        "Views of digits by a contrastive loss of temperature 0.1.",
        120,
        digits_without_labels,
        "NLL among 200",
        False,
        0.3,
    ),
    Case(
        "digits_by_their_bound",
        "Digits by a variational autoencoder.",
        200,
        digits_by_their_bound,
        "nats",
        False,
        0.3,
    ),
    Case(
        "digits_in_codes",
        "Digits by a vector-quantized autoencoder.",
        200,
        digits_in_codes,
        "MSE",
        False,
        0.01,
    ),
    Case(
        "cells_under_a_microscope",
        "Cells by a U-Net with Dice's loss.",
        100,
        cells_under_a_microscope,
        "Dice",
        True,
        0.02,
    ),
    Case(
        "digits_by_angles",
        "Digits by ArcFace.",
        150,
        digits_by_angles,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "digits_from_noise",
        "A diffusion model of digits.",
        120,
        digits_from_noise,
        "MSE",
        False,
        0.01,
    ),
    Case(
        "shapes_by_their_points",
        "Shapes by points on them.",
        120,
        shapes_by_their_points,
        "NLL",
        False,
        0.1,
    ),
    Case(
        "discs_seen_from_around",
        "A radiance field in the plane.",
        200,
        discs_seen_from_around,
        "RMSE",
        False,
        0.015,
    ),
)
