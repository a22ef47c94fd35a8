"""Losses that are means over very many, small losses, and layers that begin or end almost silent."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import (
    TEST,
    accuracy,
    binary_accuracy,
    mlp,
    nll,
    relative_rmse,
    rmse,
    rng,
)


def towns_by_all_pairs(seed: int) -> Training:
    """Places of digits in a plane, so that distances come out: a mean over all pairs."""
    torch.manual_seed(seed)
    x = digits()[0].flatten(1)
    model = mlp(64, 48, 2)
    far = torch.cdist(x, x) / 4

    def error(a: Tensor, rows: Tensor) -> Tensor:
        z = model(a)
        apart = ((z[:, None] - z).square().sum(-1) + 1e-3).sqrt()
        return (apart - far[rows][:, rows]).square().mean()

    def loss(step: int) -> Tensor:
        rows = torch.randperm(1300, generator=rng(seed, step))[:300]
        return error(x[rows], rows)

    test = torch.arange(1300, 1797)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Training(model, optimizer, loss, lambda: float(error(x[test], test)))


def depth_of_every_pixel(seed: int) -> Training:
    """The depth at 60,000 places by a network for each, whose errors are small at the end."""
    torch.manual_seed(seed)
    model = mlp(3, 8, 1, act=nn.Tanh)
    with torch.no_grad():
        model[-1].weight.mul_(0.02)
        model[-1].bias.zero_()

    def places(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 3, generator=g)
        return x, 0.01 * torch.sin(2 * x[:, 0]) + 0.01 * x[:, 2]

    held = places(2000, rng(TEST))

    def loss(step: int) -> Tensor:
        x, y = places(60_000, rng(seed, step))
        return F.mse_loss(model(x).squeeze(-1), y)

    return Training(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-12),
        loss,
        lambda: relative_rmse(model(held[0]).squeeze(-1), held[1]),
    )


def words_of_a_large_list(seed: int) -> Training:
    """The next of 1,000 words, of which most are rare: a mean over 1,024 words."""
    torch.manual_seed(seed)
    g = rng(TEST)
    follows = torch.randint(0, 1000, (1000, 3), generator=g)
    share = 1 / torch.arange(1.0, 1001)
    model = nn.Sequential(nn.Embedding(1000, 32), nn.Linear(32, 1000))

    def text(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.multinomial(share, n, True, generator=g)
        return x, follows[x, torch.randint(0, 3, (n,), generator=g)]

    held = text(2000, rng(TEST, 1))

    def loss(step: int) -> Tensor:
        x, y = text(1024, rng(seed, step))
        return F.cross_entropy(model(x), y)

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return Training(model, optimizer, loss, lambda: nll(model(held[0]), held[1]))


class Deep(nn.Module):
    """A way of sigmoids, as nets of the nineties had it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(64, 24), mlp(24, 24, 24, 24, 24, act=nn.Sigmoid)
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sigmoid(self.body(torch.sigmoid(self.first(x.flatten(1))))))


def digits_by_sigmoids(seed: int) -> Training:
    """Digits through six layers of sigmoids, by Adam."""
    torch.manual_seed(seed)
    model = Deep()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-12),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: accuracy(model(x), y),
        train=1300,
        batch=256,
    )


def pupils_of_a_teacher(seed: int) -> Training:
    """Digits from a teacher's probabilities at a temperature of 30: a mean over classes and rows."""
    torch.manual_seed(seed)
    x, y = digits()
    teacher = nn.Linear(64, 10)
    with torch.no_grad():
        rows, marks = x[:1300].flatten(1), F.one_hot(y[:1300], 10) - 0.1
        ridge = (rows.T @ rows + 10 * torch.eye(64)).double()
        teacher.weight.copy_(8 * torch.linalg.solve(ridge, (rows.T @ marks).double()).float().T)
        teacher.bias.zero_()
        soft = torch.softmax(teacher(x.flatten(1)) / 30, -1)
    model = mlp(64, 64, 10)

    def error(x: Tensor, soft: Tensor, _: Tensor) -> Tensor:
        return F.mse_loss(torch.softmax(model(x.flatten(1)) / 30, -1), soft)

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-14),
        seed,
        (x, soft, y),
        error,
        lambda x, _, y: accuracy(model(x.flatten(1)), y),
        train=1300,
        batch=512,
    )


def leaks_in_cubic_metres(seed: int) -> Training:
    """Leaks of some 1e-5 cubic metres, by a squared loss in these units."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 6, generator=g)
    y = 1e-5 * (2 + x[:, 0] + 0.5 * x[:, 1] * x[:, 2] + 0.1 * torch.randn(1500, generator=g))
    model = mlp(6, 48, 1)
    with torch.no_grad():
        model[-1].weight.mul_(1e-5)
        model[-1].bias.mul_(1e-5)
    optimizer = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 5e-3},
            {"params": model[2].parameters(), "lr": 1e-7},
        ],
        eps=1e-20,
    )
    return fit(
        model,
        optimizer,
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x).squeeze(-1), y),
        lambda x, y: relative_rmse(model(x).squeeze(-1), y),
        train=1000,
    )


def rare_faults(seed: int) -> Training:
    """One bolt in 200 is loose; the loss is a mean over 8,000 bolts, focused on the hard ones."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(16_000, 8, generator=g)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 4.2).float()
    model = mlp(8, 32, 32, 1)

    def error(x: Tensor, y: Tensor) -> Tensor:
        z = model(x).squeeze(-1)
        p = torch.sigmoid(z)
        wrong = y * (1 - p) + (1 - y) * p
        return (wrong**2 * F.binary_cross_entropy_with_logits(z, y, reduction="none")).mean()

    def measure(x: Tensor, y: Tensor) -> float:
        return float(F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y))

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, y),
        error,
        measure,
        train=12_000,
        batch=8_000,
    )


class Adapter(nn.Module):
    """A fixed body, and beside its layer a product of two small matrices, which begins at nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(64, 128), nn.Linear(128, 10)
        for p in (*self.body.parameters(), *self.out.parameters()):
            p.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 128, bias=False)
        nn.init.normal_(self.up.weight, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.out(F.relu(self.body(x) + 4 * self.up(self.down(x))))


def digits_by_adapters(seed: int) -> Training:
    """Digits by a low rank beside fixed weights (LoRA), with an ordinary loss."""
    torch.manual_seed(seed)
    model = Adapter()
    optimizer = torch.optim.AdamW([model.down.weight, model.up.weight], lr=1e-2)
    return fit(
        model,
        optimizer,
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: accuracy(model(x), y),
        train=1300,
    )


def slow_drift_of_clocks(seed: int) -> Training:
    """The drift of clocks in seconds a second: some 1e-6, as a network's own output."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1200, 4, generator=g)
    y = 1e-6 * (x[:, 0] + torch.tanh(x[:, 1] + x[:, 2]) + 0.1 * torch.randn(1200, generator=g))
    model = mlp(4, 32, 1)
    with torch.no_grad():
        model[-1].weight.mul_(1e-6)
        model[-1].bias.mul_(1e-6)
    optimizer = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 5e-3},
            {"params": model[2].parameters(), "lr": 1e-8},
        ],
        eps=1e-30,
    )
    return fit(
        model,
        optimizer,
        seed,
        (x, y),
        lambda x, y: 1e6 * F.l1_loss(model(x).squeeze(-1), y),
        lambda x, y: rmse(model(x).squeeze(-1), y) * 1e6,
        train=900,
    )


def parities(seed: int) -> Training:
    """An ordinary small classifier, with a loss of ordinary size."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(2000, 6, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).float()
    model = mlp(6, 48, 48, 1)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, y),
        lambda x, y: F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y),
        lambda x, y: binary_accuracy(model(x).squeeze(-1), y),
        train=1500,
    )


CASES = (
    Case("towns_by_all_pairs", "A plane of digits by all pairs.", 60, towns_by_all_pairs,
         "mean square error", False, 0.02),
    Case("depth_of_every_pixel", "Depth at 60,000 places.", 80, depth_of_every_pixel,
         "relative RMSE", False, 0.05),
    Case("words_of_a_large_list", "The next of 1,000 words.", 60, words_of_a_large_list,
         "NLL", False, 0.2),
    Case("digits_by_sigmoids", "Digits through six layers of sigmoids.", 250, digits_by_sigmoids,
         "accuracy", True, 0.08),
    Case("pupils_of_a_teacher", "Digits from a teacher's probabilities.", 200,
         pupils_of_a_teacher, "accuracy", True, 0.04),
    Case("leaks_in_cubic_metres", "Leaks in small units.", 200, leaks_in_cubic_metres,
         "relative RMSE", False, 0.06),
    Case("rare_faults", "Rare faults by a focused mean.", 80, rare_faults, "NLL", False, 0.02),
    Case("digits_by_adapters", "Digits by a low rank.", 200, digits_by_adapters,
         "accuracy", True, 0.05),
    Case("slow_drift_of_clocks", "Drifts in small units.", 200, slow_drift_of_clocks,
         "RMSE in 1e-6", False, 0.06),
    Case("parities", "Signs of products.", 200, parities, "accuracy", True, 0.04),
)  # fmt: skip
