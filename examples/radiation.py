"""A workload of your own, for ``mpdiag demo examples/radiation.py`` and ``mpdiag search …``.

A network learns temperatures from the heat that surfaces radiate. The fourth power of 300 kelvins is
8.1e9, which FP16 cannot hold: ``pow`` has to stay in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpdiag.workloads.protocol import Batch, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

TEACHER = torch.randn(16, generator=torch.Generator().manual_seed(7)) / 4


def radiated(kelvins: Tensor) -> Tensor:
    """W/m², by the law of Stefan and Boltzmann."""
    return 5.67e-8 * kelvins.pow(4)


class SquaredError(nn.Module):
    """Of fluxes. Only what modules compute can be kept in FP32, so the loss is one."""

    def forward(self, out: Tensor, flux: Tensor) -> Tensor:
        return ((radiated(300 + 30 * out.squeeze(-1)) - flux) / 100).square().mean()


class Radiator(nn.Module):
    """The loss of a batch of surfaces, each with 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        self.criterion = SquaredError()

    def forward(self, x: Tensor, flux: Tensor) -> Tensor:
        return self.criterion(self.body(x), flux)


@dataclass(frozen=True)
class Radiation(Workload):
    """Temperatures from fluxes."""

    name, title, family = "radiation", "Radiation", "physics"
    summary = "Temperatures are learned from the heat that surfaces radiate."
    default_steps, metric, margin, higher_is_better = 80, "squared error", 0.01, False
    clip_norm = 5.0

    rate: float = 3e-3

    def model(self) -> nn.Module:
        return Radiator()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate)

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            x = torch.randn(64, 16, generator=generator)
            yield x, radiated(300 + 30 * torch.sin(2 * x @ TEACHER))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch)

    def score(self, model: nn.Module) -> float:
        return float(self.loss(model, next(self.batches(1, 1_000_003))))
