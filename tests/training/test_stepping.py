"""A loop that steps the optimizer itself, and one that does as it should."""

from __future__ import annotations

import warnings

import pytest
import torch
from support import batch, constant, network
from torch import nn

import mpdiag


def trainer():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, mpdiag.MixedPrecision(model, optimizer, constant(8.0))


def test_a_step_past_the_trainer_is_said_once_at_the_line_that_took_it():
    model, optimizer, mp = trainer()
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # wraps step
    x, y = batch()
    for expected in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert len(caught) == expected
        assert all("mp.step(loss)" in str(w.message) for w in caught)
        assert all(w.filename == __file__ for w in caught)
    assert "0 steps" in repr(mp)


def test_the_trainers_own_steps_and_those_after_its_end_are_not(recwarn):
    model, optimizer, mp = trainer()
    x, y = batch()
    with mp.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    mp.step(loss)
    mp.close()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert not recwarn.list
    assert "loss scale 8, 1 steps, 0 of them skipped" in repr(mp)


def test_a_misspelt_name_is_met_with_the_right_one():
    with pytest.raises(AttributeError) as raised:
        mpdiag.analyse  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("analyse", mpdiag)
