"""Trainings of everyday: tables, words, sounds, graphs and pictures, prepared as one prepares them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import (
    TEST,
    accuracy,
    binary_accuracy,
    mlp,
    nll,
    product,
    relative_rmse,
    rng,
    supervised,
)


def spiral_arms(seed: int) -> Training:
    """Three arms of a spiral."""
    torch.manual_seed(seed)
    model = mlp(2, 32, 32, 3, act=nn.SiLU)

    def arms(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        arm = torch.randint(0, 3, (n,), generator=g)
        r = torch.rand(n, generator=g)
        turn = 2.1 * arm + 4 * r + 0.15 * torch.randn(n, generator=g)
        return torch.stack([r * torch.cos(turn), r * torch.sin(turn)], -1) * 2, arm

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(model, optimizer, seed, arms, F.cross_entropy, accuracy)


class Opinion(nn.Module):
    """A bag of words and one score."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.score = nn.EmbeddingBag(400, 16, mode="mean"), mlp(16, 16, 1)

    def forward(self, text: Tensor) -> Tensor:
        return self.score(self.words(text)).squeeze(-1)


def opinions(seed: int) -> Training:
    """Reviews of thirty words, good or bad."""
    torch.manual_seed(seed)
    model = Opinion()
    mood = torch.randn(400, generator=rng(11))

    def reviews(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        text = (400 * torch.rand(n, 30, generator=g).square()).long().clamp(max=399)
        noise = 0.1 * torch.randn(n, generator=g)
        return text, (mood[text].mean(-1) + noise > mood.mean()).float()

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return supervised(
        model, optimizer, seed, reviews, F.binary_cross_entropy_with_logits, binary_accuracy, 128
    )


class CausalNet(nn.Module):
    """Causal convolutions over symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(12, 12)
        self.first, self.second = nn.Conv1d(12, 24, 2), nn.Conv1d(24, 24, 2, dilation=2)
        self.out = nn.Linear(24, 12)

    def forward(self, text: Tensor) -> Tensor:
        h = self.symbol(text).transpose(1, 2)
        h = F.relu(self.first(F.pad(h, (1, 0))))
        h = F.relu(self.second(F.pad(h, (2, 0))))
        return self.out(h.transpose(1, 2)).flatten(0, 1)


def next_symbol(seed: int) -> Training:
    """The next of twelve symbols, which depends on the last two."""
    torch.manual_seed(seed)
    model = CausalNet()

    def texts(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        text = [torch.randint(0, 12, (n,), generator=g) for _ in range(2)]
        jump = (torch.rand(n, 15, generator=g) < 0.1) * torch.randint(0, 12, (n, 15), generator=g)
        for i in range(15):
            text.append((5 * text[-1] + text[-2] + 3 + jump[:, i]) % 12)
        whole = torch.stack(text, -1)
        return whole[:, :-1], whole[:, 1:].flatten()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return supervised(model, optimizer, seed, texts, F.cross_entropy, nll, 32, 200)


def spoken_commands(seed: int) -> Training:
    """Four gliding tones in noise, by convolutions over the waveform."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 12, 32, stride=8), nn.BatchNorm1d(12), nn.ReLU(),
        nn.Conv1d(12, 24, 5, stride=2), nn.BatchNorm1d(24), nn.ReLU(),
        nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(48, 4),
    )  # fmt: skip

    def sounds(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 4, (n,), generator=g)
        t = torch.linspace(0, 1, 400)
        start = 12 + 18 * (y % 2).float() + torch.randn(n, generator=g)
        glide = 12 * (2 * (y // 2).float() - 1)
        phase = 6.28 * (start[:, None] * t + 0.5 * glide[:, None] * t * t)
        clip = torch.sin(phase + 6.28 * torch.rand(n, 1, generator=g))
        return (clip + 0.7 * torch.randn(n, 400, generator=g))[:, None], y

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return supervised(model, optimizer, seed, sounds, F.cross_entropy, accuracy, 32, 300)


class GraphConvolution(nn.Module):
    """Two rounds over a graph with symmetric normalisation."""

    def __init__(self, links: Tensor) -> None:
        super().__init__()
        full = links + torch.eye(len(links))
        root = full.sum(-1).rsqrt()
        self.register_buffer("mix", root[:, None] * full * root)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix @ self.second(F.relu(self.mix @ self.first(x)))


def cited_papers(seed: int) -> Training:
    """Topics of 150 papers by citations; a tenth of the topics is known."""
    torch.manual_seed(seed)
    g = rng(seed + 40)
    topic = torch.arange(150) % 3
    chance = torch.where(topic[:, None] == topic, 0.1, 0.015)
    links = (torch.rand(150, 150, generator=g) < chance).float().triu(1)
    model = GraphConvolution(links + links.T)
    x = torch.randn(150, 16, generator=g) + 0.7 * F.one_hot(topic, 16)
    known = torch.arange(150) < 15
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    return Training(
        model,
        optimizer,
        lambda _: F.cross_entropy(model(x)[known], topic[known]),
        lambda: accuracy(model(x)[~known], topic[~known]),
    )


class NoiseGuess(nn.Module):
    """Guesses noise from a noisy point and its level."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 48, 48, 2, act=nn.SiLU)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = [torch.sin(3 * t), torch.cos(3 * t), t, t * t]
        return self.body(torch.cat([x, *waves], -1))


def swiss_roll(seed: int) -> Training:
    """A diffusion model of a rolled-up line in the plane."""
    torch.manual_seed(seed)
    model = NoiseGuess()

    def noisy(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        turn = 1.5 * torch.pi * (1 + 2 * torch.rand(n, 1, generator=g))
        x = torch.cat([turn * torch.cos(turn), turn * torch.sin(turn)], -1) / 8
        t, noise = torch.rand(n, 1, generator=g), torch.randn(n, 2, generator=g)
        angle = 1.5 * t
        return torch.cos(angle) * x + torch.sin(angle) * noise, t, noise

    def error(n: int, g: torch.Generator) -> Tensor:
        x, t, noise = noisy(n, g)
        return F.mse_loss(model(x, t), noise)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return Training(
        model,
        optimizer,
        lambda i: error(128, rng(seed, i)),
        lambda: float(error(4000, rng(TEST))),
    )


class Masked(nn.Linear):
    """A linear layer that sees only what comes before."""

    def __init__(self, n: int, m: int, strict: bool) -> None:
        super().__init__(n, m)
        a, b = torch.arange(m) % 24, torch.arange(n) % 24
        self.register_buffer("mask", (a[:, None] > b if strict else a[:, None] >= b).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


def presence_of_species(seed: int) -> Training:
    """Which of 24 species live together: a masked autoregressive density of bits."""
    torch.manual_seed(seed)
    model = nn.Sequential(Masked(24, 48, True), nn.ReLU(), Masked(48, 24, False))
    habitat = torch.randn(3, 24, generator=rng(12))

    def sites(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        kind = torch.randn(n, 3, generator=g)
        bits = (product(kind, habitat) + torch.randn(n, 24, generator=g) > 0).float()
        return bits, bits

    def per_site(out: Tensor, bits: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, bits, reduction="none").sum(-1).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(
        model, optimizer, seed, sites, per_site, lambda o, b: float(per_site(o, b)), 128
    )


def time_to_failure(seed: int) -> Training:
    """Cox's partial likelihood for pumps, of which a third is still running."""
    torch.manual_seed(seed)
    model = mlp(6, 16, 1, act=nn.Tanh)

    def pumps(n: int, g: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = torch.randn(n, 6, generator=g)
        risk = x[:, 0] + 0.5 * x[:, 1] * x[:, 2]
        until = -torch.log(torch.rand(n, generator=g)) * torch.exp(-risk)
        censor = 2 * torch.rand(n, generator=g)
        return x, (torch.minimum(until, censor), (until < censor).float())

    def partial(out: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
        order = seen[0].argsort(descending=True)
        risk, event = out.squeeze(-1)[order], seen[1][order]
        return -((risk - torch.logcumsumexp(risk.float(), 0)) * event).sum() / event.sum()

    def concordance(out: Tensor, seen: tuple[Tensor, Tensor]) -> float:
        time, event = seen
        counts = (time[:, None] < time) & (event[:, None] > 0.5)
        return float(((out > out.T) & counts).sum() / counts.sum())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return supervised(model, optimizer, seed, pumps, partial, concordance, 128, 600)


class Ratings(nn.Module):
    """Factors and offsets of people and films."""

    def __init__(self) -> None:
        super().__init__()
        self.people, self.films = nn.Embedding(80, 8), nn.Embedding(60, 8)
        self.strict, self.liked = nn.Embedding(80, 1), nn.Embedding(60, 1)
        for e in (self.people, self.films, self.strict, self.liked):
            nn.init.normal_(e.weight, 0, 0.2)

    def forward(self, pair: Tensor) -> Tensor:
        who, what = pair.unbind(-1)
        both = (self.people(who) * self.films(what)).sum(-1)
        return both + self.strict(who).squeeze(-1) + self.liked(what).squeeze(-1)


def stars_for_films(seed: int) -> Training:
    """Ratings about their mean, by factors."""
    torch.manual_seed(seed)
    model = Ratings()
    a, b = torch.randn(80, 2, generator=rng(13)), torch.randn(60, 2, generator=rng(14))

    def ratings(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        who = torch.randint(0, 80, (n,), generator=g)
        what = torch.randint(0, 60, (n,), generator=g)
        stars = 0.7 * (a[who] * b[what]).sum(-1) + 0.4 * b[what, 0]
        return torch.stack([who, what], -1), stars + 0.2 * torch.randn(n, generator=g)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    return supervised(model, optimizer, seed, ratings, F.mse_loss, relative_rmse, 256, 3000)


def new_alphabets(seed: int) -> Training:
    """Episodes of five new classes, told by the nearest mean of three examples."""
    torch.manual_seed(seed)
    model = mlp(12, 32, 8)
    lens = torch.randn(4, 12, generator=rng(15))

    def episode(g: torch.Generator) -> tuple[Tensor, Tensor]:
        centre = 1.5 * torch.randn(5, 1, 4, generator=g)
        seen = product(torch.tanh(centre + 0.3 * torch.randn(5, 9, 4, generator=g)), lens)
        h = model(seen + 0.5 * torch.randn(5, 9, 12, generator=g))
        means, asked = h[:, :3].mean(1), h[:, 3:].flatten(0, 1)
        far = (asked[:, None] - means).square().sum(-1)
        return -far, torch.arange(5).repeat_interleave(6)

    def evaluate() -> float:
        return sum(accuracy(*episode(rng(TEST, i))) for i in range(60)) / 60

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return Training(model, optimizer, lambda i: F.cross_entropy(*episode(rng(seed, i))), evaluate)


CASES = (
    Case(
        "spiral_arms",
        "A small network tells the three arms of a spiral apart.",
        150,
        spiral_arms,
        "accuracy",
        True,
        0.05,
    ),
    Case(
        "opinions",
        "Reviews are told good or bad by the mean of their words' vectors.",
        120,
        opinions,
        "accuracy",
        True,
        0.04,
    ),
    Case(
        "next_symbol",
        "Causal convolutions foretell the next of twelve symbols.",
        150,
        next_symbol,
        "nats",
        False,
        0.1,
    ),
    Case(
        "spoken_commands",
        "Convolutions over waveforms tell four gliding tones apart.",
        60,
        spoken_commands,
        "accuracy",
        True,
        0.06,
    ),
    Case(
        "cited_papers",
        "A graph convolution finds papers' topics by citations.",
        80,
        cited_papers,
        "accuracy",
        True,
        0.05,
    ),
    Case(
        "swiss_roll",
        "A diffusion model learns a rolled-up line.",
        200,
        swiss_roll,
        "noise error",
        False,
        0.03,
    ),
    Case(
        "presence_of_species",
        "A masked autoregressive density of which species live together.",
        150,
        presence_of_species,
        "nats",
        False,
        0.2,
    ),
    Case(
        "time_to_failure",
        "Cox's partial likelihood of pumps' failures, some censored.",
        120,
        time_to_failure,
        "concordance",
        True,
        0.02,
    ),
    Case(
        "stars_for_films",
        "Ratings by factors of people and films.",
        150,
        stars_for_films,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "new_alphabets",
        "Prototypes of new classes from three examples each.",
        100,
        new_alphabets,
        "accuracy",
        True,
        0.04,
    ),
)
