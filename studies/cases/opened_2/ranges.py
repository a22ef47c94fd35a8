"""Trainings with large or small numbers in the middle: raw units, spectra, sums, masks, floors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import decay, dense, draw, fit, hits, share_unexplained, times

DAY = 86_400.0


class TimeOfDay(nn.Module):
    """Sines of learnt rates of the second of the day."""

    def __init__(self) -> None:
        super().__init__()
        self.rates, self.out = nn.Linear(1, 12), dense(12, 16, 1)
        with torch.no_grad():
            self.rates.weight.copy_((1 + torch.arange(12)).view(-1, 1) * 2 * torch.pi / DAY)
            self.rates.bias.uniform_(-3, 3)

    def forward(self, seconds: Tensor) -> Tensor:
        return self.out(torch.sin(self.rates(seconds)))


def load_of_the_grid(seed: int) -> Training:
    """The load of a grid by the second of the day."""
    torch.manual_seed(seed)
    model = TimeOfDay()

    def seconds(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        t = torch.randint(0, 86_400, (n, 1), generator=g).float()
        w = 2 * torch.pi * t / DAY
        return t, torch.sin(w) + 0.5 * torch.cos(2 * w) + 0.2 * torch.sin(3 * w)

    optimizer = torch.optim.Adam(
        [
            {"params": model.out.parameters(), "lr": 5e-3},
            {"params": model.rates.parameters(), "lr": 1e-9},
        ]
    )
    return fit(model, optimizer, seed, seconds, F.mse_loss, share_unexplained)


class LogMel(nn.Module):
    """Classes of sounds by the logarithm of bands of a power spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.bands = nn.Linear(65, 16, bias=False)
        self.bands.weight.requires_grad_(False)
        centre = torch.linspace(2, 62, 16)[:, None]
        with torch.no_grad():
            self.bands.weight.copy_((1 - (torch.arange(65) - centre).abs() / 4).clamp(min=0))
        self.out = dense(16, 32, 4)

    def forward(self, sound: Tensor) -> Tensor:
        power = torch.fft.rfft(sound * torch.hann_window(128)).abs() ** 2 / 128**2
        return self.out((torch.log(self.bands(power) + 1e-10) + 12) / 6)


def quiet_instruments(seed: int) -> Training:
    torch.manual_seed(seed)
    model = LogMel()

    def sounds(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        kind = torch.randint(0, 4, (n,), generator=g)
        t = torch.arange(128)
        pitch = 0.2 + 0.3 * torch.rand(n, 1, generator=g)
        overtone = torch.sin((kind[:, None] + 2) * pitch * t)
        loud = 10 ** (-1 - 2 * torch.rand(n, 1, generator=g))
        noise = torch.randn(n, 128, generator=g)
        return loud * (torch.sin(pitch * t) + 0.3 * overtone + 0.01 * noise), kind

    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return fit(model, optimizer, seed, sounds, F.cross_entropy, hits)


class RootMeanSquare(nn.Module):
    """A normalisation by hand of what electrodes measure in volts."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(14, 16, bias=False), dense(16, 16, 3)

    def forward(self, volts: Tensor) -> Tensor:
        h = self.mix(volts)
        h = h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-14)
        return self.out(h)


def electrodes(seed: int) -> Training:
    torch.manual_seed(seed)
    model = RootMeanSquare()
    sources = torch.randn(3, 14, generator=draw(41))

    def moments(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        kind = torch.randint(0, 3, (n,), generator=g)
        return 2e-5 * (sources[kind] + 0.7 * torch.randn(n, 14, generator=g)), kind

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return fit(model, optimizer, seed, moments, F.cross_entropy, hits)


class Masked(nn.Module):
    """Attention over a set of varying size; what is not there has a score of -1e9."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 8) for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, there = batch
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(~there[:, None], -1e9)
        return self.out(torch.softmax(scores, -1) @ self.value(x)).squeeze(-1)[:, 0]


def sets_of_readings(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Masked()

    def sets(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = torch.randn(n, 8, 4, generator=g)
        there = torch.arange(8) < torch.randint(2, 9, (n, 1), generator=g)
        mean = (x[:, :, 0] * there).sum(1) / there.sum(1)
        return (x, there), mean

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, sets, F.mse_loss, share_unexplained)


class Spectrum(nn.Module):
    """A learnt transform of 16-bit samples, its power, its logarithm, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Linear(64, 32, bias=False)
        n, k = torch.arange(64.0), torch.arange(16.0)[:, None]
        with torch.no_grad():
            self.waves.weight.copy_(
                torch.cat(
                    [torch.cos(2 * torch.pi * k * n / 64), torch.sin(2 * torch.pi * k * n / 64)]
                )
            )
        self.out = nn.Linear(16, 5)

    def forward(self, samples: Tensor) -> Tensor:
        a, b = self.waves(samples).chunk(2, -1)
        return self.out(torch.log1p(a * a + b * b) / 10)


def sixteen_bits(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Spectrum()

    def samples(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        kind = torch.randint(0, 5, (n,), generator=g)
        t = torch.arange(64)
        wave = torch.sin(2 * torch.pi * (kind[:, None] * 2 + 2) * t / 64 + kind[:, None])
        loud = 3000 + 9000 * torch.rand(n, 1, generator=g)
        return (loud * wave + 2500 * torch.randn(n, 64, generator=g)).round(), kind

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, samples, F.cross_entropy, hits)


class Hubs(nn.Module):
    """Messages along a dense graph are added up in four rounds; only the end is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, links = batch
        for layer in self.rounds:
            x = x + torch.relu(layer(links @ x))
        return self.out(self.norm(x.mean(1)))


def social_graphs(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Hubs()

    def graphs(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        kind = torch.randint(0, 3, (n,), generator=g)
        x = torch.rand(n, 40, 8, generator=g)
        x[..., :3] += 0.7 * F.one_hot(kind, 3)[:, None]
        links = (torch.rand(n, 40, 40, generator=g) < 0.7).float()
        return (x, links), kind

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(model, optimizer, seed, graphs, F.cross_entropy, hits, 16, 200)


class Transport(nn.Module):
    """Matches two clouds: Sinkhorn's iteration on a kernel of learnt features."""

    def __init__(self) -> None:
        super().__init__()
        self.features = dense(2, 16, 4, act=nn.Tanh)

    def forward(self, clouds: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (self.features(c) for c in clouds)
        kernel = torch.exp(-(a[:, :, None] - b[:, None]).square().sum(-1) / 0.08)
        left = torch.ones(len(a), 10, 1)
        for _ in range(10):
            right = 0.1 / (kernel.transpose(1, 2) @ left)
            left = 0.1 / (kernel @ right)
        return (left * kernel * right.transpose(1, 2)).clamp(min=1e-20)


def matched_clouds(seed: int) -> Training:
    """The second cloud is the first, turned and shuffled."""
    torch.manual_seed(seed)
    model = Transport()
    turn = torch.tensor([[0.9, 0.436], [-0.436, 0.9]])

    def clouds(n: int, g: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        a = torch.randn(n, 10, 2, generator=g)
        order = torch.rand(n, 10, generator=g).argsort(-1)
        b = times(a, turn).gather(1, order[..., None].expand(-1, -1, 2))
        return (a, b), order

    def missed(plan: Tensor, order: Tensor) -> Tensor:
        return -plan.log().gather(1, order[:, None]).mean()

    def found(plan: Tensor, order: Tensor) -> float:
        return float((plan.argmax(1) == order).float().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(model, optimizer, seed, clouds, missed, found, 16, 200)


class Stations(nn.Module):
    """Weather at a place in kilometres, interpolated between stations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", 3000 * torch.rand(24, 2, generator=draw(6)))
        self.reading = nn.Parameter(torch.zeros(24))

    def forward(self, at: Tensor) -> Tensor:
        far = (
            at.square().sum(-1, keepdim=True)
            + self.places.square().sum(-1)
            - 2 * at @ self.places.T
        )
        return torch.softmax(-far / 2e5, -1) @ self.reading[:, None]


def weather_stations(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Stations()

    def places(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        at = 3000 * torch.rand(n, 2, generator=g)
        return at, torch.sin(at[:, :1] / 500) + torch.cos(at[:, 1:] / 700)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    return fit(model, optimizer, seed, places, F.mse_loss, share_unexplained)


class Fraud(nn.Module):
    """The chance that a payment is fraud."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(6, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.body(x))


def clear_fraud(seed: int) -> Training:
    """Cross-entropy by hand with a floor of 1e-8; most fraud is obvious."""
    torch.manual_seed(seed)
    model = Fraud()

    def payments(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        bad = (torch.rand(n, 1, generator=g) < 0.4).float()
        x = torch.randn(n, 6, generator=g)
        return x + bad * (8 * torch.rand(n, 1, generator=g)), bad

    def by_hand(p: Tensor, bad: Tensor) -> Tensor:
        return -(bad * torch.log(p + 1e-8) + (1 - bad) * torch.log(1 - p + 1e-8)).mean()

    def right(p: Tensor, bad: Tensor) -> float:
        return float(((p > 0.5) == (bad > 0.5)).float().mean())

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return fit(model, optimizer, seed, payments, by_hand, right, 64, 2000)


class Variance(nn.Module):
    """Tomorrow's variance of an exchange rate from those of the last days."""

    def __init__(self) -> None:
        super().__init__()
        self.past = nn.Linear(5, 1)
        with torch.no_grad():
            self.past.weight.fill_(0.1)
            self.past.bias.fill_(1e-7)

    def forward(self, squares: Tensor) -> Tensor:
        return self.past(squares).clamp(min=1e-12)


def exchange_rates(seed: int) -> Training:
    """Returns of a few ten-thousandths: their variances are some 1e-7."""
    torch.manual_seed(seed)
    model = Variance()
    taken = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.05])

    def days(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        squares = 4e-7 * torch.randn(n, 5, generator=g).square()
        spread = (times(squares, taken[:, None])[:, 0] + 2e-8).sqrt()
        return squares, (spread * torch.randn(n, generator=g))[:, None]

    def likelihood(variance: Tensor, change: Tensor) -> Tensor:
        return (change.square() / variance + torch.log(variance)).mean()

    def score(variance: Tensor, change: Tensor) -> float:
        return float(likelihood(variance, change))

    optimizer = torch.optim.Adam(
        [
            {"params": [model.past.weight], "lr": 1e-2},
            {"params": [model.past.bias], "lr": 2e-9},
        ]
    )
    return fit(
        model, optimizer, seed, days, likelihood, score, 128, 4000, schedule=decay(optimizer, 200)
    )


CASES = (
    Case("load_of_the_grid", "Seconds.", 150, load_of_the_grid, "unexplained", False, 0.1),
    Case("quiet_instruments", "Log mel.", 120, quiet_instruments, "accuracy", True, 0.05),
    Case("electrodes", "Volts.", 150, electrodes, "accuracy", True, 0.05),
    Case("sets_of_readings", "A mask.", 120, sets_of_readings, "unexplained", False, 0.05),
    Case("sixteen_bits", "Audio samples.", 120, sixteen_bits, "accuracy", True, 0.05),
    Case("social_graphs", "Sums over links.", 80, social_graphs, "accuracy", True, 0.05),
    Case("matched_clouds", "Transport.", 60, matched_clouds, "share found", True, 0.05),
    Case("weather_stations", "Kilometres.", 120, weather_stations, "unexplained", False, 0.05),
    Case("clear_fraud", "A floor.", 120, clear_fraud, "accuracy", True, 0.02),
    Case("exchange_rates", "Small variances.", 200, exchange_rates, "NLL", False, 0.05),
)
