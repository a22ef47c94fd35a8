"""Small models, batches and plans that several tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import mpdiag
from mpdiag.plan import LossScalePlan, PrecisionPlan

if TYPE_CHECKING:
    from pathlib import Path


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


def record_and_train(recording: Path, training: Path) -> None:
    """Record three steps in FP32, and train one by the plan that they give."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, recording):
        for i in range(3):
            x, y = batch(i)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = mpdiag.analyze(recording).plan
    with mpdiag.MixedPrecision(model, optimizer, plan, run=training) as mp:
        x, y = batch()
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        mp.step(loss)
