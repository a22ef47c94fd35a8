"""Recommendation: tables of users and things, and what they make of each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import fixed, rmse, rows

USERS, THINGS = 200, 100


def ratings() -> tuple[Tensor, Tensor]:
    """Generated: pairs [N, 2] of a user and a thing, and ratings [N] from about 1 to 5."""
    generator = fixed(40)
    users, things = (
        torch.randn(USERS, 4, generator=generator),
        torch.randn(4, THINGS, generator=generator),
    )
    pairs = torch.stack(
        [torch.randint(n, (12_000,), generator=generator) for n in (USERS, THINGS)], 1
    )
    taste = (users @ things / 2)[pairs[:, 0], pairs[:, 1]]
    return pairs, 3 + torch.tanh(taste) + 0.1 * torch.randn(len(pairs), generator=generator)


class Factors(nn.Module):
    """A vector for each user and thing, a bias for each, and the mean rating."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(USERS, 8), nn.Embedding(THINGS, 8)
        self.bias = nn.Embedding(USERS + THINGS, 1)
        self.mean = nn.Parameter(torch.zeros(()))
        for table in (self.users, self.things):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        biases = self.bias(pairs + torch.tensor([0, USERS]))[..., 0].sum(1)
        user, thing = self.users(pairs[:, 0]), self.things(pairs[:, 1])
        answer: Tensor = self.mean + biases + (user * thing).sum(1)
        return answer


def matrix_factors_adagrad(seed: int) -> Training:
    torch.manual_seed(seed)
    pairs, stars = ratings()
    model = Factors()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def loss(index: int) -> Tensor:
        chosen = rows(10_000, 512, seed, index)
        return F.mse_loss(model(pairs[chosen]), stars[chosen])

    return Training(model, optimizer, loss, rmse(model, pairs[10_000:], stars[10_000:]))


def embeddings_small_steps(seed: int) -> Training:
    """The tables of a served model are kept fresh, gently, while tastes drift."""
    torch.manual_seed(seed)
    pairs, stars = ratings()
    model = Factors()
    before = torch.optim.Adam(model.parameters(), lr=0.03)
    for index in range(250):
        chosen = rows(10_000, 512, seed, 500_000 + index)
        before.zero_grad()
        F.mse_loss(model(pairs[chosen]), stars[chosen]).backward()
        before.step()
    model.zero_grad()
    drift = 0.3 * torch.randn(THINGS, generator=fixed(44))
    stars = stars + drift[pairs[:, 1]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def loss(index: int) -> Tensor:
        chosen = rows(10_000, 256, seed, index)
        return F.mse_loss(model(pairs[chosen]), stars[chosen])

    return Training(model, optimizer, loss, rmse(model, pairs[10_000:], stars[10_000:]))


CASES = (
    Case(
        "matrix_factors_adagrad",
        "Generated ratings as products of factors, by Adagrad.",
        300,
        matrix_factors_adagrad,
        "RMSE in stars",
        False,
        0.03,
    ),
    Case(
        "embeddings_small_steps",
        "Trained factors follow a generated drift by plain SGD.",
        2000,
        embeddings_small_steps,
        "RMSE in stars",
        False,
        0.03,
    ),
)
