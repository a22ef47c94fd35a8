"""Trainings whose errors are small numbers: small units, means over much, slight signals."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import (
    HELD_OUT,
    dense,
    draw,
    fit,
    hits,
    of_table,
    root_mse,
    share_unexplained,
    standard,
    times,
)


class InMoles(nn.Module):
    """A concentration in mol/l from absorbances."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(8, 32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return 1e-4 * self.body(x)


def concentration(seed: int) -> Training:
    torch.manual_seed(seed)
    mix = torch.randn(8, generator=draw(5))

    def spectra(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 8, generator=g)
        return x, 1e-4 * torch.tanh(times(x, mix[:, None]) / 3)

    model = InMoles()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-16)
    return fit(model, optimizer, seed, spectra, F.mse_loss, share_unexplained, 128)


class TwoHeads(nn.Module):
    """Classes and a height map of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(1, 8, 3, padding=1)
        self.classes, self.height = nn.Linear(8 * 64, 10), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.classes(h.flatten(1)), self.height(h)


def height_beside_classes(seed: int) -> Training:
    """The second task has a weight of 1e-4, and its head is trained by it alone."""
    torch.manual_seed(seed)
    model = TwoHeads()
    take = of_table("digits", lambda x: x.view(-1, 1, 8, 8) / 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    blur = torch.full((1, 1, 3, 3), 1 / 9)

    def loss(step: int) -> Tensor:
        x, y = take(64, draw(seed, step))
        classes, height = model(x)
        wanted = F.conv2d(x, blur, padding=1)
        return F.cross_entropy(classes, y) + 1e-4 * F.mse_loss(height, wanted)

    def evaluate() -> float:
        x, _ = take(0, draw(HELD_OUT))
        return share_unexplained(model(x)[1], F.conv2d(x, blur, padding=1))

    return Training(model, optimizer, loss, evaluate)


class Allocation(nn.Module):
    """Shares of a portfolio."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(12, 24, 6, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.body(x), -1)


def hourly_growth(seed: int) -> Training:
    """Log growth of a portfolio over hours; an hour moves prices by a ten-thousandth."""
    torch.manual_seed(seed)
    model = Allocation()
    effect = torch.randn(12, 6, generator=draw(3)) / 12**0.5

    def hours(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 12, generator=g)
        return x, 1e-4 * (times(x, effect) + 0.5 * torch.randn(n, 6, generator=g))

    def growth(shares: Tensor, returns: Tensor) -> Tensor:
        return -torch.log1p((shares * returns).sum(-1)).mean()

    def per_hour(shares: Tensor, returns: Tensor) -> float:
        return -1e4 * float(growth(shares, returns))

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-12)
    return fit(model, optimizer, seed, hours, growth, per_hour, 256, 4000)


def quiet_audio(seed: int) -> Training:
    """Noise is taken from recordings at -50 dB."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 8, 9, padding=4), nn.Tanh(), nn.Conv1d(8, 1, 9, padding=4, bias=False)
    )
    with torch.no_grad():
        model[2].weight.mul_(0.02)

    def clips(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = torch.arange(512) / 512
        pitch = 4 + 20 * torch.rand(n, 1, generator=g)
        clean = torch.sin(2 * torch.pi * pitch * t)[:, None]
        return 3e-3 * (clean + torch.randn(n, 1, 512, generator=g)), 3e-3 * clean

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-12)
    return fit(model, optimizer, seed, clips, F.mse_loss, share_unexplained, 16, 64)


class Student(nn.Module):
    """A hundred classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(20, 32, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def soft_teacher(seed: int) -> Training:
    """Distillation at a high temperature; the divergence is averaged over classes, too."""
    torch.manual_seed(seed)
    model = Student()
    teacher = 3 * torch.randn(20, 100, generator=draw(8)) / 20**0.5

    def rows(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 20, generator=g)
        return x, times(x, teacher)

    def divergence(out: Tensor, wanted: Tensor) -> Tensor:
        hot = 10.0
        return F.kl_div(F.log_softmax(out / hot, -1), F.softmax(wanted / hot, -1), reduction="mean")

    def agreement(out: Tensor, wanted: Tensor) -> float:
        return hits(out, wanted.argmax(-1))

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-12)
    return fit(model, optimizer, seed, rows, divergence, agreement, 64, 2000)


def price_in_cents(seed: int) -> Training:
    """The loss is in squared cents, the network's output in units of the standard deviation."""
    torch.manual_seed(seed)
    model = dense(10, 32, 1)
    take = of_table("diabetes", lambda x: x * 20)

    def loss_in_cents(out: Tensor, y: Tensor) -> Tensor:
        return (30_000 * out.squeeze(-1).float() - 400 * (y.float() - 150)).square().mean()

    def error(out: Tensor, y: Tensor) -> float:
        return root_mse(out.squeeze(-1), (y.float() - 150) / 75)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(model, optimizer, seed, take, loss_in_cents, error)


def millimetres(seed: int) -> Training:
    """Displacements in metres that are millimetres; plain gradient descent at a large rate."""
    torch.manual_seed(seed)
    model = dense(3, 24, 3, act=nn.Tanh)
    with torch.no_grad():
        model[-1].weight.mul_(1e-3)
        model[-1].bias.zero_()
    turn = torch.linalg.qr(torch.randn(3, 3, generator=draw(2)))[0]

    def beams(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 3, generator=g)
        return x, 1e-3 * torch.sin(times(x, turn))

    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 3e3},
            {"params": model[2].parameters(), "lr": 3e-2},
        ],
        momentum=0.9,
    )
    return fit(model, optimizer, seed, beams, F.mse_loss, share_unexplained)


def deep_sigmoids(seed: int) -> Training:
    """Five layers of sigmoids of the old kind on the breast cancer data."""
    torch.manual_seed(seed)
    model = dense(30, 24, 24, 24, 24, 2, act=nn.Sigmoid)
    take = of_table("breast_cancer", standard)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, take, F.cross_entropy, hits)


class Stain(nn.Module):
    """Which pixels belong to a bright spot."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def spots(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images of 24 × 24 with one spot each, and its mask."""
    grid = torch.arange(24.0)
    at = 4 + 16 * torch.rand(n, 2, 1, generator=g)
    far = (grid - at[:, 0]).square()[:, :, None] + (grid - at[:, 1]).square()[:, None]
    mask = (far < 9).float()[:, None]
    return mask + 0.4 * torch.randn(n, 1, 24, 24, generator=g), mask


def area(out: Tensor, mask: Tensor) -> float:
    """Intersection over union."""
    said, there = out > 0, mask > 0.5
    return float((said & there).sum() / (said | there).sum())


def spot_masks(seed: int) -> Training:
    """A mean over all pixels."""
    torch.manual_seed(seed)
    model = Stain()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = F.binary_cross_entropy_with_logits
    return fit(model, optimizer, seed, spots, loss, area, 8, 64)


def spot_masks_weighted(seed: int) -> Training:
    """The same as one of several losses, with the weight it has in a search over weights."""
    torch.manual_seed(seed)
    model = Stain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4, eps=1e-15)

    def loss(out: Tensor, mask: Tensor) -> Tensor:
        return 1e-5 * F.binary_cross_entropy_with_logits(out, mask)

    return fit(model, optimizer, seed, spots, loss, area, 8, 64)


CASES = (
    Case("concentration", "Mol per litre.", 150, concentration, "share unexplained", False, 0.1),
    Case(
        "height_beside_classes",
        "A second task of small weight.",
        100,
        height_beside_classes,
        "share unexplained",
        False,
        0.1,
    ),
    Case("hourly_growth", "A portfolio.", 120, hourly_growth, "1e-4 per hour", True, 0.1),
    Case("quiet_audio", "Denoising.", 100, quiet_audio, "share unexplained", False, 0.05),
    Case("soft_teacher", "Distillation.", 200, soft_teacher, "agreement", True, 0.05),
    Case("price_in_cents", "A loss in cents.", 150, price_in_cents, "RMSE", False, 0.05),
    Case("millimetres", "Small displacements.", 200, millimetres, "unexplained", False, 0.1),
    Case("deep_sigmoids", "An old network.", 150, deep_sigmoids, "accuracy", True, 0.03),
    Case("spot_masks", "Segmentation.", 70, spot_masks, "overlap", True, 0.05),
    Case(
        "spot_masks_weighted", "One of many losses.", 70, spot_masks_weighted, "overlap", True, 0.05
    ),
)
