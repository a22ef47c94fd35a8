"""Averages of weights move, at every level, as averages of FP32 weights do."""

from __future__ import annotations

import pytest
import torch
from support import PRECISIONS, perceptron, take_step, trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

every_level = pytest.mark.parametrize(("level", "dtype"), PRECISIONS)


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}])
@pytest.mark.parametrize("early", [False, True])
@every_level
def test_an_average_is_of_the_weights_that_the_optimizer_steps(level, dtype, early, options):
    model = perceptron()
    average = AveragedModel(model, **options) if early else None
    mp = trainer(model, torch.optim.SGD(model.parameters(), 0.1), level, dtype)
    average = average or AveragedModel(model, **options)
    plain = perceptron()
    reference = AveragedModel(plain, **options)
    for step in range(4):
        take_step(model, mp, step)
        average.update_parameters(model)
        plain.load_state_dict(mp.fp32_state_dict())
        reference.update_parameters(plain)
    assert {p.dtype for p in average.parameters()} == {torch.float32}
    for a, b in zip(average.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.randn(3, 4)
    if level in ("O2", "O3"):
        assert torch.equal(average(x), reference(x))
    with mp.autocast():
        assert average(x).shape == (3, 3)


def test_torch_is_as_before_once_no_trainer_needs_it():
    before = AveragedModel.update_parameters
    trainers = []
    for _ in range(2):
        model = nn.Linear(4, 4)
        trainers.append(trainer(model, torch.optim.SGD(model.parameters(), 0.1), "O2", "bf16"))
    for mp in trainers:
        assert AveragedModel.update_parameters is not before
        mp.close()
    assert AveragedModel.update_parameters is before
