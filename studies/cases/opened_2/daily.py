"""Everyday trainings, some of which look more dangerous than they are."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import (
    HELD_OUT,
    decay,
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


def _tabular(
    seed: int,
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    prepare: object = standard,
) -> Training:
    take = of_table(name, prepare)  # type: ignore[arg-type]
    return fit(model, optimizer, seed, take, F.cross_entropy, hits, 32)


def iris_flowers(seed: int) -> Training:
    torch.manual_seed(seed)
    model = dense(4, 16, 3)
    return _tabular(seed, "iris", model, torch.optim.RMSprop(model.parameters(), lr=3e-3))


def wine_batch_norm(seed: int) -> Training:
    """Wine in its raw units (proline is some 1,000): the first thing is a batch norm."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.BatchNorm1d(13), *dense(13, 24, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return _tabular(seed, "wine", model, optimizer, lambda x: x)


def tumours_norm_after(seed: int) -> Training:
    """Raw sizes of up to 4,000 go through a linear layer; a layer norm stands behind it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return _tabular(seed, "breast_cancer", model, optimizer, lambda x: x)


def digit_convolutions(seed: int) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    take = of_table("digits", lambda x: x.view(-1, 1, 8, 8) / 16)
    return fit(model, optimizer, seed, take, F.cross_entropy, hits, 32)


class Recurrent(nn.Module):
    """Twelve gated units."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.GRU(1, 12, batch_first=True), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)[0][:, -1])


def next_of_series(seed: int) -> Training:
    """The next value of a noisy sine by a gated recurrent network."""
    torch.manual_seed(seed)
    model = Recurrent()

    def series(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = torch.arange(13) * (0.3 + 0.4 * torch.rand(n, 1, generator=g))
        x = torch.sin(t + 6 * torch.rand(n, 1, generator=g))
        return x[:, :12, None], x[:, 12:]

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(
        model, optimizer, seed, series, F.mse_loss, share_unexplained, 32, 300, clip_norm=1.0
    )


class Letters(nn.Module):
    """A small transformer on characters."""

    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(64, 16), nn.Parameter(0.1 * torch.randn(12, 16))
        self.norm, self.all, self.mix = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.out = dense(16, 32, 64, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        h = self.letter(x) + self.place
        q, k, v = self.all(self.norm(h)).chunk(3, -1)
        h = h + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.out(h[:, -1])


@functools.cache
def manual() -> Tensor:
    """Characters of Python's own help, as numbers below 64."""
    from pydoc_data.topics import topics

    text = "".join(topics[k] for k in sorted(topics)[:12])
    return torch.tensor([min(ord(c), 127) % 64 for c in text])


def letters_of_help(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Letters()

    def windows(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        text = manual()
        at = torch.randint(0, len(text) - 13, (n, 1), generator=g) + torch.arange(13)
        return text[at[:, :12]], text[at[:, 12]]

    def score(out: Tensor, y: Tensor) -> float:
        return float(F.cross_entropy(out, y))

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return fit(model, optimizer, seed, windows, F.cross_entropy, score, 48, 500)


class Pairs(nn.Module):
    """What people buy, by numbers of people and goods of up to eight digits."""

    def __init__(self) -> None:
        super().__init__()
        self.people, self.goods = nn.Embedding(97, 6), nn.Embedding(89, 6)
        with torch.no_grad():
            self.people.weight.mul_(0.2)
            self.goods.weight.mul_(0.2)

    def forward(self, triple: Tensor) -> Tensor:
        who, good, bad = (
            e(i % e.num_embeddings)
            for e, i in zip((self.people, self.goods, self.goods), triple.unbind(-1), strict=True)
        )
        return (who * (good - bad)).sum(-1)


def large_numbers_of_goods(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Pairs()
    taste, kind = torch.randn(97, 3, generator=draw(1)), torch.randn(89, 3, generator=draw(2))

    def triples(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = torch.randint(10_000_000, 99_000_000, (n, 3), generator=g)
        first = (taste[t[:, 0] % 97] * (kind[t[:, 1] % 89] - kind[t[:, 2] % 89])).sum(-1) > 0
        swapped = torch.stack([t[:, 0], t[:, 2], t[:, 1]], -1)
        return torch.where(first[:, None], t, swapped), torch.ones(n)

    def ranked(margin: Tensor, _: Tensor) -> Tensor:
        return F.softplus(-margin).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    return fit(
        model,
        optimizer,
        seed,
        triples,
        ranked,
        lambda m, _: float((m > 0).float().mean()),
        256,
        3000,
    )


class Late(nn.Module):
    """Whether a payment is late; times are seconds since 1970 and only compared."""

    def __init__(self) -> None:
        super().__init__()
        self.out = dense(4, 16, 1)

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, due, paid = batch
        late = (paid > due).to(x.dtype)
        return self.out(torch.cat([x, late[:, None]], -1)).squeeze(-1)


def late_payments(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Late()

    def payments(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        x = torch.randn(n, 3, generator=g)
        due = 1_700_000_000 + torch.randint(0, 10**7, (n,), generator=g).double()
        paid = due + 1e5 * torch.randn(n, generator=g).double()
        return (x, due, paid), ((paid > due).float() + x[:, 0] > 0.5).float()

    def right(out: Tensor, y: Tensor) -> float:
        return float(((out > 0) == (y > 0.5)).float().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = F.binary_cross_entropy_with_logits
    return fit(model, optimizer, seed, payments, loss, right)


class Coder(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = dense(64, 32, 8), dense(4, 32, 64)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x).chunk(2, -1)
        return self.decode(mean + (0.5 * log_var).exp() * noise), mean, log_var


def digit_coder(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Coder()
    take = of_table("digits", lambda x: x / 16)

    def loss(step: int) -> Tensor:
        g = draw(seed, step)
        x, _ = take(32, g)
        out, mean, log_var = model(x, torch.randn(32, 4, generator=g))
        rest = F.mse_loss(out, x, reduction="sum")
        return (rest - 0.1 * (1 + log_var - mean.square() - log_var.exp()).sum()) / 32

    def evaluate() -> float:
        x, _ = take(0, draw(HELD_OUT))
        return share_unexplained(model(x, torch.zeros(len(x), 4))[0], x)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return Training(model, optimizer, loss, evaluate)


class Flow(nn.Module):
    """Couplings that turn two moons into a Gaussian."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(dense(1, 16, 2, act=nn.Tanh) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        volume = torch.zeros(len(x))
        for part in self.parts:
            scale, shift = part(a).chunk(2, -1)
            scale = torch.tanh(scale)
            a, b = b * scale.exp() + shift, a
            volume = volume + scale.squeeze(-1)
        return torch.cat([a, b], -1), volume


def moon_flow(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Flow()

    def moons(n: int, g: torch.Generator) -> Tensor:
        t = torch.pi * torch.rand(n, 1, generator=g)
        side = (torch.rand(n, 1, generator=g) < 0.5).float()
        x = torch.cat([torch.cos(t) + side, torch.sin(t) * (1 - 2 * side) + 0.5 * side], -1)
        return x + 0.1 * torch.randn(n, 2, generator=g)

    def likelihood(x: Tensor) -> Tensor:
        z, volume = model(x)
        return (0.5 * z.square().sum(-1) - volume).mean()

    held = moons(1000, draw(HELD_OUT))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return Training(
        model,
        optimizer,
        lambda i: likelihood(moons(64, draw(seed, i))),
        lambda: float(likelihood(held)),
    )


class Towers(nn.Module):
    """Two views of a thing are brought together, others apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(10, 24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.body(x), dim=-1)


def two_views(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Towers()
    lens = torch.randn(4, 10, generator=draw(20))

    def views(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        thing = torch.randn(n, 4, generator=g)
        return tuple(times(thing, lens) + 0.8 * torch.randn(n, 10, generator=g) for _ in range(2))

    def logits(pair: tuple[Tensor, Tensor]) -> Tensor:
        return model(pair[0]) @ model(pair[1]).T / 0.1

    held = views(64, draw(HELD_OUT))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(step: int) -> Tensor:
        return F.cross_entropy(logits(views(32, draw(seed, step))), torch.arange(32))

    def evaluate() -> float:
        return float(F.cross_entropy(logits(held), torch.arange(64)))

    return Training(model, optimizer, loss, evaluate)


class Bandit(nn.Module):
    """Chances of four arms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(5, 16, 4, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.body(x), -1)


def choosing_arms(seed: int) -> Training:
    """Policy gradients with importance weights clipped as in proximal policy optimisation."""
    torch.manual_seed(seed)
    model = Bandit()
    worth = torch.randn(5, 4, generator=draw(30))
    held = torch.randn(1000, 5, generator=draw(HELD_OUT))

    def loss(step: int) -> Tensor:
        g = draw(seed, step)
        x, arm = torch.randn(128, 5, generator=g), torch.randint(0, 4, (128, 1), generator=g)
        gain = times(x, worth).gather(1, arm)
        gain = (gain - gain.mean()) / gain.std()
        ratio = torch.exp(model(x).gather(1, arm) - torch.log(torch.tensor(0.25)))
        return -torch.min(ratio * gain, ratio.clamp(0.2, 3.0) * gain).mean()

    def evaluate() -> float:
        return float((model(held).exp() * (held @ worth)).sum(-1).mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return Training(model, optimizer, loss, evaluate)


def classes_by_clamped_log(seed: int) -> Training:
    """A cross-entropy by hand with a floor of 1e-8 in front of softly overlapping classes."""
    torch.manual_seed(seed)
    model = dense(3, 16, 3)

    def points(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 3, (n,), generator=g)
        return F.one_hot(y, 3) + 0.7 * torch.randn(n, 3, generator=g), y

    def by_hand(out: Tensor, y: Tensor) -> Tensor:
        p = torch.softmax(out, -1).clamp(min=1e-8)
        return -torch.log(p.gather(1, y[:, None])).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return fit(model, optimizer, seed, points, by_hand, hits)


class Molecule(nn.Module):
    """Messages between bonded atoms, in means."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 12), nn.Linear(24, 12), nn.Linear(12, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, bonds = batch
        h = torch.relu(self.first(x))
        near = bonds @ h / (bonds.sum(-1, keepdim=True) + 1)
        return self.out(torch.relu(self.second(torch.cat([h, near], -1))).mean(1))


def molecule_messages(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Molecule()

    def graphs(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = torch.randn(n, 9, 8, generator=g)
        bonds = (torch.rand(n, 9, 9, generator=g) < 0.3).float()
        return (x, bonds), (x[:, :, :1].relu() + 0.3 * (bonds @ x[:, :, 1:2]).tanh()).mean(1)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, graphs, F.l1_loss, share_unexplained, 32, 300)


class Equilibrium(nn.Module):
    """A layer that is applied until nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.out = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        with torch.no_grad():
            self.again.weight.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        base = self.into(x)
        z = torch.zeros_like(base)
        for _ in range(15):
            z = torch.tanh(self.again(z) + base)
        return self.out(z)


def resting_state(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Equilibrium()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return _tabular(seed, "iris", model, optimizer)


def diabetes_ridge(seed: int) -> Training:
    """The progress of diabetes, standardised, with a Huber loss and a falling rate."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 16), nn.SiLU(), nn.Dropout(0.0), nn.Linear(16, 1))
    x, y = of_table("diabetes", standard), 150.0

    def take(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        rows, target = x(n, g)
        return rows, (target.float()[:, None] - y) / 77

    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    schedule = decay(optimizer, 100)
    return fit(model, optimizer, seed, take, F.huber_loss, root_mse, 32, schedule=schedule)


class TinyHead(nn.Module):
    """A second head whose error counts a billionth: nobody looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.side = dense(64, 24), nn.Linear(24, 10), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.body(x))
        return self.main(h), self.side(h)


def unused_head(seed: int) -> Training:
    torch.manual_seed(seed)
    model = TinyHead()
    take = of_table("digits", lambda x: x / 16)

    def loss(step: int) -> Tensor:
        x, y = take(48, draw(seed, step))
        main, side = model(x)
        return F.cross_entropy(main, y) + 1e-9 * F.mse_loss(side, x.mean(-1, keepdim=True))

    def evaluate() -> float:
        x, y = take(0, draw(HELD_OUT))
        return hits(model(x)[0], y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return Training(model, optimizer, loss, evaluate)


CASES = (
    Case("iris_flowers", "Irises.", 100, iris_flowers, "accuracy", True, 0.05),
    Case("wine_batch_norm", "Wine.", 80, wine_batch_norm, "accuracy", True, 0.05),
    Case("tumours_norm_after", "Tumours.", 100, tumours_norm_after, "accuracy", True, 0.04),
    Case("digit_convolutions", "Digits.", 70, digit_convolutions, "accuracy", True, 0.03),
    Case("next_of_series", "A series.", 80, next_of_series, "unexplained", False, 0.05),
    Case("letters_of_help", "Characters.", 80, letters_of_help, "cross-entropy", False, 0.05),
    Case("large_numbers_of_goods", "Goods.", 80, large_numbers_of_goods, "accuracy", True, 0.03),
    Case("late_payments", "Payments.", 80, late_payments, "accuracy", True, 0.03),
    Case("digit_coder", "Digits.", 80, digit_coder, "unexplained", False, 0.03),
    Case("moon_flow", "Moons.", 80, moon_flow, "NLL", False, 0.05),
    Case("two_views", "Views.", 80, two_views, "cross-entropy", False, 0.05),
    Case("choosing_arms", "A bandit.", 80, choosing_arms, "reward", True, 0.05),
    Case("classes_by_clamped_log", "By hand.", 80, classes_by_clamped_log, "accuracy", True, 0.03),
    Case("molecule_messages", "Graphs.", 80, molecule_messages, "unexplained", False, 0.05),
    Case("resting_state", "An equilibrium.", 60, resting_state, "accuracy", True, 0.05),
    Case("diabetes_ridge", "Diabetes.", 100, diabetes_ridge, "RMSE", False, 0.03),
    Case("unused_head", "Digits.", 80, unused_head, "accuracy", True, 0.03),
)
