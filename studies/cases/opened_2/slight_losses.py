"""Losses that are small by their units or by what they are divided by."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import dense, draw, fit, hits, of_table, share_unexplained


class Flux(nn.Module):
    """The flux of a star in jansky from its spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.out = nn.Conv1d(1, 6, 5), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return 1e-3 * self.out(torch.relu(self.lines(x)).mean(-1))


def star_flux(seed: int) -> Training:
    """Fluxes of a millijansky; the optimizer's epsilon is small for that."""
    torch.manual_seed(seed)
    model = Flux()

    def stars(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 1, 24, generator=g) + torch.randn(n, 1, 1, generator=g)
        return x, 1e-3 * torch.tanh(x.mean(-1))

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, eps=1e-16)
    return fit(model, optimizer, seed, stars, F.mse_loss, share_unexplained)


def people_by_weight(seed: int) -> Training:
    """A survey: each answer counts as the share of the population that it stands for."""
    torch.manual_seed(seed)
    model = dense(8, 16, 4)
    group = 2 * torch.randn(8, 4, generator=draw(12))

    def answers(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 8, generator=g)
        return x, (x @ group + torch.randn(n, 4, generator=g)).argmax(-1)

    def weighed(out: Tensor, y: Tensor) -> Tensor:
        share = (1 + (y == 2).float()) / 8e7
        return (share * F.cross_entropy(out, y, reduction="none")).sum()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-15)
    return fit(model, optimizer, seed, answers, weighed, hits)


def per_corpus(seed: int) -> Training:
    """Digits; the sum of the losses is divided by the number of pixels of the whole collection."""
    torch.manual_seed(seed)
    model = dense(64, 24, 10)
    take = of_table("digits", lambda x: x / 16)

    def shared_out(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="sum") / (1797 * 64 * 1000)

    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, eps=1e-14)
    return fit(model, optimizer, seed, take, shared_out, hits, 48)


class Bids(nn.Module):
    """A bid in dollars for one view of an advertisement."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(6, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return 2e-3 * torch.sigmoid(self.body(x))


def bids_for_views(seed: int) -> Training:
    """The expected gain of a view is a fraction of a cent."""
    torch.manual_seed(seed)
    model = Bids()

    def views(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 6, generator=g)
        return x, 2e-3 * torch.sigmoid(x[:, :1] + x[:, 1:2])

    def lost(bid: Tensor, worth: Tensor) -> Tensor:
        chance = torch.sigmoid((bid.float() - 1e-3) / 5e-4)
        return -(chance * (worth - bid.float())).mean()

    def gain(bid: Tensor, worth: Tensor) -> float:
        return -1e6 * float(lost(bid, worth))

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, eps=1e-14)
    return fit(model, optimizer, seed, views, lost, gain, 128, 4000)


class Wavefront(nn.Module):
    """Errors of a mirror in metres from what its sensors see."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(9, 24, 3, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return 5e-8 * self.body(x)


def wavefront(seed: int) -> Training:
    """Errors of a tenth of a wavelength of light."""
    torch.manual_seed(seed)
    model = Wavefront()

    def looks(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 9, generator=g)
        return x, 5e-8 * torch.sin(x[:, :3] + x[:, 3:6])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-24)
    return fit(model, optimizer, seed, looks, F.mse_loss, share_unexplained)


class Segments(nn.Module):
    """A trunk with an edge head that has a weight of 3e-6 among four losses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.edge = nn.Conv1d(1, 8, 5, padding=2), nn.Conv1d(8, 1, 5, padding=2)
        self.level = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.level(h.mean(-1)), self.edge(h)


def edges_and_level(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Segments()

    def signals(n: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        jumps = (torch.rand(n, 1, 40, generator=g) < 0.1).float()
        x = (jumps * torch.randn(n, 1, 40, generator=g)).cumsum(-1)
        return x, x.mean(-1), jumps

    held = signals(200, draw(66))

    def loss(step: int) -> Tensor:
        x, level, jumps = signals(16, draw(seed, step))
        said, edge = model(x)
        return F.mse_loss(said, level) + 3e-6 * F.binary_cross_entropy_with_logits(edge, jumps)

    def evaluate() -> float:
        return float(F.binary_cross_entropy_with_logits(model(held[0])[1], held[2]))

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-15)
    return Training(model, optimizer, loss, evaluate)


CASES = (
    Case("star_flux", "Jansky.", 80, star_flux, "unexplained", False, 0.1),
    Case("people_by_weight", "A survey.", 80, people_by_weight, "accuracy", True, 0.05),
    Case("per_corpus", "Digits.", 80, per_corpus, "accuracy", True, 0.05),
    Case("bids_for_views", "Bids.", 80, bids_for_views, "dollars per million", True, 10.0),
    Case("wavefront", "A mirror.", 100, wavefront, "unexplained", False, 0.1),
    Case("edges_and_level", "Two heads.", 80, edges_and_level, "cross-entropy", False, 0.03),
)
