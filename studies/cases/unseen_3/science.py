"""Equations, graphs, densities and decisions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.unseen_2.shared import TEST, accuracy, mlp, relative_rmse, rng
from cases.unseen_3.shared import fit


class Sines(nn.Module):
    """A network of sines (SIREN)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 48), nn.Linear(48, 48), nn.Linear(48, 1)])
        with torch.no_grad():
            self.layers[0].weight.uniform_(-0.5, 0.5)
            for layer in self.layers[1:]:
                layer.weight.uniform_(-math.sqrt(6 / 48) / 3, math.sqrt(6 / 48) / 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.sin(3 * layer(x))
        return self.layers[-1](x).squeeze(-1)


def distance_to_a_curve(seed: int) -> Training:
    """The signed distance to an ellipse from points and normals on it (eikonal)."""
    torch.manual_seed(seed)
    model = Sines()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def curve(n: int, g: torch.Generator) -> Tensor:
        angle = 2 * math.pi * torch.rand(n, generator=g)
        return torch.stack([0.7 * angle.cos(), 0.4 * angle.sin()], 1)

    def loss(step: int) -> Tensor:
        g = rng(seed, step)
        on, around = curve(96, g), 2 * torch.rand(96, 2, generator=g) - 1
        x = torch.cat([on, around]).requires_grad_()
        away = model(x)
        (slope,) = torch.autograd.grad(away.sum(), x, create_graph=True)
        normal = F.normalize(on / torch.tensor([0.49, 0.16]))
        straight = 1 - F.cosine_similarity(slope[:96], normal).mean()
        return 10 * away[:96].abs().mean() + (slope.norm(dim=1) - 1).square().mean() + straight

    def evaluate() -> float:
        place = 2 * torch.rand(1000, 2, generator=rng(TEST)) - 1
        true = (place[:, None] - curve(2000, rng(TEST))).norm(dim=2).amin(1)
        return float((model(place).abs() - true).abs().mean())

    return Training(model, optimizer, loss, evaluate)


def spiral_by_runge_kutta(seed: int) -> Training:
    """The slopes of a spiral, learned through twelve steps of Runge and Kutta."""
    torch.manual_seed(seed)
    model = mlp(2, 40, 40, 2, act=nn.Tanh)
    turn = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])

    def follow(slope, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        way, h = [], 0.1
        for _ in range(12):
            k1 = slope(x)
            k2 = slope(x + h / 2 * k1)
            k3 = slope(x + h / 2 * k2)
            k4 = slope(x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            way.append(x)
        return torch.stack(way, 1)

    start = 2 * torch.randn(800, 2, generator=rng(TEST))
    true = follow(lambda x: x.pow(3) @ turn / 8, start.clamp(-2, 2))
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (start.clamp(-2, 2), true),
        lambda x, y: F.smooth_l1_loss(follow(model, x), y),
        lambda x, y: relative_rmse(follow(model, x), y),
        train=600,
        batch=32,
    )


class Graph(nn.Module):
    """Two convolutions over the neighbours in a graph."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 16), nn.Linear(16, 4)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.adjacency @ F.relu(self.first(self.adjacency @ x)))


def papers_that_cite(seed: int) -> Training:
    """The field of papers from weak features and citations, of which 80 are labelled."""
    torch.manual_seed(seed)
    g = rng(TEST)
    y = torch.randint(0, 4, (300,), generator=g)
    p = torch.where(y[:, None] == y, 0.06, 0.008)
    links = (torch.rand(300, 300, generator=g) < p).float().triu(1)
    links = links + links.T + torch.eye(300)
    rate = links.sum(1).rsqrt()
    x = 0.7 * torch.randn(4, 24, generator=g)[y] + 1.5 * torch.randn(300, 24, generator=g)
    model = Graph(rate[:, None] * links * rate)
    known = torch.arange(80)

    def loss(step: int) -> Tensor:
        drop = (torch.rand(300, 24, generator=rng(seed, step)) < 0.7).float() / 0.7
        return F.cross_entropy(model(x * drop)[known], y[known])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-3)
    return Training(model, optimizer, loss, lambda: accuracy(model(x)[80:], y[80:]))


class Equivariant(nn.Module):
    """Two rounds of messages between points, by distances (EGNN)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(width) / 2)
        self.message = nn.ModuleList(mlp(2 * width + 1, width, width, act=nn.SiLU) for _ in "ab")
        self.move = nn.ModuleList(nn.Linear(width, 1) for _ in "ab")
        self.update = nn.ModuleList(mlp(2 * width, width, width, act=nn.SiLU) for _ in "ab")
        self.out = mlp(width, width, 1, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        h = self.start.expand(*x.shape[:2], -1)
        other = 1 - torch.eye(n)[..., None]
        for message, move, update in zip(self.message, self.move, self.update, strict=True):
            apart = x[:, :, None] - x[:, None]
            square = apart.square().sum(-1, keepdim=True)
            a, b = h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1)
            m = message(torch.cat([a, b, square], -1)) * other
            x = x + (apart / (square.sqrt() + 1) * move(m) * other).mean(2)
            h = h + update(torch.cat([h, m.sum(2)], -1))
        return self.out(h).sum((1, 2))


def energies_of_clusters(seed: int) -> Training:
    """The energy of generated clusters of six atoms by a network that a rotation does not change."""
    torch.manual_seed(seed)
    g = rng(TEST)
    grid = torch.cartesian_prod(*[torch.arange(2.0)] * 3)[:6] * 1.2
    x = grid + 0.12 * torch.randn(1500, 6, 3, generator=g)
    far = (x[:, :, None] - x[:, None]).norm(dim=-1) + 9 * torch.eye(6)
    y = (torch.exp(-far) / far).sum((1, 2))
    y = (y - y.mean()) / y.std()
    model = Equivariant()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, y),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=1200,
        batch=32,
    )


class Coupling(nn.Module):
    """Six affine couplings (RealNVP), from data to a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(1, 32, 32, 2) for _ in range(6))

    def nll(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(len(x))
        a, b = x.chunk(2, 1)
        for net in self.nets:
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            a, b = b * torch.exp(scale) + shift, a
            log_det = log_det + scale.squeeze(1)
        normal = 0.5 * (a.square() + b.square()).squeeze(1) + math.log(2 * math.pi)
        return normal - log_det


def rings_by_coupling(seed: int) -> Training:
    """The density of two rings by affine couplings."""
    torch.manual_seed(seed)
    g = rng(TEST)
    radius = (
        1 + torch.randint(0, 2, (4000, 1), generator=g) + 0.1 * torch.randn(4000, 1, generator=g)
    )
    angle = 2 * math.pi * torch.rand(4000, 1, generator=g)
    x = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)
    model = Coupling()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x,),
        lambda x: model.nll(x).mean(),
        lambda x: float(model.nll(x).mean()),
        train=3000,
        batch=128,
        clip_norm=5.0,
    )


def angles_of_an_arm(seed: int) -> Training:
    """Both ways in which an arm of two parts reaches a place: a mixture density."""
    torch.manual_seed(seed)
    g = rng(TEST)
    joints = torch.stack([torch.rand(4000, generator=g), 4 * torch.rand(4000, generator=g) - 2], 1)
    first, both = joints[:, 0], joints.sum(1)
    x = torch.stack([first.cos() + 0.8 * both.cos(), first.sin() + 0.8 * both.sin()], 1)
    x = x + 0.05 * torch.randn(x.shape, generator=g)
    model = mlp(2, 48, 48, 5 * 5, act=nn.Tanh)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        weight, mean, log_width = model(x).split([5, 10, 10], 1)
        log_width = log_width.unflatten(1, (5, 2)).clamp(-4, 2)
        z = (y[:, None] - mean.unflatten(1, (5, 2))) * torch.exp(-log_width)
        log_p = (-0.5 * z.square() - log_width).sum(-1) - math.log(2 * math.pi)
        return -torch.logsumexp(weight.log_softmax(1) + log_p, 1).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, joints),
        loss,
        lambda x, y: float(loss(x, y)),
        train=3000,
        batch=128,
    )


class Hyper(nn.Module):
    """Reads points of a function and writes the weights of a network that continues it."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.write = mlp(2, 48, 48), mlp(48, 64, 16 * 3 + 1)

    def forward(self, seen: Tensor, x: Tensor) -> Tensor:
        a, b, c, d = self.write(self.each(seen).mean(1)).split([16, 16, 16, 1], 1)
        h = torch.tanh(x[..., None] * a[:, None] + b[:, None])
        return (h * c[:, None]).sum(-1) + d


def functions_continued(seed: int) -> Training:
    """A hypernetwork continues sines from ten of their points."""
    torch.manual_seed(seed)
    g = rng(TEST)
    size, phase = (0.5 + torch.rand(2000, 1, generator=g) for _ in range(2))
    x = 4 * torch.rand(2000, 30, generator=g) - 2
    y = size * torch.sin(2 * x + 2 * math.pi * phase)
    seen = torch.stack([x[:, :10], y[:, :10]], -1)
    model = Hyper()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (seen, x[:, 10:], y[:, 10:]),
        lambda s, x, y: F.mse_loss(model(s, x), y),
        lambda s, x, y: relative_rmse(model(s, x), y),
        train=1600,
        batch=64,
    )


class Critic(nn.Module):
    """Values of actions, and an average of its former selves as the target."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.slow = mlp(4, 48, 48, 3), mlp(4, 48, 48, 3)
        self.slow.load_state_dict(self.now.state_dict())
        self.slow.requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, now in zip(self.slow.parameters(), self.now.parameters(), strict=True):
            slow.lerp_(now, 0.05)


def move(state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A boat in a current: where it goes, and what a step costs."""
    push = (action - 1).float()
    speed = 0.9 * state[:, 2:] + 0.2 * torch.stack([push, 0.3 * push.abs()], 1) + 0.05 * noise
    place = (state[:, :2] + 0.3 * speed).clamp(-2, 2)
    return torch.cat([place, speed], 1), 1 - place.square().sum(1) - 0.1 * push.abs()


def values_of_a_boat(seed: int) -> Training:
    """Q-learning from generated moves, with a slow target and Huber's loss."""
    torch.manual_seed(seed)
    model = Critic()
    optimizer = torch.optim.Adam(model.now.parameters(), lr=2e-3)

    def sample(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = torch.cat(
            [3 * torch.rand(n, 2, generator=g) - 1.5, torch.randn(n, 2, generator=g)], 1
        )
        action = torch.randint(0, 3, (n,), generator=g)
        return state, action, *move(state, action, torch.randn(n, 2, generator=g))

    def loss(step: int) -> Tensor:
        model.follow()
        state, action, after, reward = sample(64, rng(seed, step))
        with torch.no_grad():
            best = model.now(after).argmax(1, keepdim=True)
            target = reward + 0.95 * model.slow(after).gather(1, best).squeeze(1)
        value = model.now(state).gather(1, action[:, None]).squeeze(1)
        return F.smooth_l1_loss(value, target)

    def evaluate() -> float:
        state = sample(300, rng(TEST))[0]
        total, g = torch.zeros(300), rng(TEST)
        for _ in range(40):
            noise = torch.randn(300, 2, generator=g)
            state, reward = move(state, model.now(state).argmax(1), noise)
            total += reward
        return float(total.mean())

    return Training(model, optimizer, loss, evaluate, clip_norm=10.0)


def ranks_of_pages(seed: int) -> Training:
    """The order of twelve generated pages for a query by LambdaRank's pairs."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(900, 12, 10, generator=g)
    merit = x[..., 0] + x[..., 1] * x[..., 2] + 0.5 * torch.randn(900, 12, generator=g)
    y = (merit.argsort(1).argsort(1) // 3).float()
    model = mlp(10, 48, 24, 1)
    discount = 1 / torch.log2(torch.arange(12.0) + 2)

    def gain(score: Tensor, y: Tensor) -> Tensor:
        order = score.argsort(1, descending=True)
        return ((2 ** y.gather(1, order) - 1) * discount).sum(1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        score = model(x).squeeze(-1)
        with torch.no_grad():
            place = discount[score.argsort(1, descending=True).argsort(1)]
            change = (2 ** y[:, :, None] - 2 ** y[:, None]) * (place[:, :, None] - place[:, None])
            change = change.abs() / gain(y, y)[:, None, None]
        pairs = F.softplus(score[:, None] - score[:, :, None]) * change
        return (pairs * (y[:, :, None] > y[:, None])).sum((1, 2)).mean()

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        seed,
        (x, y),
        loss,
        lambda x, y: float((gain(model(x).squeeze(-1), y) / gain(y, y)).mean()),
        train=700,
        batch=32,
    )


class Facts(nn.Module):
    """Things and relations as complex numbers (RotatE)."""

    def __init__(self) -> None:
        super().__init__()
        self.things, self.turns = nn.Embedding(120, 32), nn.Embedding(4, 16)

    def score(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        a, b = self.things(head).chunk(2, -1)
        c, d = self.things(tail).chunk(2, -1)
        turn = self.turns(relation)
        real, imaginary = a * turn.cos() - b * turn.sin() - c, a * turn.sin() + b * turn.cos() - d
        return 12 - torch.sqrt(real.square() + imaginary.square() + 1e-12).sum(-1)


def facts_by_rotations(seed: int) -> Training:
    """Missing facts of a generated graph by rotations, with self-adversarial negatives."""
    torch.manual_seed(seed)
    g = rng(TEST)
    relation = torch.arange(480) // 120
    head = torch.arange(480) % 120
    tail = (head + torch.tensor([1, 7, 119, 30])[relation]) % 120
    order = torch.randperm(480, generator=g)
    facts = torch.stack([head, relation, tail], 1)[order]
    model = Facts()

    def loss(facts: Tensor) -> Tensor:
        head, relation, tail = facts.unbind(1)
        others = (tail[:, None] + torch.arange(5, 119, 6)) % 120
        true = model.score(head, relation, tail)
        false = model.score(head[:, None], relation[:, None], others)
        weight = false.detach().softmax(-1)
        return -(F.logsigmoid(true) + (weight * F.logsigmoid(-false)).sum(-1)).mean()

    def rank(facts: Tensor) -> float:
        head, relation, tail = facts.unbind(1)
        score = model.score(head[:, None], relation[:, None], torch.arange(120)[None])
        rank = 1 + (score > score.gather(1, tail[:, None])).sum(1)
        return float((1 / rank).mean())

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        seed,
        (facts,),
        loss,
        rank,
        train=400,
        batch=128,
    )


def earthquakes_and_echoes(seed: int) -> Training:
    """The rate of events after events (Hawkes) from their times: a network's base and a kernel."""
    torch.manual_seed(seed)
    g = rng(TEST)
    gaps = -torch.log(torch.rand(700, 12, generator=g))
    quick = torch.rand(700, 12, generator=g) < 0.4
    wait = torch.where(quick, 0.1 * gaps, gaps)
    model = nn.ModuleDict(
        {"base": mlp(2, 16, 1), "size": nn.Linear(1, 1), "speed": nn.Linear(1, 1)}
    )
    one = torch.ones(1, 1)

    def loss(wait: Tensor) -> Tensor:
        size = F.softplus(model["size"](one)).squeeze()
        speed = F.softplus(model["speed"](one)).squeeze() + 0.1
        echo, total = torch.zeros(len(wait)), torch.zeros(len(wait))
        before = torch.zeros(len(wait))
        for i in range(12):
            now = wait[:, i]
            base = F.softplus(model["base"](torch.stack([before, now], 1))).squeeze(1)
            fade = torch.exp(-speed * now)
            total = total + torch.log(base + echo * fade + 1e-6) - base * now
            total = total - echo * (1 - fade) / speed
            echo, before = echo * fade + size, now
        return -total.mean() / 12

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (wait,),
        loss,
        lambda w: float(loss(w)),
        train=500,
        batch=64,
    )


CASES = (
    Case(
        "distance_to_a_curve",
        "The signed distance to an ellipse by the length of the gradient.",
        200,
        distance_to_a_curve,
        "mean error",
        False,
        0.02,
    ),
    Case(
        "spiral_by_runge_kutta",
        "The slopes of a spiral through a solver.",
        120,
        spiral_by_runge_kutta,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "papers_that_cite",
        "The field of papers by a graph network.",
        150,
        papers_that_cite,
        "accuracy",
        True,
        0.03,
    ),
    Case(
        "energies_of_clusters",
        "The energy of clusters by an equivariant network.",
        200,
        energies_of_clusters,
        "relative RMSE",
        False,
        0.05,
    ),
    Case(
        "rings_by_coupling",
        "The density of two rings by couplings.",
        250,
        rings_by_coupling,
        "NLL",
        False,
        0.05,
    ),
    Case(
        "angles_of_an_arm",
        "Both ways in which an arm reaches a place.",
        250,
        angles_of_an_arm,
        "NLL",
        False,
        0.2,
    ),
    Case(
        "functions_continued",
        "A hypernetwork continues sines.",
        300,
        functions_continued,
        "relative RMSE",
        False,
        0.08,
    ),
    Case(
        "values_of_a_boat",
        "Q-learning with a slow target.",
        400,
        values_of_a_boat,
        "return of 40 moves",
        True,
        8.0,
    ),
    Case(
        "ranks_of_pages",
        "The order of pages by LambdaRank.",
        150,
        ranks_of_pages,
        "NDCG",
        True,
        0.01,
    ),
    Case(
        "facts_by_rotations",
        "Missing facts by rotations of complex numbers.",
        400,
        facts_by_rotations,
        "mean reciprocal rank",
        True,
        0.1,
    ),
    Case(
        "earthquakes_and_echoes",
        "The rate of events after events.",
        150,
        earthquakes_and_echoes,
        "NLL",
        False,
        0.05,
    ),
)
