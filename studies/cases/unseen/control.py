"""Control and reinforcement: values, policies, dynamics; all of it generated."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.case import Case, Training
from cases.unseen._shared import cosine, draws, fixed, perceptron, rmse


def values_of_states(seed: int) -> Training:
    """Monte Carlo returns of a lander: hundreds of points, by the Huber loss and RMSprop."""
    torch.manual_seed(seed)
    model = perceptron(4, 48, 1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)

    def truth(x: Tensor) -> Tensor:
        return 20 * x[:, :1] + 15 * x[:, 1:2] * x[:, 2:3] - 10 * x[:, 3:].abs()

    def loss(index: int) -> Tensor:
        generator = draws(seed, index)
        x = torch.randn(64, 4, generator=generator)
        returns = truth(x) + 2 * torch.randn(64, 1, generator=generator)
        return F.huber_loss(model(x), returns)

    x = torch.randn(500, 4, generator=fixed(60))
    return Training(
        model,
        optimizer,
        loss,
        rmse(model, x, truth(x)),
        clip_norm=10.0,
        schedule=cosine(optimizer, 1e-2, 500),
    )


class SquashedPolicy(nn.Module):
    """Log densities of actions between -1 and 1: a normal, squashed by tanh (soft actor-critic)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(2, 32, 2, activation=nn.Tanh)

    def forward(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.net(state).chunk(2, 1)
        log_std = log_std.clamp(-4, 1)
        raw = mean + log_std.exp().to(mean.dtype) * noise.to(mean.dtype)
        action = torch.tanh(raw)
        correction = torch.log(1 - action * action + 1e-6)
        density = -0.5 * noise * noise - log_std - 0.5 * math.log(2 * math.pi)
        return action, density - correction


def squashed_policy(seed: int) -> Training:
    """Maximum entropy for a reward that pulls actions close to the limits."""
    torch.manual_seed(seed)
    model = SquashedPolicy()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def objective(generator: torch.Generator, size: int) -> Tensor:
        state = torch.randn(size, 2, generator=generator)
        action, density = model(state, torch.randn(size, 1, generator=generator))
        wish = torch.sign(state[:, :1])
        answer: Tensor = (0.5 * density - 6 * wish * action).mean()
        return answer

    def evaluate() -> float:
        with torch.no_grad():
            return float(objective(fixed(61), 4000))

    return Training(
        model,
        optimizer,
        lambda index: objective(draws(seed, index), 128),
        evaluate,
        schedule=cosine(optimizer, 5e-3, 400),
    )


class Arm(nn.Module):
    """Joint angles that bring a hand to a place; the arm's geometry is part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(2, 48, 48, 2, activation=nn.Tanh)

    def forward(self, target: Tensor) -> Tensor:
        shoulder, elbow = self.net(target).chunk(2, 1)
        x = torch.cos(shoulder) + torch.cos(shoulder + elbow)
        y = torch.sin(shoulder) + torch.sin(shoulder + elbow)
        return torch.cat([x, y], 1)


def reach_with_an_arm(seed: int) -> Training:
    """Both joints have a length of 1; a hand that misses by a hundredth has missed."""
    torch.manual_seed(seed)
    model = Arm()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def targets(generator: torch.Generator, size: int) -> Tensor:
        radius = 0.6 + torch.rand(size, generator=generator)
        angle = 2 * torch.rand(size, generator=generator)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)

    def loss(index: int) -> Tensor:
        x = targets(draws(seed, index), 128)
        return F.mse_loss(model(x), x)

    x = targets(fixed(62), 500)
    return Training(
        model, optimizer, loss, rmse(model, x, x), schedule=cosine(optimizer, 1e-2, 500)
    )


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
        "values_of_states",
        "Values of states from noisy returns, Huber loss and RMSprop.",
        500,
        values_of_states,
        "RMSE in points",
        False,
        1.0,
    ),
    Case(
        "squashed_policy",
        "A policy squashed by tanh, with entropy, near its limits.",
        400,
        squashed_policy,
        "objective",
        False,
        0.3,
    ),
    Case(
        "reach_with_an_arm",
        "Angles of two joints that bring a hand to a place.",
        500,
        reach_with_an_arm,
        "RMSE in lengths of a joint",
        False,
        0.01,
    ),
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
