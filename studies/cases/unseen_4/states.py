"""Values that a training carries itself from step to step, and gradients that it takes itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.tuning_3.shared import digits, fit
from cases.unseen_2.shared import TEST, mlp, nll, relative_rmse, rmse, rng


class Energy(nn.Module):
    """An energy for each sample of a noisy signal."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 12, 5, padding=2), nn.Tanh(), nn.Conv1d(12, 1, 5, padding=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The denoised signals (n, 1, length): two steps down the energy's slope."""
        clean = x.detach().requires_grad_()
        for _ in range(2):
            energy = (self.net(clean) ** 2 + 0.1 * (clean - x) ** 2).mean()
            (slope,) = torch.autograd.grad(energy, clean, create_graph=True)
            clean = clean - 0.3 * clean.numel() * slope
        return clean


def noise_by_an_energy(seed: int) -> Training:
    """Signals are cleaned along the gradient of a mean energy, times the number of samples."""
    torch.manual_seed(seed)
    model = Energy()
    time = torch.arange(128.0)

    def signals(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        rate, phase = (
            0.1 + 0.2 * torch.rand(n, 1, 1, generator=g),
            6 * torch.rand(n, 1, 1, generator=g),
        )
        y = torch.sin(rate * time + phase)
        return y + 0.5 * torch.randn(n, 1, 128, generator=g), y

    held = signals(200, rng(TEST))

    def loss(step: int) -> Tensor:
        x, y = signals(32, rng(seed, step))
        return F.mse_loss(model(x), y)

    def evaluate() -> float:
        with torch.enable_grad():
            return rmse(model(held[0]).detach(), held[1])

    return Training(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, evaluate)


class Whitened(nn.Module):
    """Features over the root of the mean of all squares that were ever seen, which is kept as a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = mlp(64, 48, 24), nn.Linear(24, 10)
        self.total, self.count = torch.zeros(24), 0

    def forward(self, x: Tensor) -> Tensor:
        h = 3 * self.body(x.flatten(1))
        if self.training:
            self.total = self.total.to(h.dtype) + (len(h) * (h * h).mean(0)).detach()
            self.count += len(h)
        return self.out(h / (self.total / self.count + 1e-3).sqrt())


def digits_by_all_squares(seed: int) -> Training:
    """Digits by features over their size since the beginning."""
    torch.manual_seed(seed)
    model = Whitened()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        digits(),
        lambda x, y: F.cross_entropy(model(x), y),
        lambda x, y: nll(model(x), y),
        train=1300,
    )


class Codes(nn.Module):
    """An encoder, 32 codes that follow the mean of what is near them, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(64, 48, 8), mlp(8, 48, 64)
        self.sums, self.counts = torch.randn(32, 8), torch.ones(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        codes = (self.sums / (self.counts + 1e-5)).to(z.dtype)
        near = torch.cdist(z.float(), codes.float()).argmin(1)
        mine = F.one_hot(near, 32).to(z.dtype)
        if self.training:
            with torch.no_grad():
                self.counts = 0.99 * self.counts.to(z.dtype) + 0.01 * mine.T @ torch.ones_like(
                    mine[:, :1]
                )
                self.sums = 0.99 * self.sums.to(z.dtype) + 0.01 * mine.T @ z
        code = codes[near]
        return self.decode(z + (code - z).detach()), (z - code).square().mean()


def digits_by_codes(seed: int) -> Training:
    """Digits through 32 codes, whose places are slow means (VQ-VAE)."""
    torch.manual_seed(seed)
    model = Codes()
    x = digits()[0].flatten(1)

    def error(x: Tensor) -> Tensor:
        out, apart = model(x)
        return F.mse_loss(out, x) + 0.25 * apart

    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        seed,
        (x,),
        error,
        lambda x: rmse(model(x)[0], x),
        train=1300,
        batch=128,
    )


class Planets(nn.Module):
    """A learned force, and a path through it by small steps."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.force = nn.Linear(2, 4), mlp(2, 24, 2, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        place, speed = self.start(x).split(2, -1)
        for _ in range(60):
            speed = speed + 0.01 * self.force(place)
            place = place + 0.01 * speed
        return place


def paths_by_small_steps(seed: int) -> Training:
    """Where a ball is after sixty steps of a hundredth of a second."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = 2 * torch.randn(1200, 2, generator=g)
    place, speed = x.clone(), 0.5 * torch.stack([x[:, 1], -x[:, 0]], 1)
    for _ in range(60):
        speed = speed - 0.01 * 2 * place
        place = place + 0.01 * speed
    model = Planets()
    return fit(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        seed,
        (x, place),
        lambda x, y: F.mse_loss(model(x), y),
        lambda x, y: relative_rmse(model(x), y),
        train=800,
        batch=64,
    )


class Traces(nn.Module):
    """Policy logits beside a running mean and size of the returns, kept in the head's format."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 32, 3)
        self.mean, self.square = torch.zeros(()), torch.ones(())

    def standardized(self, value: Tensor) -> Tensor:
        self.mean = 0.999 * self.mean.to(value.dtype) + 0.001 * value.mean()
        self.square = 0.999 * self.square.to(value.dtype) + 0.001 * (value * value).mean()
        return (value - self.mean) / (self.square - self.mean * self.mean).clamp(min=1e-2).sqrt()


def bids_by_their_gain(seed: int) -> Training:
    """Which of three bids to make: a policy gradient by gains around 90 that differ by 3."""
    torch.manual_seed(seed)
    g = rng(TEST)
    x = torch.randn(1500, 4, generator=g)
    gain = 90 + 3 * torch.stack([x[:, 0], x[:, 1] * x[:, 2], -x[:, 3]], 1)
    model = Traces()

    def loss(step: int) -> Tensor:
        own = rng(seed, step)
        rows = torch.randint(0, 1000, (128,), generator=own)
        logits = model.net(x[rows])
        chance = torch.log_softmax(logits, -1)
        made = torch.multinomial(chance.detach().float().exp(), 1, generator=own)
        worth = model.standardized(gain[rows].gather(1, made).to(logits.dtype)).detach()
        return -(worth * chance.gather(1, made)).mean()

    def evaluate() -> float:
        best = model.net(x[1000:]).argmax(1, keepdim=True)
        return float(gain[1000:].gather(1, best).mean())

    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, evaluate)


CASES = (
    Case("noise_by_an_energy", "Signals are cleaned along a mean energy's gradient.", 120,
         noise_by_an_energy, "RMSE", False, 0.02),
    Case("digits_by_all_squares", "Digits by features over their size since the beginning.", 300,
         digits_by_all_squares, "NLL", False, 0.1),
    Case("digits_by_codes", "Digits through 32 codes.", 300, digits_by_codes, "RMSE", False, 0.015),
    Case("paths_by_small_steps", "Paths by small steps.", 100, paths_by_small_steps,
         "relative RMSE", False, 0.03),
    Case("bids_by_their_gain", "Bids by a policy gradient.", 300, bids_by_their_gain,
         "mean gain", True, 0.5),
)  # fmt: skip
