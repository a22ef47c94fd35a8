"""Small models, batches and plans that several tests share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpdiag.plan import LossScalePlan, PrecisionPlan


def backoff(init_scale: float = 1024.0, **settings) -> PrecisionPlan:
    """A plan with a dynamic scale."""
    scale = LossScalePlan(method="backoff", init_scale=init_scale, **settings)
    return PrecisionPlan(loss_scale=scale)


def constant(scale: float = 1024.0) -> PrecisionPlan:
    """A plan with a constant scale."""
    return PrecisionPlan(loss_scale=LossScalePlan(method="constant", init_scale=scale))


def network(seed: int = 0) -> nn.Module:
    """A little of everything: convolution, batch norm, linear."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)
    )


def batch(seed: int = 1, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and classes for ``network``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 10, (size,), generator=generator)


@pytest.fixture(autouse=True)
def one_thread():
    """Imported by the conftest of folders whose tests want one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
