"""Where a step ends, when several optimizers take it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import mpdiag
from mpdiag.runs.run import open_run


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def steps_of(run, kind, name):
    stats = pd.read_parquet(run / "stats")
    return stats.step[(stats.kind == kind) & (stats.name == name)].tolist()


def test_two_optimizers_after_one_backward_share_the_step(tmp_path, model):
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    with mpdiag.record(model, optimizers, tmp_path / "run", every=1) as recorder:
        for _ in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert recorder.steps_recorded == 5
    for name in ("0", "2"):
        assert steps_of(tmp_path / "run", "activation_grad", name) == [0, 1, 2, 3, 4]
        assert steps_of(tmp_path / "run", "update", f"{name}.weight") == [0, 1, 2, 3, 4]


def test_an_optimizer_that_steps_seldom_holds_no_step_up(tmp_path, model):
    often, seldom = (torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2))
    with mpdiag.record(model, [often, seldom], tmp_path / "run", every=1) as recorder:
        for i in range(6):
            model(torch.randn(8, 4)).square().mean().backward()
            often.step()
            if i % 3 == 2:
                seldom.step()
                seldom.zero_grad()
            often.zero_grad()
    assert (recorder.step, recorder.steps_recorded) == (6, 6)
    assert steps_of(tmp_path / "run", "update", "0.weight") == [0, 1, 2, 3, 4, 5]
    assert steps_of(tmp_path / "run", "update", "2.weight") == [2, 5]


@pytest.mark.parametrize("parts", [False, True], ids=["models", "parts"])
def test_optimizers_that_take_turns_end_the_step_at_the_next_forward_pass(tmp_path, model, parts):
    """As in a GAN: the step of the one that steps first is whole, the other's belongs to the next."""
    first, second = model[0], model[2]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (first, second)]
    models = model if parts else {"0": first, "2": second}
    with mpdiag.record(models, optimizers, tmp_path / "run", every=1):
        for _ in range(4):
            for one, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                one(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    run = tmp_path / "run"
    for name, expected in (("0", [0, 1, 2, 3]), ("2", [1, 2, 3, 4])):
        assert steps_of(run, "activation_grad", name) == expected
        assert steps_of(run, "update", f"{name}.weight") == expected


def test_the_last_step_counts_though_it_is_not_recorded(tmp_path, model):
    often, never = (torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2))
    with mpdiag.record(model, [often, never], tmp_path / "run", every=4):
        for _ in range(6):
            model(torch.randn(8, 4)).square().mean().backward()
            often.step()
    meta = open_run(tmp_path / "run").meta
    assert (meta["steps_seen"], meta["steps_recorded"]) == (6, 2)


def test_a_training_broken_off_after_a_step_keeps_it(tmp_path, model):
    often, never = (torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2))
    with (
        pytest.raises(KeyboardInterrupt),
        mpdiag.record(model, [often, never], tmp_path / "run", every=1),
    ):
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            often.step()
        raise KeyboardInterrupt
    assert np.unique(open_run(tmp_path / "run").records.step).tolist() == [0, 1, 2]
