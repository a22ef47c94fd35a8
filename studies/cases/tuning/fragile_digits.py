"""Trainings that need more digits of a product than its size tells."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning.shared import TEST, accuracy, cosine, generator, mlp, relative_rmse, supervised


class Resection(nn.Module):
    """A camera's pose by a weighted Gauss-Newton step; a network tells which points to trust."""

    def __init__(self) -> None:
        super().__init__()
        self.trust = mlp(4, 24, 1)

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Turn and shift (n, 6) from points (n, k, 3), deviations (n, k, 2), descriptors (n, k, 4)."""
        points, off, look = batch
        weight = torch.sigmoid(self.trust(look)).repeat_interleave(2, 1)
        slopes = slopes_of_projection(points).flatten(1, 2)
        weighted = (slopes * weight).transpose(1, 2)
        normal, right = weighted @ slopes, weighted @ off.flatten(1, 2)[..., None]
        damped = normal.float() + 1e-6 * torch.eye(6)
        return torch.linalg.solve(damped, right.float()).squeeze(-1)


def slopes_of_projection(points: Tensor) -> Tensor:
    """How a point's picture (n, k, 2) changes with a small turn and shift: (n, k, 2, 6)."""
    x, y, z = points.unbind(-1)
    u, v, o = x / z, y / z, torch.zeros_like(z)
    first = torch.stack([-u * v, 1 + u * u, -v, 1 / z, o, -u / z], -1)
    second = torch.stack([-1 - v * v, u * v, u, o, 1 / z, -v / z], -1)
    return torch.stack([first, second], -2)


def camera_by_landmarks(seed: int) -> Training:
    """A drone maker's: pose by landmarks some 30 m below; a third of the matches is wrong."""
    torch.manual_seed(seed)
    unit = torch.tensor([0.01, 0.01, 0.01, 0.3, 0.3, 0.3])

    def views(count: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        flat = 12 * torch.rand(count, 40, 2, generator=g) - 6
        z = 30 + 3 * torch.rand(count, 40, 1, generator=g)
        points = torch.cat([flat, z], -1)
        pose = torch.randn(count, 6, generator=g)
        off = (slopes_of_projection(points) * (pose * unit)[:, None, None]).sum(-1)
        wrong = (torch.rand(count, 40, 1, generator=g) < 0.33).float()
        noise = torch.randn(count, 40, 2, generator=g)
        off = off + 2e-5 * noise + 3e-3 * wrong * noise.roll(1, 1)
        look = torch.randn(count, 40, 4, generator=g) + wrong * torch.tensor([2.5, -2, 1, 0])
        return (points, off, look), pose

    model = Resection()

    def loss(found: Tensor, pose: Tensor) -> Tensor:
        return F.smooth_l1_loss(found / unit, pose)

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: views(32, generator(seed, step)),
        loss,
        views(500, generator(TEST)),
        lambda found, pose: float((found / unit - pose).abs().median()),
        clip_norm=1.0,
    )


class Polynomials(nn.Module):
    """A sum of Chebyshev polynomials of two inputs, evaluated by their coefficients."""

    DEGREE = 12

    def __init__(self) -> None:
        super().__init__()
        rows = [[1.0], [0.0, 1.0]]
        for _ in range(2, self.DEGREE + 1):
            twice = [0.0] + [2 * c for c in rows[-1]]
            rows.append([a - b for a, b in zip(twice, [*rows[-2], 0.0, 0.0], strict=True)])
        table = torch.tensor([r + [0.0] * (self.DEGREE + 1 - len(r)) for r in rows])
        self.register_buffer("table", table.T.contiguous())
        self.out = nn.Linear(2 * (self.DEGREE + 1), 1)

    def forward(self, x: Tensor) -> Tensor:
        powers = x[..., None] ** torch.arange(self.DEGREE + 1)
        return self.out((powers @ self.table).flatten(1))


def fit_by_polynomials(seed: int) -> Training:
    """A thermal engineer's: a characteristic map of a heat pump by Chebyshev polynomials."""
    torch.manual_seed(seed)
    model = Polynomials()

    def points(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(count, 2, generator=g) - 1
        return x, torch.sin(7 * x[:, :1]) + torch.cos(8 * x[:, 1:] + 1)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    return supervised(
        model,
        optimizer,
        lambda step: points(128, generator(seed, step)),
        F.mse_loss,
        points(2000, generator(TEST)),
        relative_rmse,
        schedule=cosine(optimizer, 250),
    )


class Waves(nn.Module):
    """An equation u_t = sum of coefficients times terms, whose slopes a spectral matrix takes."""

    POINTS, WIDTH = 128, 4 * torch.pi

    def __init__(self) -> None:
        super().__init__()
        for order in (1, 2, 3):
            self.register_buffer(f"slope_{order}", spectral(self.POINTS, self.WIDTH, order).float())
        self.coefficients = nn.Parameter(torch.zeros(5))

    def forward(self, u: Tensor) -> Tensor:
        first, second, third = u @ self.slope_1, u @ self.slope_2, u @ self.slope_3
        terms = (u, first, second, third, u * first)
        return sum(c * t for c, t in zip(self.coefficients, terms, strict=True))


def spectral(points: int, width: float, order: int) -> Tensor:
    """The matrix (to be multiplied from the right) of a derivative on a periodic grid."""
    k = torch.fft.fftfreq(points, dtype=torch.float64) * points * 2 * torch.pi / width
    k[points // 2] = 0 if order % 2 else k[points // 2]
    rows = torch.fft.fft(torch.eye(points, dtype=torch.float64), dim=-1) * (1j * k) ** order
    return torch.fft.ifft(rows, dim=-1).real


def equation_of_waves(seed: int) -> Training:
    """A physicist's: which equation do measured waves obey; the smoothed ones are given."""
    torch.manual_seed(seed)
    model = Waves()
    true = torch.tensor([0.0, -0.3, 0.1, -0.05, -1.0])
    g = generator(seed)
    place = torch.arange(Waves.POINTS) / Waves.POINTS * 2 * torch.pi
    waves = torch.ones(256, Waves.POINTS, dtype=torch.float64)
    for n in range(1, 7):
        size, phase = torch.randn(256, 1, generator=g) / n, 6.3 * torch.rand(256, 1, generator=g)
        waves = waves + (0.6 * size * torch.cos(n * place + phase)).double()
    first, second, third = (waves @ spectral(Waves.POINTS, Waves.WIDTH, o) for o in (1, 2, 3))
    moves = -0.3 * first + 0.1 * second - 0.05 * third - waves * first
    waves, moves = waves.float(), moves.float()
    moves = moves + 0.02 * torch.randn(moves.shape, generator=g)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 256, (32,), generator=generator(seed, step + 1))
        return F.mse_loss(model(waves[rows]), moves[rows])

    return Training(
        model,
        optimizer,
        loss,
        lambda: float((model.coefficients - true).abs().max()),
        schedule=cosine(optimizer, 400),
    )


class Earthquakes(nn.Module):
    """Places of earthquakes and delays of stations, by the times at which waves arrive."""

    def __init__(self, stations: Tensor, places: Tensor) -> None:
        super().__init__()
        self.register_buffer("stations", on_sphere(stations))
        self.places = nn.Parameter(places)
        self.delays = nn.Parameter(torch.zeros(len(stations)))

    def forward(self, rows: Tensor) -> Tensor:
        cosine_ = on_sphere(self.places[rows]) @ self.stations.T
        return 6371 * torch.acos(cosine_.clamp(-1 + 1e-7, 1 - 1e-7)) / 6 + self.delays


def on_sphere(degrees: Tensor) -> Tensor:
    """Unit vectors of latitudes and longitudes (..., 2)."""
    latitude, longitude = torch.deg2rad(degrees).unbind(-1)
    flat = latitude.cos()
    return torch.stack([flat * longitude.cos(), flat * longitude.sin(), latitude.sin()], -1)


def earthquakes_of_a_region(seed: int) -> Training:
    """A seismologist's: sixty earthquakes within 500 km, located together."""
    torch.manual_seed(seed)
    g = generator(seed)
    middle = torch.tensor([42.0, 13.0])
    stations = middle + 4 * (torch.rand(14, 2, generator=g) - 0.5)
    places = middle + 3 * (torch.rand(60, 2, generator=g) - 0.5)
    delays = 0.5 * torch.randn(14, generator=g)
    far = torch.acos(on_sphere(places.double()) @ on_sphere(stations.double()).T).float()
    seen = 6371 * far / 6 + delays + 0.05 * torch.randn(60, 14, generator=g)
    model = Earthquakes(stations, places + 0.2 * torch.randn(60, 2, generator=g))
    optimizer = torch.optim.Adam(
        [{"params": [model.places], "lr": 2e-2}, {"params": [model.delays], "lr": 3e-2}]
    )

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 60, (30,), generator=generator(seed, step + 1))
        return F.smooth_l1_loss(model(rows), seen[rows])

    return Training(
        model,
        optimizer,
        loss,
        lambda: float((model.places - places).abs().mean()) * 111,
        schedule=cosine(optimizer, 200),
    )


class Clusters(nn.Module):
    """Places (n, 6, 2) of six atoms of given sizes that shall have little energy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 48, 12)
        ring = torch.arange(6) * torch.pi / 3
        with torch.no_grad():
            self.body[-1].bias.copy_(torch.stack([ring.cos(), ring.sin()], -1).flatten())

    def forward(self, sizes: Tensor) -> Tensor:
        return self.body(sizes).unflatten(1, (6, 2))


def energy(places: Tensor, sizes: Tensor) -> Tensor:
    """Lennard-Jones, all pairs."""
    i, j = torch.triu_indices(6, 6, 1)
    apart = (places[:, i] - places[:, j]).square().sum(-1) + 1e-3
    near = ((sizes[:, i] + sizes[:, j]) / 2).square() / apart
    return 4 * (near**6 - near**3).sum(-1)


def atoms_in_a_cluster(seed: int) -> Training:
    """A chemist's: a network proposes clusters of atoms; the energy itself is the loss."""
    torch.manual_seed(seed)
    model = Clusters()

    def kinds(g: torch.Generator, count: int) -> Tensor:
        return 0.8 + 0.4 * torch.rand(count, 6, generator=g)

    def loss(step: int) -> Tensor:
        sizes = kinds(generator(seed, step), 64)
        return energy(model(sizes), sizes).mean()

    def evaluate() -> float:
        sizes = kinds(generator(TEST), 500)
        return float(energy(model(sizes), sizes).clamp(max=10).mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return Training(
        model, optimizer, loss, evaluate, clip_norm=1.0, schedule=cosine(optimizer, 300)
    )


class Levelling(nn.Module):
    """Heights of benchmarks; a survey saw differences of them."""

    def __init__(self, heights: Tensor, lines: Tensor) -> None:
        super().__init__()
        self.heights = nn.Parameter(heights)
        self.register_buffer("lines", lines)

    def forward(self) -> Tensor:
        return self.lines @ self.heights


def benchmarks_of_a_valley(seed: int) -> Training:
    """A surveyor's: heights (m) of benchmarks from levelled differences, good to a millimetre."""
    torch.manual_seed(seed)
    g = generator(seed)
    true = 200 + 500 * torch.rand(24, generator=g)
    ends = torch.stack([torch.randperm(24, generator=g)[:2] for _ in range(90)])
    lines = F.one_hot(ends[:, 0], 24).float() - F.one_hot(ends[:, 1], 24)
    seen = true[ends[:, 0]] - true[ends[:, 1]] + 1e-3 * torch.randn(90, generator=g)
    model = Levelling(true + 0.3 * torch.randn(24, generator=g), lines)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def evaluate() -> float:
        off = model.heights - true
        return 1000 * float((off - off.mean()).abs().mean())

    return Training(
        model,
        optimizer,
        lambda _: F.mse_loss(model(), seen),
        evaluate,
        schedule=cosine(optimizer, 200),
    )


class Gears(nn.Module):
    """Which tooth is damaged, by the spectrum of a turn; a matrix is the Fourier transform."""

    POINTS = 256

    def __init__(self) -> None:
        super().__init__()
        n = torch.arange(self.POINTS)
        angle = 2 * torch.pi * ((n[:, None] * torch.arange(64)) % self.POINTS) / self.POINTS
        self.register_buffer("even", angle.cos())
        self.register_buffer("odd", angle.sin())
        self.out = mlp(64, 24, 4)

    def forward(self, sound: Tensor) -> Tensor:
        power = (sound @ self.even) ** 2 + (sound @ self.odd) ** 2
        return self.out(0.2 * torch.log(power + 1e-14) + 2)


def faint_sidebands(seed: int) -> Training:
    """A maintenance engineer's: faint lines beside the mesh of the teeth, 100 dB below it."""
    torch.manual_seed(seed)
    model = Gears()
    n = torch.arange(Gears.POINTS) / Gears.POINTS * 2 * torch.pi

    def turns(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        kind = torch.randint(0, 4, (count,), generator=g)
        phase = 6.3 * torch.rand(3, count, 1, generator=g)
        size = 1e-5 * (0.6 + torch.rand(count, 1, generator=g))
        off = (2 + kind)[:, None].float()
        sound = torch.cos(32 * n + phase[0])
        sound = sound + size * torch.cos((32 + off) * n + phase[1])
        sound = sound + size * torch.cos((32 - off) * n + phase[2])
        return sound + 1e-5 * torch.randn(count, Gears.POINTS, generator=g), kind

    return supervised(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: turns(64, generator(seed, step)),
        F.cross_entropy,
        turns(1000, generator(TEST)),
        accuracy,
    )


CASES = (
    Case("camera_by_landmarks", "A pose.", 120, camera_by_landmarks, "median error", False, 0.03),
    Case("fit_by_polynomials", "Polynomials.", 250, fit_by_polynomials, "unexplained", False, 0.05),
    Case("equation_of_waves", "An equation.", 400, equation_of_waves, "error", False, 0.03),
    Case(
        "earthquakes_of_a_region",
        "A sphere.",
        200,
        earthquakes_of_a_region,
        "error (km)",
        False,
        1.0,
    ),
    Case("atoms_in_a_cluster", "An energy.", 300, atoms_in_a_cluster, "energy", False, 0.5),
    Case(
        "benchmarks_of_a_valley",
        "Heights.",
        200,
        benchmarks_of_a_valley,
        "error (mm)",
        False,
        5.0,
    ),
    Case("faint_sidebands", "Spectra.", 120, faint_sidebands, "accuracy", True, 0.05),
)
