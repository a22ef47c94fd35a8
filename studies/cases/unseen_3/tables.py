"""Tables: patients, claims, reviews and visits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import TEST, mlp, nll, rmse, rng
from cases.unseen_3.shared import area_under_curve, fit, shuffled, standardized


def cultivars_of_wine(seed: int) -> Training:
    """The cultivar of a wine with batch norm and dropout."""
    from sklearn import datasets

    torch.manual_seed(seed)
    table = datasets.load_wine()
    x = standardized(torch.tensor(table.data, dtype=torch.float32))
    data = shuffled(x, torch.tensor(table.target))
    model = nn.Sequential(
        nn.Linear(13, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)
    )
    return fit(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2),
        seed,
        data,
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=120,
        batch=32,
    )


def progress_of_diabetes(seed: int) -> Training:
    """Standardized measurements, but the progress as it is: 25 to 346."""
    from sklearn import datasets

    torch.manual_seed(seed)
    table = datasets.load_diabetes()
    x = standardized(torch.tensor(table.data, dtype=torch.float32))
    data = shuffled(x, torch.tensor(table.target, dtype=torch.float32))
    model = mlp(10, 64, 32, 1)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        data,
        lambda x, y: F.mse_loss(model(x).squeeze(-1), y),
        lambda x, y: rmse(model(x).squeeze(-1), y),
        train=340,
    )


class WideAndDeep(nn.Module):
    """A linear model of categories beside a network of their embeddings."""

    SIZES = (9, 16, 7, 40)

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(n, 1) for n in self.SIZES)
        self.deep = nn.ModuleList(nn.Embedding(n, 6) for n in self.SIZES)
        self.body = mlp(24 + 5, 48, 24, 1)

    def forward(self, codes: Tensor, numbers: Tensor) -> Tensor:
        columns = codes.unbind(1)
        wide = sum(e(c) for e, c in zip(self.wide, columns, strict=True))
        deep = torch.cat([*(e(c) for e, c in zip(self.deep, columns, strict=True)), numbers], 1)
        return (wide + self.body(deep)).squeeze(-1)


def incomes_wide_and_deep(seed: int) -> Training:
    """Incomes over a bound from categories and numbers of generated people."""
    torch.manual_seed(seed)
    g = rng(TEST)
    model = WideAndDeep()
    codes = torch.stack([torch.randint(0, n, (3000,), generator=g) for n in model.SIZES], 1)
    numbers = torch.randn(3000, 5, generator=g)
    effects = [torch.randn(n, generator=g) for n in model.SIZES]
    logit = sum(e[c] for e, c in zip(effects, codes.unbind(1), strict=True))
    logit = logit + numbers[:, 0] * numbers[:, 1] + numbers[:, 2] - 1.5
    y = (torch.rand(3000, generator=g) < torch.sigmoid(logit)).float()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (codes, numbers, y),
        lambda c, n, y: F.binary_cross_entropy_with_logits(model(c, n), y),
        lambda c, n, y: area_under_curve(model(c, n), y),
        train=2000,
        batch=128,
    )


def cox_loss(risk: Tensor, time: Tensor, died: Tensor) -> Tensor:
    """Cox's partial likelihood of a batch of (n,) patients."""
    order = time.argsort(descending=True)
    risk, died = risk[order], died[order]
    return -((risk - risk.logcumsumexp(0)) * died).sum() / died.sum()


def months_until_relapse(seed: int) -> Training:
    """Cox's partial likelihood of generated patients, some of whom leave the study."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1600, 8, generator=g)
    hazard = torch.exp(0.8 * x[:, 0] - 0.6 * x[:, 1] * x[:, 2])
    event = -torch.log(torch.rand(1600, generator=g)) / hazard * 12
    leaves = 24 * torch.rand(1600, generator=g)
    time, died = torch.minimum(event, leaves), (event <= leaves).float()
    model = mlp(8, 32, 32, 1, act=nn.SELU)

    def concordance(x: Tensor, time: Tensor, died: Tensor) -> float:
        risk = model(x).squeeze(-1)
        earlier = (time[:, None] < time) & (died[:, None] > 0)
        return float((risk[:, None] > risk)[earlier].float().mean())

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, time, died),
        lambda x, t, d: cox_loss(model(x).squeeze(-1), t, d),
        concordance,
        train=1100,
        batch=128,
    )


def claims_of_drivers(seed: int) -> Training:
    """The sum of claims by Tweedie's deviance; most drivers have none."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(4000, 6, generator=g)
    exposure = 0.1 + 0.9 * torch.rand(4000, 1, generator=g)
    count = torch.poisson(0.3 * exposure * torch.exp(x[:, :1]), generator=g)
    size = -800 * torch.exp(0.7 * x[:, 1:2]) * torch.log(torch.rand(4000, 1, generator=g))
    model = mlp(6, 32, 1)
    nn.init.constant_(model[-1].bias, 5.5)

    def deviance(x: Tensor, exposure: Tensor, claims: Tensor) -> Tensor:
        mean = exposure * torch.exp(model(x))
        return (2 * claims * mean.pow(-0.5) + 2 * mean.pow(0.5)).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, exposure, count * size),
        deviance,
        lambda *data: float(deviance(*data)),
        train=3000,
        batch=256,
    )


class Ordinal(nn.Module):
    """Probabilities of five ordered classes by four growing thresholds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(8, 32, 1)
        self.first, self.gaps = nn.Parameter(torch.tensor([-2.0])), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        cuts = torch.cat([self.first, self.first + F.softplus(self.gaps).cumsum(0)])
        below = torch.sigmoid(cuts - self.body(x))
        edges = torch.cat([torch.zeros_like(below[:, :1]), below, torch.ones_like(below[:, :1])], 1)
        return edges[:, 1:] - edges[:, :-1]


def stars_of_reviews(seed: int) -> Training:
    """One to five stars by cumulative logits."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(2400, 8, generator=g)
    liking = 1.5 * x[:, 0] + x[:, 1] * x[:, 2] + torch.randn(2400, generator=g)
    y = torch.bucketize(liking, torch.tensor([-2.0, -0.5, 0.7, 2.0]))
    model = Ordinal()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        p = model(x).gather(1, y[:, None])
        return -torch.log(p + 1e-7).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, y),
        loss,
        lambda x, y: float(loss(x, y)),
        train=1600,
    )


def defects_on_a_line(seed: int) -> Training:
    """One part in thirty is broken: the focal loss of a sigmoid."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(6000, 12, generator=g)
    y = (x[:, 0] + 0.7 * x[:, 1] * x[:, 2] + 0.3 * torch.randn(6000, generator=g) > 2.3).float()
    model = nn.Sequential(
        nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1)
    )

    def focal(x: Tensor, y: Tensor) -> Tensor:
        logit = model(x).squeeze(-1)
        p = torch.sigmoid(logit)
        entropy = F.binary_cross_entropy_with_logits(logit, y, reduction="none")
        hit = p * y + (1 - p) * (1 - y)
        weight = 0.25 * y + 0.75 * (1 - y)
        return (weight * (1 - hit) ** 2 * entropy).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x, y),
        focal,
        lambda x, y: area_under_curve(model(x).squeeze(-1), y),
        train=4000,
        batch=128,
    )


def visits_to_a_clinic(seed: int) -> Training:
    """Counts with more spread than Poisson's: the negative binomial likelihood."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(2400, 5, generator=g)
    mean = torch.exp(2.5 + 0.6 * x[:, 0] - 0.4 * x[:, 1])
    gamma = torch.distributions.Gamma(2.0, 2.0)
    torch.manual_seed(TEST)
    rate = mean * gamma.sample((2400,))
    y = torch.poisson(rate, generator=g)
    torch.manual_seed(seed)
    model = mlp(5, 24, 2, act=nn.Tanh)

    def negative_binomial(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        mu, r = F.softplus(2 + 2 * out[:, 0]) + 1e-4, F.softplus(out[:, 1]) + 1e-2
        likelihood = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
        likelihood = likelihood + r * torch.log(r / (r + mu)) + y * torch.log(mu / (r + mu))
        return -likelihood.mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, y),
        negative_binomial,
        lambda x, y: float(negative_binomial(x, y)),
        train=1600,
        batch=128,
    )


CASES = (
    Case(
        "cultivars_of_wine",
        "The cultivar of a wine by a network with batch norm and dropout.",
        150,
        cultivars_of_wine,
        "NLL",
        False,
        0.04,
    ),
    Case(
        "progress_of_diabetes",
        "The progress of diabetes in its own units.",
        300,
        progress_of_diabetes,
        "RMSE",
        False,
        2.0,
    ),
    Case(
        "incomes_wide_and_deep",
        "Incomes over a bound, wide and deep.",
        200,
        incomes_wide_and_deep,
        "AUC",
        True,
        0.04,
    ),
    Case(
        "months_until_relapse",
        "Times until relapse by Cox's partial likelihood.",
        200,
        months_until_relapse,
        "concordance",
        True,
        0.02,
    ),
    Case(
        "claims_of_drivers",
        "Claims of drivers by Tweedie's deviance.",
        250,
        claims_of_drivers,
        "deviance",
        False,
        0.5,
    ),
    Case(
        "stars_of_reviews",
        "Stars of reviews by cumulative logits.",
        200,
        stars_of_reviews,
        "NLL",
        False,
        0.03,
    ),
    Case(
        "defects_on_a_line",
        "Rare defects by the focal loss.",
        200,
        defects_on_a_line,
        "AUC",
        True,
        0.05,
    ),
    Case(
        "visits_to_a_clinic",
        "Counts of visits by the negative binomial likelihood.",
        200,
        visits_to_a_clinic,
        "NLL",
        False,
        0.03,
    ),
)
