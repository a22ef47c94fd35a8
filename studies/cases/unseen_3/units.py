"""Measurements in the units that they come in, and formulas as they are written by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import TEST, accuracy, mlp, nll, relative_rmse, rng
from cases.unseen_3.shared import area_under_curve, fit


class Filters(nn.Module):
    """A learned bank of filters, the logarithm of their power, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.out = nn.Conv1d(1, 16, 17, bias=False), mlp(16, 24, 4)

    def forward(self, x: Tensor) -> Tensor:
        power = self.bank(x).square().mean(-1)
        return self.out(torch.log(power + 1) - 8)


def faults_of_engines(seed: int) -> Training:
    """Four faults of engines by their vibration, in counts of a converter of 16 bits."""
    torch.manual_seed(seed)
    g = rng(TEST)
    y = torch.randint(0, 4, (600,), generator=g)
    time = torch.arange(96.0)
    rate = torch.tensor([0.3, 0.7, 1.2, 1.9])[y][:, None] + 0.1 * torch.randn(600, 1, generator=g)
    x = 900 * torch.sin(rate * time + 6.3 * torch.rand(600, 1, generator=g))
    x = (x + 500 * torch.randn(600, 96, generator=g)).round().unsqueeze(1)
    model = Filters()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, y),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=400,
        batch=32,
    )


class Places(nn.Module):
    """Places of 80 towns, and the squares of their distances by a product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(80, 2)
        nn.init.normal_(self.place.weight, std=100.0)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = self.place(a), self.place(b)
        square = x.square().sum(-1)[..., None] + y.square().sum(-1)[..., None, :]
        return square - 2 * x @ y.transpose(-1, -2)


def map_from_distances(seed: int) -> Training:
    """A map of towns from the distances between them in kilometres."""
    torch.manual_seed(seed)
    g = rng(TEST)
    true = 200 * torch.randn(80, 2, generator=g)
    far = torch.cdist(true, true)
    model = Places()
    every = torch.arange(80)

    def error(a: Tensor, b: Tensor) -> Tensor:
        found = torch.sqrt(model(a, b).clamp(min=1e-3))
        return F.smooth_l1_loss(found, far[a[:, None], b], beta=10.0)

    def loss(step: int) -> Tensor:
        a, b = torch.randperm(80, generator=rng(seed, step))[:60].split(30)
        return error(a, b)

    optimizer = torch.optim.Adam(model.parameters(), lr=10.0)
    return Training(model, optimizer, loss, lambda: float(error(every[:40], every[40:])))


def light_of_sensors(seed: int) -> Training:
    """Irradiance in watts for each square millimetre, 1e-6 and less, by Adam."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 5, generator=g)
    y = 4e-7 * (1 + torch.tanh(x[:, 0]) * x[:, 1] + 0.1 * torch.randn(1500, generator=g))
    model = mlp(5, 32, 32, 1)
    with torch.no_grad():
        for p in model[-1].parameters():
            p.mul_(1e-6)
    optimizer = torch.optim.Adam(
        [
            {"params": model[:-1].parameters(), "lr": 3e-3},
            {"params": model[-1].parameters(), "lr": 3e-9},
        ],
        eps=1e-30,
    )
    return fit(
        model,
        optimizer,
        seed,
        (x, y),
        lambda x, y: F.l1_loss(model(x).squeeze(-1), y),
        lambda x, y: relative_rmse(model(x).squeeze(-1), y),
        train=1000,
    )


def roads_from_above(seed: int) -> Training:
    """Roads in pictures: a mean over eighteen thousand pixels, few of which are roads."""
    torch.manual_seed(seed)
    g = rng(TEST)
    place = torch.arange(48.0)
    shift, slope = 48 * torch.rand(120, 1, 1, generator=g), torch.randn(120, 1, 1, generator=g)
    y = ((place[:, None] - shift - slope * (place - 24)).abs() < 1.5).float().unsqueeze(1)
    x = 0.5 * y + 0.3 * torch.randn(120, 1, 48, 48, generator=g)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(),
        nn.Conv2d(6, 1, 1),
    )  # fmt: skip
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, y),
        lambda x, y: F.binary_cross_entropy_with_logits(model(x), y),
        lambda x, y: float(F.binary_cross_entropy_with_logits(model(x), y)),
        train=100,
        batch=8,
    )


def clicks_by_hand(seed: int) -> Training:
    """Clicks by an entropy that is written by hand, with a small number inside its logarithms."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(4000, 10, generator=g)
    y = (4 * x[:, 0] + 3 * x[:, 1] * x[:, 2] + torch.randn(4000, generator=g) > 4).float()
    model = nn.Sequential(mlp(10, 48, 48, 1), nn.Sigmoid())

    def entropy(x: Tensor, y: Tensor) -> Tensor:
        p = model(x).squeeze(-1)
        return -(y * torch.log(p + 1e-12) + (1 - y) * torch.log(1 - p + 1e-12)).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, y),
        entropy,
        lambda x, y: area_under_curve(model(x).squeeze(-1), y),
        train=3000,
        batch=128,
    )


def soft_dtw(a: Tensor, b: Tensor, gamma: float) -> Tensor:
    """The soft cost of the best alignment of (n, length) with (n, length)."""
    cost = (a[:, :, None] - b[:, None]).square()
    rows, columns = cost.shape[1:]
    best = [[torch.zeros_like(cost[:, 0, 0])] * columns for _ in range(rows)]
    for i in range(rows):
        for j in range(columns):
            before = [
                best[p][q] for p, q in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if p >= 0 and q >= 0
            ]
            least = -gamma * torch.logsumexp(-torch.stack(before) / gamma, 0) if before else 0.0
            best[i][j] = cost[:, i, j] + least
    return best[-1][-1]


def gestures_aligned(seed: int) -> Training:
    """The further course of gestures, compared by soft dynamic time warping."""
    torch.manual_seed(seed)
    g = rng(TEST)
    speed, phase = 0.6 + 0.4 * torch.rand(600, 1, generator=g), 6 * torch.rand(600, 1, generator=g)
    x = 3 * torch.sin(speed * torch.arange(12.0) + phase) + 0.1 * torch.randn(600, 12, generator=g)
    model = mlp(6, 48, 6)

    def error(x: Tensor) -> Tensor:
        return soft_dtw(model(x[:, :6]), x[:, 6:], 1e-3).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x,),
        error,
        lambda x: float(error(x)),
        train=400,
        batch=24,
    )


class Absorption(nn.Module):
    """Light after a gas: columns of molecules for each cm², times what one of them covers."""

    def __init__(self) -> None:
        super().__init__()
        self.log_size = nn.Parameter(torch.zeros(6, 20))

    def forward(self, columns: Tensor) -> Tensor:
        return torch.exp(-(columns @ (1e-18 * torch.exp(self.log_size))))


def gases_by_their_lines(seed: int) -> Training:
    """Cross sections of six gases from light that passed columns of 1e17 molecules."""
    torch.manual_seed(seed)
    g = rng(TEST)
    columns = 1e17 * torch.rand(600, 6, generator=g)
    size = 1e-18 * torch.exp(1.5 * torch.randn(6, 20, generator=g))
    y = torch.exp(-(columns @ size)) + 0.005 * torch.randn(600, 20, generator=g)
    model = Absorption()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-2),
        seed,
        (columns, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=400,
    )


class Norm(nn.Module):
    """A norm of layers as the Annotated Transformer writes it, with a smaller epsilon."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        away = x - x.mean(-1, keepdim=True)
        return self.gain * away / (x.std(-1, keepdim=True) + 1e-9) + self.shift


class Sentences(nn.Module):
    """Words, a layer and its norm, a maximum over words; the padding is a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(60, 24, padding_idx=0), nn.Linear(24, 24, bias=False)
        self.norm, self.out = Norm(24), nn.Linear(24, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(F.gelu(self.norm(self.body(self.words(words)))).amax(1))


def padded_sentences(seed: int) -> Training:
    """Sentences of three kinds, filled up with zeros to the same length."""
    torch.manual_seed(seed)
    g = rng(TEST)
    y = torch.randint(0, 3, (1200,), generator=g)
    words = torch.randint(1, 60, (1200, 12), generator=g)
    marks = 1 + 7 * y[:, None] + torch.randint(0, 7, (1200, 2), generator=g)
    words = torch.where(words < 22, words + 30, words)
    words[:, :2] = marks
    length = torch.randint(4, 13, (1200, 1), generator=g)
    words = torch.where(torch.arange(12) < length, words, 0)
    model = Sentences()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (words, y),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: accuracy(model(x), y),
        train=800,
    )


def people_of_towns(seed: int) -> Training:
    """Inhabitants of towns, up to some hundred thousand, as the network's own output."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 6, generator=g)
    y = 30_000 * torch.exp(0.7 * x[:, 0] + 0.4 * torch.tanh(x[:, 1]))
    model = nn.Sequential(
        nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
    )
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-2),
        seed,
        (x, y),
        lambda x, y: F.l1_loss(model(x).squeeze(-1), y),
        lambda x, y: relative_rmse(model(x).squeeze(-1), y),
        train=1000,
    )


CASES = (
    Case(
        "faults_of_engines",
        "Faults of engines by a learned bank of filters.",
        150,
        faults_of_engines,
        "NLL",
        False,
        0.1,
    ),
    Case(
        "map_from_distances",
        "A map of towns from their distances.",
        300,
        map_from_distances,
        "error in km",
        False,
        5.0,
    ),
    Case(
        "light_of_sensors",
        "Irradiance in small units.",
        200,
        light_of_sensors,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "roads_from_above",
        "Roads in pictures by a mean over pixels.",
        80,
        roads_from_above,
        "NLL",
        False,
        0.02,
    ),
    Case(
        "clicks_by_hand",
        "Clicks by an entropy written by hand.",
        200,
        clicks_by_hand,
        "AUC",
        True,
        0.02,
    ),
    Case(
        "gestures_aligned",
        "Gestures by soft dynamic time warping.",
        100,
        gestures_aligned,
        "soft cost",
        False,
        0.5,
    ),
    Case(
        "gases_by_their_lines",
        "Cross sections of gases.",
        200,
        gases_by_their_lines,
        "relative RMSE",
        False,
        0.02,
    ),
    Case(
        "padded_sentences",
        "Padded sentences and a norm by hand.",
        150,
        padded_sentences,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "people_of_towns",
        "Inhabitants of towns.",
        250,
        people_of_towns,
        "relative RMSE",
        False,
        0.05,
    ),
)
