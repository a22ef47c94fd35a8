"""A recorded model for the tests of shapes."""

from __future__ import annotations

import pytest
import torch

import mpdiag


@pytest.fixture(scope="session")
def recorded():
    """``recorded(model, x, folder)``: the run of two training steps of a model."""

    def record(model, x, folder):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mpdiag.record(model, optimizer, folder):
            for _ in range(2):
                optimizer.zero_grad()
                y = model(x)
                outputs = y if isinstance(y, tuple) else (y,)
                sum(out.square().mean() for out in outputs).backward()
                optimizer.step()
        return mpdiag.open_run(folder)

    return record
