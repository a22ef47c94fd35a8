"""Small recordings that several tests make and read."""

import dataclasses

import numpy as np
import torch
from torch import nn

import mpdiag
from mpdiag.numerics.histograms import ExponentHistogram


def model_and_optimizer(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def step(model, optimizer, x=None):
    x = torch.randn(5, 8) if x is None else x
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def steps(count, model, optimizer, x=None):
    for _ in range(count):
        step(model, optimizer, x)


def recorded_steps(folder, model, count=1, x=None, **options):
    """Record some steps of a model; nothing may fail."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, folder, **{"every": 1, **options}) as recorder:
        steps(count, model, optimizer, x)
    assert recorder.failures == []


class Wrapped(nn.Module):
    def __init__(self, body, forward):
        super().__init__()
        self.body = body
        self._forward = forward

    def forward(self, x):
        return self._forward(self.body, x)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    name: str = "output"


def around_linear(forward):
    return Wrapped(nn.Linear(8, 8), forward)


def rows(folder, **where):
    frame = mpdiag.open_run(folder).frame()
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame


def not_recorded(folder):
    coverage = mpdiag.open_run(folder).meta["coverage"]
    return {entry["name"]: entry["reason"] for entry in coverage["not_recorded"]}


def assert_same_histogram(folder, truth, **where):
    """The one row with these columns counts exactly the values of ``truth``."""
    records = mpdiag.open_run(folder).records
    mask = np.ones(len(records), bool)
    for column, value in where.items():
        held = records.texts(column) if column in records.words else getattr(records, column)
        mask &= held == value
    assert mask.sum() == 1, where
    found = records.select(mask).histograms()[0]
    expected = ExponentHistogram.of(truth.detach().numpy())
    assert np.array_equal(found.counts, expected.counts), where
    for field in ("zeros", "subnormals", "infs", "nans", "absmax", "absmin"):
        assert getattr(found, field) == getattr(expected, field), (where, field)
