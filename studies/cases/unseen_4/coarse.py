"""Positions, counters, phases and small differences: what few bits cannot tell apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import fit
from cases.unseen_2.shared import TEST, accuracy, mlp, relative_rmse, rng


class Rotary(nn.Module):
    """Attention with positions as rotations, whose angles are computed in the queries' format."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qk, self.v = nn.Embedding(12, 32), nn.Linear(32, 64), nn.Linear(32, 32)
        self.out = nn.Linear(32, 12)

    def turned(self, x: Tensor, at: Tensor) -> Tensor:
        angle = at.to(x.dtype)[..., None] * torch.tensor(
            [1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005], dtype=x.dtype
        )
        cos, sin = torch.cos(angle), torch.sin(angle)
        a, b = x[..., :8], x[..., 8:16]
        return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., 16:]], -1)

    def forward(self, words: Tensor, at: Tensor) -> Tensor:
        h = self.words(words)
        q, k = self.qk(h).split(32, -1)
        weight = torch.softmax(self.turned(q, at) @ self.turned(k, at).transpose(1, 2) / 3, -1)
        return self.out(weight @ self.v(h))


def word_before(seed: int) -> Training:
    """The word before each word of a passage, somewhere in a text of 700 words."""
    torch.manual_seed(seed)
    model = Rotary()

    def passages(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, 12, (n, 16), generator=g)
        return words, torch.randint(500, 684, (n, 1), generator=g) + torch.arange(16)

    def loss(step: int) -> Tensor:
        words, at = passages(32, rng(seed, step))
        return F.cross_entropy(model(words, at)[:, 1:].flatten(0, 1), words[:, :-1].flatten())

    def evaluate() -> float:
        words, at = passages(300, rng(TEST))
        return accuracy(model(words, at)[:, 1:], words[:, :-1])

    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, evaluate)


class Counting(nn.Module):
    """A gate for each event, added up one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = mlp(3, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.sigmoid(self.gate(x)).squeeze(-1)
        count = gates[:, 0]
        for i in range(1, x.shape[1]):
            count = count + gates[:, i]
        return count / 30


def people_through_a_door(seed: int) -> Training:
    """How many of 400 events at a door are people who enter."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(500, 400, 3, generator=g) + torch.randn(500, 1, 3, generator=g)
    y = (x[..., 0] + x[..., 1] > 0).float().sum(1) / 30
    model = Counting()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=300,
        batch=16,
    )


class Ripples(nn.Module):
    """A height at each place, and the slopes between neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.height = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, at: Tensor) -> Tensor:
        h = self.height(at).squeeze(-1)
        return (h[..., 1:] - h[..., :-1]) * 40


def heights_from_slopes(seed: int) -> Training:
    """A surface from its slopes, which are differences of neighbouring heights."""
    torch.manual_seed(seed)
    model = Ripples()
    at = torch.linspace(-1, 1, 81)
    shape = torch.sin(3 * at) + 0.3 * torch.cos(7 * at)
    slope = (shape[1:] - shape[:-1]) * 40

    def loss(step: int) -> Tensor:
        noise = 0.02 * torch.randn(80, generator=rng(seed, step))
        return F.mse_loss(model(at[:, None]), slope + noise)

    return Training(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        loss,
        lambda: relative_rmse(model(at[:, None]), slope),
    )


class Tones(nn.Module):
    """Frequencies of a spoken vowel from its description, and the wave that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.pitch = mlp(3, 32, 2)

    def forward(self, x: Tensor) -> Tensor:
        pitch, loud = self.pitch(x).split(1, -1)
        return torch.sigmoid(loud) * torch.sin(
            (1 + 0.2 * torch.tanh(pitch)) * torch.arange(60, 120).to(pitch.dtype)
        )


def waves_of_vowels(seed: int) -> Training:
    """Waves by their phase, which goes up to 140 radians."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1200, 3, generator=g)
    pitch = 1 + 0.01 * torch.tanh(x[:, :1] + 0.5 * x[:, 1:2])
    y = torch.sigmoid(x[:, 2:]) * torch.sin(pitch * torch.arange(60.0, 120.0))
    model = Tones()
    with torch.no_grad():
        model.pitch[-1].weight.mul_(0.1)
        model.pitch[-1].bias.zero_()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=900,
    )


class Savings(nn.Module):
    """A daily rate of interest, compounded over four months."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = mlp(4, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        rate = 1e-3 * torch.tanh(self.rate(x)).squeeze(-1)
        value = 1 + rate
        for _ in range(120):
            value = value * (1 + rate)
        return value


def savings_by_the_day(seed: int) -> Training:
    """The growth of savings, by a rate of less than a thousandth a day."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1200, 4, generator=g)
    y = torch.exp(120 * 7e-4 * torch.tanh(x[:, 0] + x[:, 1] * x[:, 2]))
    model = Savings()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=900,
    )


class Marks(nn.Module):
    """Points of a face in pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = mlp(24, 64, 64), nn.Linear(64, 6)
        nn.init.constant_(self.out.bias, 200.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.body(x)))


def points_of_a_face(seed: int) -> Training:
    """Where six points lie, to a twentieth of a pixel, in pictures of 400."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(2000, 24, generator=g)
    y = 200 + 0.5 * torch.tanh(x[:, :6]) + 0.3 * x[:, 6:12]
    model = Marks()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, y),
        lambda x, y: F.l1_loss(model(x), y),
        lambda x, y: float((model(x) - y).abs().mean()),
        train=1600,
        batch=128,
    )


class Drains(nn.Module):
    """A level that keeps all but a small share of itself in each hour."""

    def __init__(self) -> None:
        super().__init__()
        self.share, self.inflow = mlp(2, 16, 1), mlp(2, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Levels (n, hours) by what is known of each hour (n, hours, 2)."""
        keep = 1 - 0.01 * torch.sigmoid(self.share(x)).squeeze(-1)
        more = F.softplus(self.inflow(x)).squeeze(-1).to(keep.dtype)
        level, levels = more[:, 0], []
        for i in range(x.shape[1]):
            level = keep[:, i] * level + 0.01 * more[:, i]
            levels.append(level)
        return torch.stack(levels, 1)


def levels_of_a_well(seed: int) -> Training:
    """The level of a well over 100 hours, of which each loses half a hundredth."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(400, 100, 2, generator=g) * 0.5 + torch.randn(400, 1, 2, generator=g)
    keep, more = 1 - 0.01 * torch.sigmoid(2 * x[..., 0]), torch.relu(1 + x[..., 1])
    level, levels = more[:, 0], []
    for i in range(100):
        level = keep[:, i] * level + 0.01 * more[:, i]
        levels.append(level)
    y = torch.stack(levels, 1)
    model = Drains()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=250,
        batch=16,
    )


CASES = (
    Case("word_before", "The word before each word, by rotary positions.", 200, word_before,
         "accuracy", True, 0.06),
    Case("people_through_a_door", "A count of 400 events.", 60, people_through_a_door,
         "relative RMSE", False, 0.05),
    Case("heights_from_slopes", "A surface from its slopes.", 300, heights_from_slopes,
         "relative RMSE", False, 0.03),
    Case("waves_of_vowels", "Waves by their phase.", 300, waves_of_vowels,
         "relative RMSE", False, 0.05),
    Case("savings_by_the_day", "Savings by a daily rate.", 150, savings_by_the_day,
         "relative RMSE", False, 0.05),
    Case("points_of_a_face", "Points in pixels.", 400, points_of_a_face,
         "mean error in pixels", False, 0.05),
    Case("levels_of_a_well", "Levels over 100 hours.", 60, levels_of_a_well,
         "relative RMSE", False, 0.05),
)  # fmt: skip
