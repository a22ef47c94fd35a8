"""Trainings whose numbers grow, cancel or vanish on the way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import HELD_OUT, dense, draw, fit, of_table, share_unexplained, times


class Values(nn.Module):
    """What four actions are worth."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(4, 32, 4)

    def forward(self, state: Tensor) -> Tensor:
        return 5000 * self.body(state)


def far_sighted_values(seed: int) -> Training:
    """Learning of values with a slow copy as the target: they grow with every copy."""
    torch.manual_seed(seed)
    model, slow = Values(), Values()
    slow.load_state_dict(model.state_dict())

    def worth(state: Tensor) -> Tensor:
        return 6000 * (1 + 0.3 * torch.tanh(torch.cat([state[:, :2], -state[:, :2]], 1)))

    def loss(step: int) -> Tensor:
        if step % 5 == 0:
            slow.load_state_dict(model.state_dict())
        g = draw(seed, step)
        state, after = torch.randn(64, 4, generator=g), torch.randn(64, 4, generator=g)
        with torch.no_grad():
            target = worth(state) + 0.95 * slow(after).amax(-1, keepdim=True)
        return F.smooth_l1_loss(model(state) / 1000, target / 1000)

    held = torch.randn(500, 4, generator=draw(HELD_OUT))

    def evaluate() -> float:
        chosen = model(held).argmax(-1, keepdim=True)
        return float(worth(held).gather(1, chosen).mean()) / 1000

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return Training(model, optimizer, loss, evaluate)


class Calorimeter(nn.Module):
    """The energy of a shower: the sum over its cells of what a network reads off each."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = dense(3, 8, 4), nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        cells, there = batch
        summed = there[:, None] @ F.softplus(self.cell(cells))
        return self.out(torch.log(summed.squeeze(1)))


def showers(seed: int) -> Training:
    """Showers of up to 1,500 cells, whose light is counted in photons."""
    torch.manual_seed(seed)
    model = Calorimeter()

    def sample(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        cells = 120 * torch.rand(n, 1500, 3, generator=g) * torch.rand(n, 1, 1, generator=g)
        there = (
            torch.rand(n, 1500, generator=g) < 0.1 + 0.9 * torch.rand(n, 1, generator=g)
        ).float()
        light = (cells.sum(-1) * there).sum(1, keepdim=True)
        return (cells, there), torch.log(light + 1) - 10

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, sample, F.mse_loss, share_unexplained, 8, 64)


class Smoother(nn.Module):
    """A curve through noise: a kernel system solved by conjugate gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.tensor(-1.0))
        self.noise = nn.Parameter(torch.tensor(-2.0))
        place = torch.linspace(0, 1, 40)
        self.register_buffer("far", (place[:, None] - place).square())

    def forward(self, y: Tensor) -> Tensor:
        kernel = torch.exp(-self.far / self.width.exp().square())
        system = kernel + self.noise.exp() * torch.eye(40)
        x, r = torch.zeros_like(y), y
        p, rr = r, (r * r).sum(-1, keepdim=True)
        for _ in range(12):
            ap = p @ system
            a = rr / (p * ap).sum(-1, keepdim=True)
            x, r = x + a * p, r - a * ap
            new = (r * r).sum(-1, keepdim=True)
            p, rr = r + new / rr * p, new
        return x @ kernel


def kernel_smoother(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Smoother()

    def curves(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        place = torch.linspace(0, 1, 40)
        a, b = torch.rand(2, n, 1, generator=g) * 6
        clean = torch.sin(2 * a * place + b)
        return clean + 0.05 * torch.randn(n, 40, generator=g), clean

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
    return fit(model, optimizer, seed, curves, F.mse_loss, share_unexplained, 16, 200)


class Pendulum(nn.Module):
    """The energy of a pendulum; its motion is the slope of it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = dense(2, 32, 1, act=nn.Tanh)

    def forward(self, state: Tensor) -> Tensor:
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(state).sum(), state, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], -1)


def pendulum(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Pendulum()

    def states(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        s = 4 * torch.rand(n, 2, generator=g) - 2
        return s, torch.stack([s[:, 1], -torch.sin(s[:, 0])], -1)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, states, F.mse_loss, share_unexplained)


class Drift(nn.Module):
    """The speed of a particle from two pictures a millisecond apart."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.out = dense(6, 24, 4, act=nn.Tanh), nn.Linear(4, 2)

    def forward(self, pictures: tuple[Tensor, Tensor]) -> Tensor:
        before, after = (self.encode(p) for p in pictures)
        return self.out((after - before) / 1e-3)


def two_pictures(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Drift()
    lens = torch.randn(2, 6, generator=draw(15))

    def pairs(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        place, speed = torch.randn(2, n, 2, generator=g)
        return (
            torch.sin(0.3 * times(place, lens)),
            torch.sin(0.3 * times(place + 1e-3 * speed, lens)),
        ), speed

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, pairs, F.mse_loss, share_unexplained)


class Device(nn.Module):
    """Power in watts and leakage in amperes of a circuit."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self.leakage = dense(4, 16, 1, act=nn.Tanh), dense(4, 16, 1, act=nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 3e3 * self.power(x), 1e-4 * self.leakage(x)


def watts_and_leakage(seed: int) -> Training:
    """The errors are added up in the units that they have."""
    torch.manual_seed(seed)
    model = Device()

    def circuits(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(n, 4, generator=g)
        return x, 3e3 * torch.sin(x[:, :1]), 1e-4 * torch.sin(x[:, 1:2])

    held = circuits(1000, draw(HELD_OUT))

    def loss(step: int) -> Tensor:
        x, watts, amperes = circuits(64, draw(seed, step))
        power, leakage = model(x)
        return F.mse_loss(power, watts) + F.mse_loss(leakage, amperes)

    def evaluate() -> float:
        power, leakage = model(held[0])
        return share_unexplained(power, held[1]) + share_unexplained(leakage, held[2])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-18)
    return Training(model, optimizer, loss, evaluate)


class Rates(nn.Module):
    """Rates of two reactions from a temperature and a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = dense(3, 16, act=nn.Tanh)
        self.fast, self.slow = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.fast(h), self.slow(h.detach())


def fast_and_slow_reactions(seed: int) -> Training:
    """Each error is weighed by the square of its reaction's rate."""
    torch.manual_seed(seed)
    model = Rates()

    def mixtures(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 3, generator=g)
        return x, torch.tanh(x[:, :1] + 0.5 * x[:, 1:2])

    held = mixtures(1000, draw(HELD_OUT))

    def loss(step: int) -> Tensor:
        x, y = mixtures(64, draw(seed, step))
        fast, slow = model(x)
        return 1e7 * F.mse_loss(fast, y) + 1e-8 * F.mse_loss(slow, 0.5 * y)

    def evaluate() -> float:
        fast, slow = model(held[0])
        return share_unexplained(fast, held[1]) + share_unexplained(slow, 0.5 * held[1])

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, eps=1e-20)
    return Training(model, optimizer, loss, evaluate)


class Hidden(nn.Module):
    """A hidden Markov model; the probability of a sequence by the forward algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.move = nn.Parameter(torch.randn(4, 4))
        self.emit = nn.Parameter(torch.randn(4, 8))
        self.per_step = False

    def forward(self, seen: Tensor) -> Tensor:
        move, emit = torch.softmax(self.move, -1), torch.softmax(self.emit, -1)
        alpha, log = 0.25 * emit[:, seen[:, 0]].T, torch.zeros(len(seen))
        for t in range(1, seen.shape[1]):
            alpha = (alpha @ move) * emit[:, seen[:, t]].T
            if self.per_step:
                total = alpha.sum(-1, keepdim=True)
                alpha, log = alpha / total, log + total.squeeze(-1).log()
        return log + torch.log(alpha.sum(-1))


def motifs(n: int, g: torch.Generator) -> Tensor:
    """Sequences of 8 letters with four moods that last."""
    mood = torch.randint(0, 4, (n,), generator=g)
    seen = []
    for _ in range(16):
        change = torch.rand(n, generator=g) < 0.15
        mood = torch.where(change, torch.randint(0, 4, (n,), generator=g), mood)
        seen.append(2 * mood + (torch.rand(n, generator=g) < 0.3).long())
    return torch.stack(seen, 1)


def _hidden(seed: int, per_step: bool) -> Training:
    torch.manual_seed(seed)
    model = Hidden()
    model.per_step = per_step
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
    held = motifs(200, draw(HELD_OUT))

    def loss(step: int) -> Tensor:
        return -model(motifs(32, draw(seed, step))).mean()

    return Training(model, optimizer, loss, lambda: -float(model(held).mean()))


def moods(seed: int) -> Training:
    """Probabilities of whole sequences, as they are."""
    return _hidden(seed, per_step=False)


def moods_normalised(seed: int) -> Training:
    """The same, brought to a sum of one at each letter."""
    return _hidden(seed, per_step=True)


class Diverse(nn.Module):
    """How diverse a set is: the logarithm of the volume that its items span."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(30, 6)
        self.mix = nn.Linear(6, 6, bias=False)
        with torch.no_grad():
            self.items.weight.mul_(0.05).add_(1.0)

    def forward(self, chosen: Tensor) -> Tensor:
        v = self.mix(self.items(chosen))
        gram = v @ v.transpose(1, 2)
        return torch.linalg.slogdet(gram.float() + 1e-5 * torch.eye(4))[1]


def shopping_baskets(seed: int) -> Training:
    """Baskets that people put together against those of chance: bought ones are diverse."""
    torch.manual_seed(seed)
    model = Diverse()

    def baskets(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        aisle = torch.rand(n, 6, generator=g).argsort(-1)[:, :4]
        bought = aisle + 6 * torch.randint(0, 5, (n, 4), generator=g)
        alike = torch.randint(0, 2, (n, 4), generator=g)
        other = aisle[:, :2].gather(1, alike) + 6 * torch.randint(0, 5, (n, 4), generator=g)
        return torch.cat([bought, other]), torch.cat([torch.ones(n), torch.zeros(n)])

    def loss(volume: Tensor, bought: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(volume + 8, bought)

    def right(volume: Tensor, bought: Tensor) -> float:
        return float(((volume + 8 > 0) == (bought > 0.5)).float().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return fit(model, optimizer, seed, baskets, loss, right, 32, 500)


class Texture(nn.Module):
    """A filter bank and the products of its answers, summed over the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.out = nn.Conv2d(1, 6, 3), nn.Linear(36, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bank(x)).flatten(2)
        gram = h @ h.transpose(1, 2)
        return self.out(torch.log1p(gram.flatten(1)))


def digit_textures(seed: int) -> Training:
    """Digits by the products of filters; brightness from 0 to 255."""
    torch.manual_seed(seed)
    model = Texture()
    take = of_table("digits", lambda x: x.view(-1, 1, 8, 8) * 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def score(out: Tensor, y: Tensor) -> float:
        return float(F.cross_entropy(out, y))

    return fit(model, optimizer, seed, take, F.cross_entropy, score)


CASES = (
    Case("far_sighted_values", "Values.", 160, far_sighted_values, "reward", True, 0.2),
    Case("showers", "Sums over cells.", 80, showers, "unexplained", False, 0.05),
    Case("kernel_smoother", "A solver.", 60, kernel_smoother, "unexplained", False, 0.02),
    Case("pendulum", "An energy.", 150, pendulum, "unexplained", False, 0.05),
    Case("two_pictures", "Differences.", 150, two_pictures, "unexplained", False, 0.05),
    Case("watts_and_leakage", "Two units.", 120, watts_and_leakage, "unexplained", False, 0.1),
    Case(
        "fast_and_slow_reactions", "Two.", 120, fast_and_slow_reactions, "unexplained", False, 0.1
    ),
    Case("moods", "Probabilities.", 60, moods, "NLL", False, 0.3),
    Case("moods_normalised", "Normalised.", 60, moods_normalised, "NLL", False, 0.3),
    Case("shopping_baskets", "Volumes.", 100, shopping_baskets, "accuracy", True, 0.05),
    Case("digit_textures", "Products.", 120, digit_textures, "cross-entropy", False, 0.1),
)
