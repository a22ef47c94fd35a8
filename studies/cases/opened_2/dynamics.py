"""Simulations and iterations that a training differentiates through."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import decay, dense, draw, fit, root_mse, share_unexplained, times


class Orbit(nn.Module):
    """A linear system by its matrix, stepped from a start; what is seen is every state."""

    def __init__(self, size: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.step = nn.Linear(size, size, bias=False)
        with torch.no_grad():
            self.step.weight.copy_(torch.eye(size))

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for _ in range(self.length):
            x = x + 0.05 * self.step(x)
            states.append(x)
        return torch.stack(states, 1)


def follow(matrix: Tensor, x: Tensor, length: int) -> Tensor:
    """The same system exactly."""
    once = torch.eye(len(matrix)) + 0.05 * matrix
    states = []
    for _ in range(length):
        x = x @ once.T
        states.append(x)
    return torch.stack(states, 1)


def slow_orbit(seed: int) -> Training:
    """The matrix of an oscillator from its motion; the springs are wanted to a thousandth."""
    torch.manual_seed(seed)
    model = Orbit(4, 24)
    springs = torch.tensor(
        [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [-1.1, 0.3, 0.0, 0.0], [0.3, -0.7, 0.0, 0.0]]
    )

    def motions(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 4, generator=g)
        return x, follow(springs, x, 24)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
    schedule = decay(optimizer, 80)

    def off(out: Tensor, y: Tensor) -> float:
        return root_mse(out, y)

    return fit(model, optimizer, seed, motions, F.mse_loss, off, 32, 100, schedule=schedule)


class Dominant(nn.Module):
    """The dominant direction of a learnt positive matrix, by multiplying again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.links = nn.Linear(12, 12, bias=False)
        with torch.no_grad():
            self.links.weight.copy_(0.5 + 0.1 * torch.rand(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = self.links(x).abs()
        return x / x.sum(-1, keepdim=True)


def importance(seed: int) -> Training:
    """Importance of pages, from where people end up."""
    torch.manual_seed(seed)
    model = Dominant()
    wanted = torch.softmax(torch.randn(12, generator=draw(7)), 0)

    def visits(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.rand(n, 12, generator=g), wanted.expand(n, 12)

    def divergence(out: Tensor, y: Tensor) -> Tensor:
        return F.kl_div(torch.log(out + 1e-9), y, reduction="batchmean")

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def score(out: Tensor, y: Tensor) -> float:
        return float(divergence(out, y))

    return fit(model, optimizer, seed, visits, divergence, score, 32, 200)


class Solver(nn.Module):
    """Weights of a filter for the past, as the solution of the normal equations."""

    def __init__(self) -> None:
        super().__init__()
        self.features = dense(2, 24, 8, act=nn.Tanh)
        self.ridge = nn.Parameter(torch.tensor(-7.0))

    def forward(self, task: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, query = task
        a, b = self.features(x), self.features(query)
        gram = a.transpose(1, 2) @ a + self.ridge.exp() * torch.eye(8)
        moment = a.transpose(1, 2) @ y
        solved = torch.linalg.solve(gram.float(), moment.float())
        return b @ solved


def few_shot_ridge(seed: int) -> Training:
    """Regression learnt to be learnt from 20 points: the last layer is solved for."""
    torch.manual_seed(seed)
    model = Solver()

    def tasks(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        tilt = torch.randn(n, 4, 1, generator=g)
        x = torch.rand(n, 40, 2, generator=g) * 2 - 1
        known = torch.cat([x, torch.sin(2 * x)], -1) @ tilt
        return (x[:, :20], known[:, :20], x[:, 20:]), known[:, 20:]

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(model, optimizer, seed, tasks, F.mse_loss, share_unexplained, 16, 100)


class Whiten(nn.Module):
    """Inverse square root of the covariance by Newton's and Schulz's iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        h = h - h.mean(0)
        cov = h.T @ h / len(h) + 1e-3 * torch.eye(8)
        scale = cov.diagonal().sum()
        y, z = cov / scale, torch.eye(8)
        for _ in range(12):
            t = 1.5 * torch.eye(8) - 0.5 * (z @ y)
            y, z = y @ t, t @ z
        return self.out(h @ z / scale.sqrt())


def whitened_sensors(seed: int) -> Training:
    """Sensors that nearly all measure the same; the differences count."""
    torch.manual_seed(seed)
    model = Whiten()
    common = torch.randn(2, 16, generator=draw(11))

    def readings(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        own = torch.randn(n, 16, generator=g)
        x = 3 * torch.randn(n, 2, generator=g) @ common + 0.1 * own
        return x, own[:, :3]

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, readings, F.mse_loss, share_unexplained, 128, 2000)


class Kalman(nn.Module):
    """A filter for position and speed with learnt noise."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.tensor([0.0, 0.0, 0.0]))
        self.move = nn.Parameter(torch.tensor([[1.0, 0.1], [0.0, 1.0]]), requires_grad=False)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        q, r = self.noise[:2].exp().diag(), self.noise[2].exp()
        state, p = torch.zeros(len(seen), 2), 1e4 * torch.eye(2)
        surprises, spreads = [], []
        for t in range(seen.shape[1]):
            state, p = state @ self.move.T, self.move @ p @ self.move.T + q
            s = p[0, 0] + r
            k = p[:, 0] / s
            miss = seen[:, t] - state[:, 0]
            state = state + miss[:, None] * k
            p = p - torch.outer(k, p[0])
            surprises.append(miss)
            spreads.append(s)
        return torch.stack(surprises, 1), torch.stack(spreads)


def tracking_noise(seed: int) -> Training:
    """The noise of a radar and of what it follows, by the likelihood."""
    torch.manual_seed(seed)
    model = Kalman()

    def tracks(n: int, g: torch.Generator) -> Tensor:
        speed = (0.05 * torch.randn(n, 24, generator=g)).cumsum(1) + torch.randn(n, 1, generator=g)
        place = 50 * torch.randn(n, 1, generator=g) + (0.1 * speed).cumsum(1)
        return place + 0.02 * torch.randn(n, 24, generator=g)

    def likelihood(seen: Tensor) -> Tensor:
        miss, spread = model(seen)
        return (miss[:, 4:].square() / spread[4:] + spread[4:].log()).mean()

    held = tracks(300, draw(999))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
    return Training(
        model,
        optimizer,
        lambda i: likelihood(tracks(16, draw(seed, i))),
        lambda: float(likelihood(held)),
    )


class Wave(nn.Module):
    """A wave through a medium of unknown speeds, by leapfrog."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Parameter(torch.full((64,), 0.5))
        self.lap = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.lap.weight.requires_grad_(False)
        with torch.no_grad():
            self.lap.weight.copy_(torch.tensor([[[1.0, -2.0, 1.0]]]))

    def run(self, u: Tensor, speed: Tensor) -> Tensor:
        before, seen = u, []
        for _ in range(24):
            u, before = 2 * u - before + 0.2 * speed * self.lap(u), u
            seen.append(u[:, 0, ::8])
        return torch.stack(seen, 1)

    def forward(self, u: Tensor) -> Tensor:
        return self.run(u, self.speed)


def echo_speeds(seed: int) -> Training:
    """Speeds in the ground from echoes of smooth pushes."""
    torch.manual_seed(seed)
    model = Wave()
    place = torch.arange(64.0)
    truth = 0.5 + 0.25 * torch.sin(place / 6)

    def pushes(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        at = 10 + 44 * torch.rand(n, 1, generator=g)
        u = torch.exp(-((place - at) / 9).square())[:, None]
        with torch.no_grad():
            return u, model.run(u, truth)

    exact = {i: pushes(8, draw(seed, i)) for i in range(20)}
    held = pushes(32, draw(31))
    optimizer = torch.optim.Adam([model.speed], lr=2e-2)

    def loss(step: int) -> Tensor:
        x, y = exact[step % 20]
        return F.mse_loss(model(x), y)

    return Training(model, optimizer, loss, lambda: share_unexplained(model(held[0]), held[1]))


class Relax(nn.Module):
    """Heat in a plate by relaxing many times; the sources are learnt from temperatures."""

    def __init__(self) -> None:
        super().__init__()
        self.source = dense(3, 16, 64, act=nn.Tanh)
        self.mean = nn.Conv2d(1, 1, 3, padding=1, bias=False)
        self.mean.weight.requires_grad_(False)
        with torch.no_grad():
            self.mean.weight.copy_(
                torch.tensor([[[[0.0, 0.25, 0.0], [0.25, 0.0, 0.25], [0.0, 0.25, 0.0]]]])
            )

    def forward(self, x: Tensor) -> Tensor:
        heat = self.source(x).view(-1, 1, 8, 8)
        u = heat
        for _ in range(20):
            u = self.mean(u) + heat
        return u


def plate_heat(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Relax()
    spot = torch.randn(3, 64, generator=draw(13))

    def plates(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 3, generator=g)
        heat = torch.tanh(x @ spot / 2).view(-1, 1, 8, 8)
        u = heat
        for _ in range(20):
            u = F.conv2d(u, model.mean.weight, padding=1) + heat
        return x, u

    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    return fit(model, optimizer, seed, plates, F.mse_loss, share_unexplained, 4, 50)


class Odometer(nn.Module):
    """The way of a cart: a start in metres, and small moves that a network reads off its wheels."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.move = nn.Linear(2, 2), dense(3, 16, 2, act=nn.Tanh)
        with torch.no_grad():
            self.start.weight.copy_(torch.eye(2))
            self.start.bias.zero_()

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        at, wheels = batch
        at = self.start(at)
        way, moves = [], 0.1 * self.move(wheels)
        for move in moves.unbind(1):
            at = at + move
            way.append(at)
        return torch.stack(way, 1) - way[0][:, None]


def cart(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Odometer()

    def ways(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        wheels = torch.randn(n, 20, 3, generator=g)
        moves = 0.1 * torch.stack([torch.tanh(wheels[..., 0]), torch.sin(wheels[..., 1])], -1)
        way = moves.cumsum(1)
        return (400 * torch.rand(n, 2, generator=g), wheels), way - way[:, :1]

    optimizer = torch.optim.Adam(model.move.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, ways, F.mse_loss, share_unexplained, 16, 200)


class Product(nn.Module):
    """The pose at the end of a chain of joints: a product of rotations."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, angle: Tensor) -> Tensor:
        angle = angle + self.bias
        pose = torch.eye(3).expand(len(angle), 3, 3)
        for i in range(angle.shape[1]):
            c, s, o = angle[:, i].cos(), angle[:, i].sin(), torch.zeros(len(angle))
            one = o + 1
            rows = [c, -s, o, s, c, o, o, o, one] if i % 2 else [one, o, o, o, c, -s, o, s, c]
            pose = pose @ torch.stack(rows, -1).view(-1, 3, 3)
        return pose


def joint_offsets(seed: int) -> Training:
    """Offsets of sixteen joints from poses; they are known to a milliradian afterwards."""
    torch.manual_seed(seed)
    model = Product()
    offsets = 0.1 * torch.randn(16, generator=draw(23))

    def poses(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        angle = torch.randn(n, 16, generator=g)
        with torch.no_grad():
            return angle, model(angle + offsets - model.bias)

    exact = [poses(32, draw(seed, i)) for i in range(10)]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)

    def loss(step: int) -> Tensor:
        angle, pose = exact[step % 10]
        return F.mse_loss(model(angle), pose)

    return Training(
        model,
        optimizer,
        loss,
        lambda: 1000 * root_mse(model.bias, offsets),
        schedule=decay(optimizer, 60),
    )


class Epidemic(nn.Module):
    """Compartments of an epidemic as a matrix of rates that depend on measures."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = dense(2, 8, 1, act=nn.Tanh)
        self.mix = nn.Linear(3, 3, bias=False)
        self.mix.weight.requires_grad_(False)
        with torch.no_grad():
            self.mix.weight.copy_(torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]))

    def forward(self, measures: Tensor) -> Tensor:
        rate = 0.5 * torch.sigmoid(self.rate(measures))
        ill = torch.full((len(measures), 3), 200.0)
        days = []
        for _ in range(24):
            ill = 0.9 * ill + rate * self.mix(ill) * 1.5
            days.append(ill.sum(-1))
        return torch.log(torch.stack(days, 1))


def epidemic(seed: int) -> Training:
    """Cases grow into the hundred thousands in places without measures."""
    torch.manual_seed(seed)
    model = Epidemic()

    def places(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        measures = torch.randn(n, 2, generator=g)
        rate = 0.5 * torch.sigmoid(measures.sum(-1, keepdim=True) + 1.0)
        ill, days = torch.full((n, 3), 200.0), []
        for _ in range(24):
            ill = 0.9 * ill + rate * times(ill, model.mix.weight.T) * 1.5
            days.append(ill.sum(-1))
        return measures, torch.log(torch.stack(days, 1))

    optimizer = torch.optim.Adam(model.rate.parameters(), lr=4e-2)
    return fit(model, optimizer, seed, places, F.mse_loss, share_unexplained, 32, 300)


CASES = (
    Case("slow_orbit", "An oscillator.", 80, slow_orbit, "RMSE", False, 0.01),
    Case("importance", "Power iteration.", 150, importance, "divergence", False, 0.01),
    Case("few_shot_ridge", "A solved layer.", 100, few_shot_ridge, "unexplained", False, 0.05),
    Case("whitened_sensors", "Whitening.", 100, whitened_sensors, "unexplained", False, 0.05),
    Case("tracking_noise", "A Kalman filter.", 40, tracking_noise, "NLL", False, 0.1),
    Case("echo_speeds", "Seismic inversion.", 40, echo_speeds, "unexplained", False, 0.03),
    Case("plate_heat", "Relaxation.", 60, plate_heat, "unexplained", False, 0.03),
    Case("cart", "Odometry.", 80, cart, "unexplained", False, 0.05),
    Case("joint_offsets", "Rotations.", 60, joint_offsets, "milliradians", False, 2.0),
    Case("epidemic", "Growth.", 50, epidemic, "unexplained", False, 0.05),
)
