"""What most people train: nothing in it is unusual."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import (
    accuracy,
    cosine,
    digits,
    draws,
    fitted,
    fixed,
    perceptron,
    rows,
    table,
)


class DigitTransformer(nn.Module):
    """Rows of a digit as tokens, through one encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(0.1 * torch.randn(8, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.embed(x.view(-1, 8, 8)) + self.place)
        logits: Tensor = self.head(h.mean(1))
        return logits


def digits_transformer(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = DigitTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(index: int) -> Tensor:
        chosen = rows(len(x), 48, seed, index)
        return F.cross_entropy(model(x[chosen]), y[chosen], label_smoothing=0.1)

    return Training(
        model,
        optimizer,
        loss,
        accuracy(model, test_x, test_y),
        clip_norm=1.0,
        schedule=cosine(optimizer, 3e-3, 150, 15),
    )


class Seasons(nn.Module):
    """The next value of a series, by an LSTM cell at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(1, 24)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), 24)
        for now in x.unbind(1):
            h, c = self.cell(now[:, None], (h, c))
        answer: Tensor = self.head(h)
        return answer


def waves_lstm(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Seasons()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        pace = 0.3 + 0.5 * torch.rand(size, 1, generator=generator)
        phase = 2 * math.pi * torch.rand(size, 1, generator=generator)
        wave = torch.sin(pace * torch.arange(13) + phase)
        wave = wave + 0.05 * torch.randn(size, 13, generator=generator)
        return wave[:, :12], wave[:, 12:]

    return fitted(
        model, batch, seed, optimizer=optimizer, size=32, steps=150, peak=1e-2, clip_norm=1.0
    )


def action_values(seed: int) -> Training:
    """Q-learning on a line of nine places with a prize at its end, from random moves."""
    torch.manual_seed(seed)
    model, target = perceptron(9, 32, 2), perceptron(9, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(index: int) -> Tensor:
        if index % 20 == 0:
            target.load_state_dict(model.state_dict())
        generator = draws(seed, index)
        place = torch.randint(8, (64,), generator=generator)
        move = torch.randint(2, (64,), generator=generator)
        then = (place + 2 * move - 1).clamp(min=0)
        prize = (then == 8).float()
        with torch.no_grad():
            best = target(F.one_hot(then, 9).float()).amax(1)
        value = model(F.one_hot(place, 9).float()).gather(1, move[:, None])[:, 0]
        return F.smooth_l1_loss(value, prize + 0.9 * (1 - prize) * best)

    def evaluate() -> float:
        with torch.no_grad():
            best = model(torch.eye(9)[:8]).amax(1)
        return float((best - 0.9 ** torch.arange(7.0, -1, -1)).square().mean().sqrt())

    return Training(model, optimizer, loss, evaluate)


class Mixture(nn.Module):
    """A density of y given x, of three normal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(1, 32, 9, activation=nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, mean, width = self.net(x).chunk(3, -1)
        return weight, mean, width


def mixture_density(seed: int) -> Training:
    """The inverse of a function that has several."""
    torch.manual_seed(seed)
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def unlikely(generator: torch.Generator, size: int) -> Tensor:
        y = torch.rand(size, 1, generator=generator)
        x = y + 0.3 * torch.sin(2 * math.pi * y)
        x = x + 0.05 * torch.randn(size, 1, generator=generator)
        weight, mean, width = model(x)
        each = -0.5 * ((y - mean) * torch.exp(-width)) ** 2 - width
        return -torch.logsumexp(F.log_softmax(weight, -1) + each, -1).mean()

    def evaluate() -> float:
        with torch.no_grad():
            return float(unlikely(fixed(160), 800))

    return Training(
        model,
        optimizer,
        lambda index: unlikely(draws(seed, index), 128),
        evaluate,
        clip_norm=5.0,
        schedule=cosine(optimizer, 1e-2, 300),
    )


def wine_quantiles(seed: int) -> Training:
    """Three quantiles of a wine's alcohol by its other properties, by the pinball loss."""
    torch.manual_seed(seed)
    full, _, test, _ = table("wine", 50)
    model = perceptron(12, 24, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    level = torch.tensor([0.1, 0.5, 0.9])

    def pinball(wines: Tensor) -> Tensor:
        off = wines[:, :1] - model(wines[:, 1:])
        return torch.maximum(level * off, (level - 1) * off).mean()

    def evaluate() -> float:
        with torch.no_grad():
            return float(pinball(test))

    return Training(
        model,
        optimizer,
        lambda index: pinball(full[rows(len(full), 32, seed, index)]),
        evaluate,
        schedule=cosine(optimizer, 5e-3, 200),
    )


class Survival(nn.Module):
    """The logarithm of a risk."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(5, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        risk: Tensor = self.net(x)[:, 0]
        return risk


def survival_cox(seed: int) -> Training:
    """Generated times of survival, by Cox's partial likelihood."""
    torch.manual_seed(seed)
    model = Survival()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 5, generator=generator)
        risk = x[:, 0] + torch.tanh(x[:, 1] * x[:, 2])
        time = -torch.log(torch.rand(size, generator=generator).clamp(min=1e-9)) * (-risk).exp()
        return x[time.argsort(descending=True)], risk

    def loss(index: int) -> Tensor:
        x, _ = batch(draws(seed, index), 96)
        risk = model(x)
        return (torch.logcumsumexp(risk.float(), 0) - risk).mean()

    def evaluate() -> float:
        x = torch.randn(1000, 5, generator=fixed(161))
        with torch.no_grad():
            risk = model(x)
        both = torch.stack([risk, x[:, 0] + torch.tanh(x[:, 1] * x[:, 2])])
        return float(torch.corrcoef(both)[0, 1])

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 5e-3, 200))


class SmallUNet(nn.Module):
    """Down once, up once, and a bridge between."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.deep = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.norm(self.down(x)))
        deep = F.relu(self.up(F.relu(self.deep(wide))))
        logits: Tensor = self.head(torch.cat([wide, deep], 1))
        return logits


def segmentation_of_discs(seed: int) -> Training:
    """Generated discs in noise; cross entropy and overlap (Dice)."""
    torch.manual_seed(seed)
    model = SmallUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    grid = torch.arange(16)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        y, x = torch.randint(3, 13, (2, size, 1, 1, 1), generator=generator)
        square = (grid[:, None] - y) ** 2 + (grid - x) ** 2
        disc = (square < 12).float()
        return disc + 0.7 * torch.randn(disc.shape, generator=generator), disc

    def overlap(p: Tensor, disc: Tensor) -> Tensor:
        both = (p * disc).sum((1, 2, 3))
        answer: Tensor = (2 * both / (p + disc).sum((1, 2, 3))).mean()
        return answer

    def loss(index: int) -> Tensor:
        picture, disc = batch(draws(seed, index), 16)
        logits = model(picture)
        entropy = F.binary_cross_entropy_with_logits(logits, disc)
        return entropy + 1 - overlap(torch.sigmoid(logits), disc)

    def evaluate() -> float:
        picture, disc = batch(fixed(162), 100)
        with torch.no_grad():
            return float(overlap((model(picture) > 0).float(), disc))

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 5e-3, 150))


class Siamese(nn.Module):
    """Digits as points; triplets draw what is alike together."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 48, 16)

    def forward(self, x: Tensor) -> Tensor:
        point: Tensor = self.encoder(x)
        return point


def digits_triplets(seed: int) -> Training:
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    model = Siamese()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(index: int) -> Tensor:
        generator = draws(seed, index)
        anchor = torch.randint(len(x), (64,), generator=generator)
        same = y[anchor][:, None] == y
        like = torch.multinomial(same.float(), 1, generator=generator)[:, 0]
        unlike = torch.multinomial((~same).float(), 1, generator=generator)[:, 0]
        return F.triplet_margin_loss(*(model(x[i]) for i in (anchor, like, unlike)))

    def evaluate() -> float:
        with torch.no_grad():
            found = torch.cdist(model(test_x), model(x)).argmin(1)
        return float((y[found] == test_y).float().mean())

    return Training(model, optimizer, loss, evaluate)


CASES = (
    Case(
        "digits_transformer",
        "A transformer's layer over the rows of a digit, with label smoothing.",
        150,
        digits_transformer,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "waves_lstm",
        "The next value of a generated wave, by an LSTM.",
        150,
        waves_lstm,
        "relative error",
        False,
        0.05,
    ),
    Case(
        "action_values",
        "Q-learning on a line of nine places.",
        300,
        action_values,
        "RMSE of the values",
        False,
        0.05,
    ),
    Case(
        "mixture_density",
        "A mixture density network on the inverse of a generated function.",
        300,
        mixture_density,
        "negative log likelihood",
        False,
        0.1,
    ),
    Case(
        "wine_quantiles",
        "Quantiles of a wine's alcohol, by the pinball loss.",
        200,
        wine_quantiles,
        "pinball loss",
        False,
        0.03,
    ),
    Case(
        "survival_cox",
        "Risks from generated times of survival, by Cox's partial likelihood.",
        200,
        survival_cox,
        "correlation with the true risk",
        True,
        0.03,
    ),
    Case(
        "segmentation_of_discs",
        "Generated discs in noise, by a small U-Net.",
        150,
        segmentation_of_discs,
        "Dice",
        True,
        0.04,
    ),
    Case(
        "digits_triplets",
        "Digits by triplets.",
        200,
        digits_triplets,
        "accuracy of the nearest neighbour",
        True,
        0.03,
    ),
)
