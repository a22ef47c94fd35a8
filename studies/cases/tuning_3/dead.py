"""Gradients that move nothing, and small ones that do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit, shuffled, standardized
from cases.unseen_2.shared import TEST, accuracy, mlp, nll, rmse, rng


class Rows(nn.Module):
    """One layer of attention over the rows of a digit."""

    def __init__(self, size: float, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 24, bias), nn.Linear(8, 24, bias)
        self.v, self.out = nn.Linear(8, 24), nn.Linear(24 * 8, 10)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x = x.squeeze(1)
        scores = self.size * self.q(x) @ self.k(x).transpose(1, 2)
        return self.out((scores.softmax(-1) @ self.v(x)).flatten(1))


def rows_of_digits(seed: int, size: float = 24**-0.5, *, bias: bool = True) -> Training:
    """Digits by attention over their rows."""
    torch.manual_seed(seed)
    model = Rows(size, bias=bias)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=1300,
    )


def saturated_rows(seed: int) -> Training:
    """Scores of thousands: each row sees one other, and what chose it learns nothing."""
    return rows_of_digits(seed, 1500.0)


class Gated(nn.Module):
    """A network beside another that is all but shut out."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.body, self.shut, self.out = mlp(64, 48), mlp(64, 48, 48), nn.Linear(48, 10)
        self.gate = nn.Parameter(torch.tensor([gate]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        h = F.relu(self.body(x)) + torch.sigmoid(self.gate) * self.shut(x)
        return self.out(h)


def shut_out(seed: int, gate: float = -35.0) -> Training:
    """Digits, and a way behind a gate of e^-35 that plain SGD never opens."""
    torch.manual_seed(seed)
    model = Gated(gate)
    return fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=1300,
    )


def shut_out_by_adam(seed: int) -> Training:
    """The same gate, e^-18, where Adam makes steps of any gradient."""
    training = shut_out(seed, -18.0)
    optimizer = torch.optim.Adam(training.model.parameters(), lr=3e-3)
    return Training(training.model, optimizer, training.loss, training.evaluate)


def in_millionths(seed: int) -> Training:
    """Digits by a loss that is divided by a million, and Adam with a small epsilon."""
    torch.manual_seed(seed)
    model = mlp(64, 48, 10)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-16),
        seed,
        digits(),
        lambda x, y: 1e-6 * F.cross_entropy(model(x.flatten(1)), y),
        lambda x, y: nll(model(x.flatten(1)), y),
        train=1300,
    )


class TwoHeads(nn.Module):
    """Two networks that share nothing but the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(64, 32, 10), mlp(64, 32, 10)


def far_apart(seed: int) -> Training:
    """Two losses of digits, ten to the eleventh apart, and Adam."""
    torch.manual_seed(seed)
    model = TwoHeads()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x = x.flatten(1)
        return 1e-8 * F.cross_entropy(model.a(x), y) + 1e3 * F.cross_entropy(model.b(x), y)

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-20),
        seed,
        digits(),
        loss,
        lambda x, y: 0.5 * (nll(model.a(x.flatten(1)), y) + nll(model.b(x.flatten(1)), y)),
        train=1300,
    )


def settled_regression(seed: int) -> Training:
    """A function that can be fitted: gradients fall to nothing with the loss."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(600, 6, generator=g)
    y = x @ torch.randn(6, 1, generator=g)
    model = mlp(6, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fit(
        model,
        optimizer,
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: rmse(model(x), y),
        train=400,
    )


def tumours_of_the_breast(seed: int) -> Training:
    """Tumours by a small network: nothing to see."""
    from sklearn import datasets

    torch.manual_seed(seed)
    table = datasets.load_breast_cancer()
    x = standardized(torch.tensor(table.data, dtype=torch.float32))
    model = mlp(30, 32, 2)
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        shuffled(x, torch.tensor(table.target)),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=400,
    )


class Reader(nn.Module):
    """An LSTM that reads a digit row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x.squeeze(1))[0][:, -1])


def digits_read_by_rows(seed: int) -> Training:
    """Digits by an LSTM."""
    torch.manual_seed(seed)
    model = Reader()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: accuracy(model(x), y),
        train=1300,
        clip_norm=1.0,
    )


CASES = (
    Case(
        "rows_of_digits",
        "Attention over rows, with a bias of the keys.",
        150,
        rows_of_digits,
        "NLL",
        False,
        0.1,
    ),
    Case(
        "saturated_rows",
        "Attention over rows with saturated scores.",
        150,
        saturated_rows,
        "NLL",
        False,
        0.2,
    ),
    Case(
        "shut_out",
        "Digits beside a way that a gate shuts out.",
        150,
        shut_out,
        "NLL",
        False,
        0.1,
    ),
    Case(
        "shut_out_by_adam",
        "Digits beside a way that a gate shuts out, by Adam.",
        150,
        shut_out_by_adam,
        "NLL",
        False,
        0.1,
    ),
    Case(
        "in_millionths",
        "Digits by a loss in millionths.",
        150,
        in_millionths,
        "NLL",
        False,
        0.1,
    ),
    Case(
        "far_apart",
        "Two losses that are eleven powers of ten apart.",
        150,
        far_apart,
        "mean NLL",
        False,
        0.1,
    ),
    Case(
        "settled_regression",
        "A linear function that is fitted exactly.",
        300,
        settled_regression,
        "RMSE",
        False,
        0.02,
    ),
    Case(
        "tumours_of_the_breast",
        "Tumours by a small network.",
        150,
        tumours_of_the_breast,
        "NLL",
        False,
        0.03,
    ),
    Case(
        "digits_read_by_rows",
        "Digits by an LSTM over rows.",
        120,
        digits_read_by_rows,
        "accuracy",
        True,
        0.04,
    ),
)
