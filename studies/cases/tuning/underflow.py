"""Trainings whose gradients are small: means over many elements, small units, late training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning.shared import (
    TEST,
    accuracy,
    cosine,
    digit_batch,
    digits,
    generator,
    mlp,
    relative_rmse,
    small_output,
    supervised,
)


def tones(count: int, length: int, g: torch.Generator) -> Tensor:
    """Sounds of three tones each, (count, 1, length), as loud as speech: about 0.05."""
    t = torch.arange(length) / length
    pitch = 4 + 60 * torch.rand(count, 3, 1, generator=g)
    phase = 6.28 * torch.rand(count, 3, 1, generator=g)
    return (0.03 * torch.sin(6.2832 * pitch * t + phase)).sum(1, keepdim=True)


def sound_denoiser(seed: int) -> Training:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv1d(1, 4, 15, padding=7), nn.Tanh()]
    layers += [nn.Conv1d(4, 4, 9, padding=4), nn.Tanh(), nn.Conv1d(4, 1, 15, padding=7)]
    model = nn.Sequential(*layers)

    def sounds(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        clean = tones(count, 4096, g)
        return clean + 0.02 * torch.randn(clean.shape, generator=g), clean

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=4e-3),
        lambda step: sounds(8, generator(seed, step)),
        F.mse_loss,
        sounds(16, generator(TEST)),
        relative_rmse,
    )


def blobs(count: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures (count, 1, size, size) of a bright disc each on noise, and its mask."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = size * (0.2 + 0.6 * torch.rand(count, 2, 1, 1, generator=g))
    near = (x - centre[:, 0]) ** 2 + (y - centre[:, 1]) ** 2 < (size / 12) ** 2
    mask = near.float()[:, None]
    return 0.5 * mask + 0.3 * torch.randn(mask.shape, generator=g), mask


def focal_anchors(seed: int) -> Training:
    """Dense detection whose loss is a mean over all anchors."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(8, 9, 3, padding=1))
    nn.init.constant_(model[-1].bias, -4.6)

    def focal(logits: Tensor, y: Tensor) -> Tensor:
        target = F.max_pool2d(y, 2).expand_as(logits)
        each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p = torch.sigmoid(logits)
        missed = torch.where(target > 0, 1 - p, p)
        return (missed**2 * each).mean()

    def overlap(out: Tensor, y: Tensor) -> float:
        found, target = out.mean(1, keepdim=True) > 0, F.max_pool2d(y, 2) > 0
        return float((found & target).sum() / (found | target).sum())

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda step: blobs(8, 96, generator(seed, step)),
        focal,
        blobs(16, 96, generator(TEST)),
        overlap,
    )


def many_words(seed: int) -> Training:
    """Next word of 4,000 by the word before, with a full softmax."""
    torch.manual_seed(seed)
    follower = torch.randint(0, 4000, (4000,), generator=generator(5))
    model = nn.Sequential(nn.Embedding(4000, 16), nn.Linear(16, 4000))

    def words(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = (3999 * torch.rand(count, generator=g) ** 3).long()
        random = (3999 * torch.rand(count, generator=g) ** 3).long()
        return x, torch.where(torch.rand(count, generator=g) < 0.7, follower[x], random)

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        lambda step: words(1024, generator(seed, step)),
        F.cross_entropy,
        words(3000, generator(TEST)),
        lambda out, y: float(F.cross_entropy(out, y)),
    )


def deep_sigmoid(seed: int) -> Training:
    torch.manual_seed(seed)
    model = mlp(10, 24, 24, 24, 24, 24, 1, activation=nn.Sigmoid)

    def points(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 10, generator=g)
        return x, (x[:, :1] * x[:, 1:2]).tanh() + 0.5 * x[:, 2:3]

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: points(512, generator(seed, step)),
        F.mse_loss,
        points(2000, generator(TEST)),
        relative_rmse,
    )


def bridge(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Loads on a beam (kN) and its deflections at 48 places, in metres: about a millimetre."""
    load, where = 1 + 4 * torch.rand(count, 1, generator=g), torch.rand(count, 1, generator=g)
    place = torch.linspace(0, 1, 48)
    shape = torch.where(
        place < where,
        place * (1 - where) * (1 - place**2 - (1 - where) ** 2),
        where * (1 - place) * (1 - where**2 - (1 - place) ** 2),
    )
    return torch.cat([load / 5, where], 1), 5e-3 * load * shape


def deflection_metres(seed: int) -> Training:
    torch.manual_seed(seed)
    model = small_output(mlp(2, 48, 48, 48, activation=nn.Tanh))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(
        model,
        optimizer,
        lambda step: bridge(256, generator(seed, step)),
        F.mse_loss,
        bridge(1000, generator(TEST)),
        relative_rmse,
        schedule=cosine(optimizer, 500),
    )


def deflection_deep(seed: int) -> Training:
    """The same with a softer activation, three layers and RMSprop."""
    torch.manual_seed(seed)
    model = small_output(mlp(2, 32, 32, 32, 48, activation=nn.GELU))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    return supervised(
        model,
        optimizer,
        lambda step: bridge(256, generator(seed, step)),
        F.mse_loss,
        bridge(1000, generator(TEST)),
        relative_rmse,
        schedule=cosine(optimizer, 500),
    )


def reaction(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two rates and 32 times to concentrations (mol/l) of a product: up to 0.002."""
    rates = 0.5 + 2 * torch.rand(count, 2, generator=g)
    t = torch.linspace(0.1, 3, 32)
    a, b = rates[:, :1], rates[:, 1:] + 0.01
    return rates, 0.002 * a / (b - a) * (torch.exp(-a * t) - torch.exp(-b * t))


def concentrations(seed: int) -> Training:
    torch.manual_seed(seed)
    model = small_output(mlp(2, 64, 64, 32, activation=nn.SiLU))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    return supervised(
        model,
        optimizer,
        lambda step: reaction(256, generator(seed, step)),
        F.mse_loss,
        reaction(1000, generator(TEST)),
        relative_rmse,
        schedule=cosine(optimizer, 400),
    )


class Picture(nn.Module):
    """Coordinates to brightness, by sines of a first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 48)
        self.body = mlp(48, 48, 48, 1)
        nn.init.uniform_(self.first.weight, -8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.sin(self.first(x)))


def picture_fit(seed: int) -> Training:
    """One picture of 48 × 48, whole in every step, for long: the error keeps falling."""
    torch.manual_seed(seed)
    axis = torch.linspace(-1, 1, 48)
    x = torch.cartesian_prod(axis, axis)
    y = 0.5 + 0.2 * torch.sin(4 * x[:, :1] + 3 * x[:, 1:] ** 2) * torch.cos(5 * x[:, 1:])
    model = Picture()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return supervised(
        model,
        optimizer,
        lambda _: (x, y),
        F.mse_loss,
        (x, y),
        relative_rmse,
        schedule=cosine(optimizer, 250),
    )


def distilled_digits(seed: int) -> Training:
    """Soft classes of a teacher at temperature 6; the loss is a mean over classes and images."""
    torch.manual_seed(seed)
    images, classes, _, _ = digits()
    means = torch.stack([images[classes == c].mean(0).flatten() for c in range(10)])
    model = mlp(64, 32, 10)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = digit_batch(seed, step, 256)[0].flatten(1)
        return x, torch.softmax(-(torch.cdist(x, means) ** 2) / 6, 1)

    return supervised(
        model,
        torch.optim.SGD(model.parameters(), lr=40.0, momentum=0.9),
        batch,
        lambda out, y: F.kl_div(F.log_softmax(out / 6, 1), y, reduction="mean"),
        (digits()[2].flatten(1), digits()[3]),
        accuracy,
    )


class Shared(nn.Module):
    """One trunk, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(2, 48, 48, activation=nn.Tanh)
        self.deflection, self.side = nn.Linear(48, 48), nn.Linear(48, 2)

    def forward(self, x: Tensor, *, deflection: bool) -> Tensor:
        h = torch.tanh(self.trunk(x))
        return self.deflection(h) if deflection else self.side(h)


def alternating_tasks(seed: int) -> Training:
    """Even steps classify, odd steps regress deflections in metres."""
    torch.manual_seed(seed)
    model = Shared()
    test = bridge(1000, generator(TEST))

    def loss(step: int) -> Tensor:
        x, y = bridge(256, generator(seed, step))
        if step % 2:
            return F.mse_loss(model(x, deflection=True), y)
        return F.cross_entropy(model(x, deflection=False), (x[:, 1] > 0.5).long())

    def evaluate() -> float:
        return relative_rmse(model(test[0], deflection=True), test[1])

    parts = [model.trunk.parameters(), model.deflection.parameters(), model.side.parameters()]
    groups = [{"params": list(p)} for p in parts]
    with torch.no_grad():
        model.deflection.weight.mul_(0.1)
        model.deflection.bias.zero_()
    optimizer = torch.optim.Adam(groups, lr=5e-3)
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 500))


def spiky_regression(seed: int) -> Training:
    """Deflections with now and then a batch with a wrong load."""
    torch.manual_seed(seed)
    model = small_output(mlp(2, 48, 48, 48, activation=nn.Tanh))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = bridge(256, generator(seed, step))
        return x, y * (30 if step % 97 == 50 else 1)

    return supervised(
        model,
        optimizer,
        batch,
        F.mse_loss,
        bridge(1000, generator(TEST)),
        relative_rmse,
        clip_norm=1e-3,
        schedule=cosine(optimizer, 500),
    )


class String(nn.Module):
    """A field over place and time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2, 24, 24, 1, activation=nn.Tanh)

    def forward(self, points: Tensor) -> Tensor:
        return self.body(points)


def heat_pinn(seed: int) -> Training:
    """The heat equation by its residual, u in units of 1."""
    torch.manual_seed(seed)
    model = String()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(step: int) -> Tensor:
        g = generator(seed, step)
        p = torch.rand(128, 2, generator=g).requires_grad_()
        u = model(p)
        (first,) = torch.autograd.grad(u.sum(), p, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), p, create_graph=True)
        inside = F.mse_loss(first[:, 1], 0.1 * second[:, 0])
        x = torch.rand(64, 1, generator=g)
        start = F.mse_loss(model(torch.cat([x, 0 * x], 1)), torch.sin(torch.pi * x))
        edge = torch.cat([torch.randint(0, 2, (64, 1), generator=g).float(), x], 1)
        return inside + start + (model(edge) ** 2).mean()

    def evaluate() -> float:
        p = torch.rand(1000, 2, generator=generator(TEST))
        exact = torch.exp(-0.1 * torch.pi**2 * p[:, 1:]) * torch.sin(torch.pi * p[:, :1])
        return relative_rmse(model(p), exact)

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 400))


CASES = (
    Case("sound_denoiser", "Sounds.", 80, sound_denoiser, "relative RMSE", False, 0.05),
    Case("focal_anchors", "Focal loss.", 80, focal_anchors, "overlap", True, 0.05),
    Case("many_words", "A softmax over 4,000 words.", 30, many_words, "cross-entropy", False, 0.1),
    Case("deep_sigmoid", "Five sigmoid layers.", 400, deep_sigmoid, "relative RMSE", False, 0.05),
    Case("deflection_metres", "A beam.", 500, deflection_metres, "relative RMSE", False, 0.02),
    Case("deflection_deep", "A beam, RMSprop.", 500, deflection_deep, "relative RMSE", False, 0.03),
    Case("concentrations", "A reaction.", 400, concentrations, "relative RMSE", False, 0.02),
    Case("picture_fit", "One picture.", 250, picture_fit, "relative RMSE", False, 0.02),
    Case("distilled_digits", "A teacher's classes.", 200, distilled_digits, "accuracy", True, 0.02),
    Case("alternating_tasks", "Two tasks.", 500, alternating_tasks, "relative RMSE", False, 0.03),
    Case("spiky_regression", "A wrong unit.", 500, spiky_regression, "relative RMSE", False, 0.03),
    Case("heat_pinn", "The heat equation.", 400, heat_pinn, "relative RMSE", False, 0.02),
)
