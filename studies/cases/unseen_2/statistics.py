"""Densities, chains and matrices: what statisticians fit by likelihood."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    TEST,
    accuracy,
    cosine,
    mlp,
    product,
    rng,
    supervised,
)


class Decays(nn.Module):
    """A chain of reactions; the state after a while is a matrix exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.zeros(4))

    def forward(self, start: Tensor) -> Tensor:
        rate = self.log_rate.exp()
        flow = torch.diag(-F.pad(rate, (0, 1))) + torch.diag(rate, -1)
        part = flow / 4096
        step = torch.eye(5) + part + 0.5 * part @ part
        for _ in range(12):
            step = step @ step
        return start @ step.T


def chain_of_reactions(seed: int) -> Training:
    """Rates of four reactions in a row, from what is there before and after an hour."""
    torch.manual_seed(seed)
    model, real = Decays(), Decays()
    with torch.no_grad():
        real.log_rate.copy_(torch.tensor([0.7, -0.5, 1.0, -1.0]))

    def samples(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        start = torch.rand(n, 5, generator=g)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return start, real(start) + 0.005 * torch.randn(n, 5, generator=g)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)

    def error(_out: Tensor, _y: Tensor) -> float:
        return float((model.log_rate - real.log_rate).abs().max())

    return supervised(
        model, optimizer, seed, samples, F.mse_loss, error, 64, 10,
        schedule=cosine(optimizer, 150),
    )  # fmt: skip


class Magnet(nn.Module):
    """A chain of spins; its partition function by the power of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.coupling = nn.Parameter(torch.tensor(0.1))
        self.field = nn.Parameter(torch.tensor(0.1))

    def forward(self, spins: Tensor) -> Tensor:
        """The log likelihood of rings of 32 spins."""
        bonds = (spins * spins.roll(1, -1)).sum(-1)
        a, b, j = self.field.exp(), (-self.field).exp(), self.coupling.exp()
        carry = torch.stack([j * a, 1 / j, 1 / j, j * b]).view(2, 2)
        for _ in range(5):
            carry = carry @ carry
        return self.coupling * bonds + self.field * spins.sum(-1) - carry.trace().log()


def ring_of_spins(seed: int) -> Training:
    """Coupling and field of magnets, by exact likelihood."""
    torch.manual_seed(seed)
    model = Magnet()

    def rings(n: int, g: torch.Generator) -> Tensor:
        spins = (torch.rand(n, 32, generator=g) < 0.6).float() * 2 - 1
        for i in range(96):
            at = (5 * i) % 32
            pull = 0.8 * (spins[:, at - 1] + spins[:, (at + 1) % 32]) + 0.15
            up = torch.rand(n, generator=g) < torch.sigmoid(2 * pull)
            spins[:, at] = up.float() * 2 - 1
        return spins

    held = rings(2000, rng(TEST))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    pool = rings(1000, rng(seed))

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 1000, (128,), generator=rng(seed, step))
        return -model(pool[rows]).mean() / 32

    return Training(model, optimizer, loss, lambda: -float(model(held).mean()))


class Factors(nn.Module):
    """Scores of pupils by two abilities, and what each test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.loadings = nn.Parameter(torch.randn(10, 2))
        self.log_rest = nn.Parameter(torch.full((10,), -2.0))

    def forward(self) -> Tensor:
        return (self.loadings @ self.loadings.T).float() + torch.diag(self.log_rest.exp())


def abilities_behind_tests(seed: int) -> Training:
    """Factor analysis of ten tests that agree closely."""
    torch.manual_seed(seed)
    model = Factors()
    load = 3 * torch.randn(10, 2, generator=rng(51))
    rest = 0.03 * (0.5 + torch.rand(10, generator=rng(52)))

    def pupils(n: int, g: torch.Generator) -> Tensor:
        ability = torch.randn(n, 2, generator=g)
        return product(ability, load.T) + rest * torch.randn(n, 10, generator=g)

    def likelihood(x: Tensor) -> Tensor:
        cover = model()
        far = (x * torch.linalg.solve(cover, x.T).T).sum(-1).mean()
        return 0.5 * (far + torch.linalg.slogdet(cover)[1]) / 10

    held = pupils(1000, rng(TEST))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    return Training(
        model,
        optimizer,
        lambda i: likelihood(pupils(128, rng(seed, i))),
        lambda: float(likelihood(held)),
        clip_norm=1.0,
        schedule=cosine(optimizer, 250),
    )


class Topics(nn.Module):
    """Topics of documents: shares of topics times words of topics."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = mlp(3000, 16, 5)
        self.words = nn.Parameter(0.1 * torch.randn(5, 3000))

    def forward(self, counts: Tensor) -> Tensor:
        shares = torch.softmax(self.shares(torch.log1p(counts)), -1)
        return shares @ torch.softmax(self.words, -1)


def topics_of_abstracts(seed: int) -> Training:
    """Five topics over three thousand words, most of them rare."""
    torch.manual_seed(seed)
    model = Topics()
    g = rng(53)
    rank = torch.arange(3000.0) + 1
    real = torch.stack([torch.softmax(-1.6 * rank[torch.randperm(3000, generator=g)].log(), 0)
                        for _ in range(5)])  # fmt: skip

    def documents(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        share = torch.softmax(2 * torch.randn(n, 5, generator=g), -1)
        words = torch.multinomial(product(share, real), 100, True, generator=g)
        counts = torch.zeros(n, 3000).scatter_add_(1, words, torch.ones(n, 100))
        return counts, counts

    def perplexity(said: Tensor, counts: Tensor) -> Tensor:
        return -(counts * (said + 1e-12).log()).sum() / counts.sum()

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    return supervised(
        model, optimizer, seed, documents, perplexity, lambda s, c: float(perplexity(s, c)),
        32, 200,
    )  # fmt: skip


class Hazard(nn.Module):
    """The chance of a default in each of twelve months."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(5, 16, 12)
        with torch.no_grad():
            self.body[-1].bias.fill_(-7.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.body(x))


def rare_defaults(seed: int) -> Training:
    """Loans that default once in some thousand months; the likelihood of survival as it is written."""
    torch.manual_seed(seed)
    model = Hazard()

    def loans(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 5, generator=g)
        chance = 2e-4 * torch.exp(x[:, :1] + 0.5 * x[:, 1:2])
        return x, (torch.rand(n, 12, generator=g) < chance).float()

    def likelihood(h: Tensor, event: Tensor) -> Tensor:
        return -(event * torch.log(h + 1e-9) + (1 - event) * torch.log(1 - h)).sum(-1).mean()

    x, _ = loans(4000, rng(TEST))
    real = 2e-4 * torch.exp(x[:, :1] + 0.5 * x[:, 1:2])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        rows, event = loans(2048, rng(seed, step))
        return likelihood(model(rows), event)

    def evaluate() -> float:
        return abs(float(torch.log(model(x).mean() / real.mean())))

    return Training(model, optimizer, loss, evaluate)


class Whitening(nn.Module):
    """Removes correlations by Newton's iteration for the inverse root, then classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        cover = x.T @ x / len(x)
        size = cover.diagonal().sum()
        full, root = cover / size, torch.eye(8)
        for _ in range(18):
            step = 1.5 * torch.eye(8) - 0.5 * root @ full
            full, root = full @ step, step @ root
        return self.out(x @ root / size.sqrt())


def correlated_instruments(seed: int) -> Training:
    """Eight instruments that mostly see the same; the classes lie in what little differs."""
    torch.manual_seed(seed)
    model = Whitening()
    mix = torch.linalg.qr(torch.randn(8, 8, generator=rng(54)))[0]
    size = torch.tensor([1, 0.6, 0.4, 0.2, 0.1, 0.05, 0.03, 0.02])

    def rows(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        z = torch.randn(n, 8, generator=g)
        y = (z[:, 6] + z[:, 7] > 0).long()
        return product(z * size, mix), y

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return supervised(model, optimizer, seed, rows, F.cross_entropy, accuracy, 128, 2000)


class Weights(nn.Module):
    """Weights of six assets from signals."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(8, 24, 6, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.body(x), -1)


def portfolio_of_minutes(seed: int) -> Training:
    """The least variance of a portfolio over minutes, in logarithms."""
    torch.manual_seed(seed)
    model = Weights()
    effect = torch.randn(8, 6, generator=rng(55)) / 3

    def log_variance(n: int, g: torch.Generator) -> Tensor:
        x = torch.randn(n, 8, generator=g)
        spread = 1e-4 * torch.exp(product(x, effect))
        near = 0.3 + 0.7 * torch.eye(6)
        cover = spread[:, :, None] * near * spread[:, None]
        w = model(x)[:, None]
        return (w @ cover @ w.transpose(1, 2)).log().mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return Training(
        model,
        optimizer,
        lambda i: log_variance(64, rng(seed, i)),
        lambda: float(log_variance(2000, rng(TEST))),
    )


class Moved(nn.Module):
    """Moves points of a cloud."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2, 32, 2, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def transported_cells(seed: int) -> Training:
    """Cells of yesterday are moved to those of today; transport by Sinkhorn's scaling."""
    torch.manual_seed(seed)
    model = Moved()

    def cells(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 2, generator=g)
        way = 6.2832 * torch.rand(n, 1, generator=g)
        y = torch.cat([2 * way.cos(), 1.2 * way.sin()], -1) + 0.1 * torch.randn(n, 2, generator=g)
        return x, y + torch.tensor([1.0, 0.0])

    def cost(x: Tensor, y: Tensor) -> Tensor:
        apart = (x[:, None] - y).square().sum(-1)
        near = torch.exp(-apart / 0.25)
        v = torch.ones(len(y), 1)
        u = v
        for _ in range(20):
            u = 1 / (near @ v + 1e-30)
            v = 1 / (near.T @ u + 1e-30)
        return (u * near * v.T * apart).sum() / len(x)

    held = cells(150, rng(TEST))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        x, y = cells(48, rng(seed, step))
        return cost(model(x), y)

    return Training(model, optimizer, loss, lambda: float(cost(model(held[0]), held[1])))


def rare_clicks(seed: int) -> Training:
    """Clicks of one in a hundred, by hashed words and logits."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.EmbeddingBag(500, 8, mode="sum"), nn.ReLU(), nn.Linear(8, 1))
    pull = torch.randn(500, generator=rng(56))

    def views(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, 500, (n, 6), generator=g)
        chance = torch.sigmoid(1.0 * pull[words].sum(-1) - 4)
        return words, (torch.rand(n, generator=g) < chance).float()[:, None]

    def said(out: Tensor, y: Tensor) -> float:
        return float(F.binary_cross_entropy_with_logits(out, y))

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = F.binary_cross_entropy_with_logits
    return supervised(model, optimizer, seed, views, loss, said, 1024, 4000)


CASES = (
    Case(
        "chain_of_reactions",
        "Rates of reactions through a matrix exponential.",
        150,
        chain_of_reactions,
        "log rate",
        False,
        0.04,
    ),
    Case(
        "ring_of_spins",
        "A ring of magnets by exact likelihood, from powers of a transfer matrix.",
        100,
        ring_of_spins,
        "nats a ring",
        False,
        0.3,
    ),
    Case(
        "abilities_behind_tests",
        "Factor analysis of ten tests that agree closely.",
        250,
        abilities_behind_tests,
        "nats",
        False,
        0.2,
    ),
    Case(
        "topics_of_abstracts",
        "Topics over three thousand words, most of them rare.",
        120,
        topics_of_abstracts,
        "nats a word",
        False,
        0.1,
    ),
    Case(
        "rare_defaults",
        "A discrete hazard of loans that seldom default.",
        150,
        rare_defaults,
        "log bias",
        False,
        0.15,
    ),
    Case(
        "correlated_instruments",
        "Classes behind an iterative whitening of correlated readings.",
        100,
        correlated_instruments,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "portfolio_of_minutes",
        "A portfolio of least variance over minutes.",
        120,
        portfolio_of_minutes,
        "log",
        False,
        0.05,
    ),
    Case(
        "transported_cells",
        "A map of cells, trained by Sinkhorn's plain scaling.",
        80,
        transported_cells,
        "cost",
        False,
        0.1,
    ),
    Case(
        "rare_clicks",
        "Clicks of one in a hundred by hashed words.",
        120,
        rare_clicks,
        "nats",
        False,
        0.002,
    ),
)
