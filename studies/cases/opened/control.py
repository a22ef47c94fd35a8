"""Control and reinforcement: values, policies, dynamics; all of it generated."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.opened._shared import cosine, draws, fixed, perceptron


class Quaternions(nn.Module):
    """A rotation, as a quaternion, from a vector and what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(9, 64, 4)

    def forward(self, frame: Tensor) -> Tensor:
        q = self.net(frame)
        answer: Tensor = q / (q * q).sum(1, keepdim=True).sqrt()
        return answer


def rotation_angles(seed: int) -> Training:
    """The angle between the rotation found and the true one, by the arc cosine of their product."""
    torch.manual_seed(seed)
    model = Quaternions()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        q = torch.randn(size, 4, generator=generator) * 0.5
        q[:, 0] = q[:, 0].abs() + 1
        q = q / q.norm(dim=1, keepdim=True)
        w, x, y, z = q.unbind(1)
        rotation = [
            *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
            *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
            *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
        ]
        return torch.stack(rotation, 1), q

    def angle(q: Tensor, truth: Tensor) -> Tensor:
        along = torch.einsum("bi,bi->b", q, truth).abs()
        return 2 * torch.acos(along * (1 - 1e-6))  # finite derivatives

    def loss(index: int) -> Tensor:
        frame, q = batch(draws(seed, index), 64)
        return angle(model(frame), q).mean()

    def evaluate() -> float:
        frame, q = batch(fixed(63), 500)
        with torch.no_grad():
            return math.degrees(float(angle(model(frame), q).mean()))

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 3e-3, 400))


class WorldModel(nn.Module):
    """Where a cart is next: its state plus what a network adds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(3, 32, 2, activation=nn.Tanh)

    def forward(self, state: Tensor, force: Tensor) -> Tensor:
        for push in force.unbind(1):
            state = state + 0.1 * self.net(torch.cat([state, push[:, None]], 1))
        return state


def cart_world_model(seed: int) -> Training:
    """Ten steps ahead; the state itself never enters a product."""
    torch.manual_seed(seed)
    model = WorldModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)

    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor, Tensor]:
        begin = torch.randn(size, 2, generator=generator)
        force = torch.randn(size, 8, generator=generator)
        x, v = begin.unbind(1)
        for push in force.unbind(1):
            x, v = x + 0.1 * v, v + 0.1 * (push - x - 0.3 * v)
        return begin, force, torch.stack([x, v], 1)

    def loss(index: int) -> Tensor:
        begin, force, end = batch(draws(seed, index), 64)
        return F.mse_loss(model(begin, force), end)

    def evaluate() -> float:
        begin, force, end = batch(fixed(64), 400)
        with torch.no_grad():
            return float((model(begin, force) - end).square().mean().sqrt())

    return Training(model, optimizer, loss, evaluate, schedule=cosine(optimizer, 1e-2, 150))


CASES = (
    Case(
        "rotation_angles",
        "Quaternions from rotated frames, by the angle that is left.",
        400,
        rotation_angles,
        "mean angle in degrees",
        False,
        1.5,
    ),
    Case(
        "cart_world_model",
        "A cart's state eight steps ahead.",
        150,
        cart_world_model,
        "RMSE",
        False,
        0.03,
    ),
)
