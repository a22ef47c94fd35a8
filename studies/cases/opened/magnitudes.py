"""Very large and very small quantities in the middle of a model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import InUnits, accuracy, cosine, draws, fitted, fixed, perceptron


class Ratio(nn.Module):
    """What a model answers, over a constant, so that the loss is of a usual size."""

    def __init__(self, model: nn.Module, unit: float) -> None:
        super().__init__()
        self.model, self.unit = model, unit

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.model(x) / self.unit
        return answer


def wavelengths_in_metres(seed: int) -> Training:
    """Wavelengths of 400 to 700 nm, in metres; the loss takes them in units of 100 nm."""
    torch.manual_seed(seed)
    model = Ratio(InUnits(perceptron(3, 32, 1, activation=nn.Tanh), 1e-7), 1e-7)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(size, 3, generator=generator) - 1
        return x, 5.5 + torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:]

    return fitted(model, batch, seed, optimizer=optimizer, size=128, steps=300, peak=1e-2)


class Charges(nn.Module):
    """The force between two balls, from their voltages, materials and distance, in newtons."""

    def __init__(self) -> None:
        super().__init__()
        self.charge = InUnits(perceptron(2, 32, 1, activation=nn.SiLU), 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.charge(x[:, :2]), self.charge(x[:, 2:4])
        force: Tensor = 8.99e9 * first * second / x[:, 4:] ** 2
        return force


def forces_of_charges(seed: int) -> Training:
    """Charges of about a microcoulomb, a decimetre apart."""
    torch.manual_seed(seed)
    model = Charges()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(size, 5, generator=generator)
        x[:, 4] = 0.1 + 0.1 * x[:, 4]
        first, second = (0.5 + a * b for a, b in ((x[:, :1], x[:, 1:2]), (x[:, 2:3], x[:, 3:4])))
        return x, 8.99e9 * (1e-6 * first) * (1e-6 * second) / x[:, 4:] ** 2

    return fitted(model, batch, seed, optimizer=optimizer, size=128, steps=300, peak=1e-2)


def turnover_in_dollars(seed: int) -> Training:
    """Turnovers of some hundred thousand dollars; the loss takes them in thousands."""
    torch.manual_seed(seed)
    model = Ratio(InUnits(perceptron(5, 32, 1), 1e5), 1e5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 5, generator=generator)
        return x, 3 + x[:, :1] * torch.sigmoid(x[:, 1:2]) + 0.5 * x[:, 2:3].abs()

    return fitted(model, batch, seed, optimizer=optimizer, size=128, steps=300, peak=1e-2)


class Exponent(nn.Module):
    """Inhabitants: the exponential of what a network says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(4, 32, 1)
        with torch.no_grad():
            self.net[-1].bias.fill_(11)

    def forward(self, x: Tensor) -> Tensor:
        people: Tensor = torch.exp(self.net(x))
        return people


def inhabitants_by_exponent(seed: int) -> Training:
    """Numbers from a thousand to some millions; the loss compares logarithms."""
    torch.manual_seed(seed)
    model = Exponent()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(size, 4, generator=generator)
        return x, torch.exp(8 + 3 * x[:, :1] + 4 * x[:, 1:2] * x[:, 2:3])

    def loss(index: int) -> Tensor:
        x, people = batch(draws(seed, index), 128)
        return F.mse_loss(torch.log(model(x)), torch.log(people))

    def evaluate() -> float:
        x, people = batch(fixed(130), 600)
        with torch.no_grad():
            return float((model(x) / people - 1).abs().mean())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 300))


class Gauges(nn.Module):
    """Strain gauges: mixed, brought to a root mean square of 1 by hand, then a network."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24, bias=False)
        self.net = perceptron(24, 32, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        size = torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-12)
        logits: Tensor = self.net(h / size)
        return logits


def strains_by_root_mean_square(seed: int) -> Training:
    """Which of six loads bends a beam by strains of about a hundred millionths."""
    torch.manual_seed(seed)
    model = Gauges()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    patterns = torch.randn(6, 8, generator=fixed(131))

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        load = torch.randint(6, (size,), generator=generator)
        noise = 0.7 * torch.randn(size, 8, generator=generator)
        weight = 0.5 + torch.rand(size, 1, generator=generator)
        return 1e-4 * weight * (patterns[load] + noise), load

    def loss(index: int) -> Tensor:
        x, load = batch(draws(seed, index), 64)
        return F.cross_entropy(model(x), load)

    evaluate = accuracy(model, *batch(fixed(132), 600))
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 250))


class Frames(nn.Module):
    """A sound's frames through learnt filters, each frame over its own largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Linear(16, 24, bias=False)
        self.rnn = nn.Linear(24, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.filters(x))
        h = h / (h.amax(-1, keepdim=True) + 1e-8)
        logits: Tensor = self.head(F.relu(self.rnn(h)).mean(1))
        return logits


def words_with_silence(seed: int) -> Training:
    """Five generated words of twelve frames; a digital silence lies before and after them."""
    torch.manual_seed(seed)
    model = Frames()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sounds = torch.randn(5, 12, 16, generator=fixed(133))

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        word = torch.randint(5, (size,), generator=generator)
        x = sounds[word] + 1.5 * torch.randn(size, 12, 16, generator=generator)
        begin = torch.randint(4, (size, 1), generator=generator)
        end = 12 - torch.randint(4, (size, 1), generator=generator)
        spoken = (torch.arange(12) >= begin) & (torch.arange(12) < end)
        return x * spoken[..., None], word

    def loss(index: int) -> Tensor:
        x, word = batch(draws(seed, index), 64)
        return F.cross_entropy(model(x), word)

    evaluate = accuracy(model, *batch(fixed(134), 500))
    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 200))


class Energies(nn.Module):
    """The energy of a flywheel in joules, from what a network says of its speed."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = InUnits(perceptron(3, 32, 1, activation=nn.Tanh), 1000.0)

    def forward(self, x: Tensor) -> Tensor:
        speed = self.speed(x[:, :3])
        energy: Tensor = 0.5 * x[:, 3:] * (speed * speed)
        return torch.log1p(energy)


def flywheels(seed: int) -> Training:
    """Speeds of a thousand radians a second; the loss compares logarithms of energies."""
    torch.manual_seed(seed)
    model = Energies()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(size, 4, generator=generator)
        x[:, 3] += 0.5
        speed = 1000 * (0.3 + 0.5 * x[:, :1] * x[:, 1:2] + 0.3 * torch.sin(3 * x[:, 2:3]))
        return x, torch.log1p(0.5 * x[:, 3:] * speed**2)

    return fitted(model, batch, seed, optimizer=optimizer, size=128, steps=300, peak=1e-2)


def heatmaps_of_joints(seed: int) -> Training:
    """Where two joints are, as heat maps of 40 × 40; the mean square error is over all pixels."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 5, padding=2, bias=False)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    grid = torch.arange(40)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        y, x = torch.randint(4, 36, (2, size, 2, 1, 1), generator=generator)
        square = (grid[:, None] - y) ** 2 + (grid - x) ** 2
        seen = 0.5 * (square < 2).float() + 0.2 * torch.rand(square.shape, generator=generator)
        return seen, torch.exp(-square / 4)

    def loss(index: int) -> Tensor:
        seen, heat = batch(draws(seed, index), 4)
        return F.mse_loss(model(seen), heat)

    def evaluate() -> float:
        seen, heat = batch(fixed(135), 60)
        with torch.no_grad():
            found, place = (h.flatten(2).argmax(-1) for h in (model(seen), heat))
        off = torch.stack([found // 40 - place // 40, found % 40 - place % 40])
        return math.sqrt(float(off.float().square().sum(0).clamp(max=100).mean()))

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 5e-3, 200))


CASES = (
    Case(
        "wavelengths_in_metres",
        "Generated wavelengths of light in metres.",
        300,
        wavelengths_in_metres,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "forces_of_charges",
        "Generated forces between charges, which a network gives in coulombs.",
        300,
        forces_of_charges,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "turnover_in_dollars",
        "Generated turnovers of shops in dollars.",
        300,
        turnover_in_dollars,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "inhabitants_by_exponent",
        "Generated numbers of inhabitants, as exponentials.",
        300,
        inhabitants_by_exponent,
        "mean relative error",
        False,
        0.05,
    ),
    Case(
        "strains_by_root_mean_square",
        "Loads by generated strains, whose root mean square is taken by hand.",
        250,
        strains_by_root_mean_square,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "words_with_silence",
        "Generated words, whose frames are divided by their largest value.",
        200,
        words_with_silence,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "flywheels",
        "Generated energies of flywheels, by squares of speeds.",
        300,
        flywheels,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "heatmaps_of_joints",
        "Generated joints by heat maps.",
        200,
        heatmaps_of_joints,
        "RMSE of the place in pixels",
        False,
        0.5,
    ),
)
