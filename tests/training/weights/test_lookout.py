"""Copies of a model that holds half-precision weights, and averages of its weights."""

import copy
import pickle

import pytest
import torch
from support import PRECISIONS, perceptron, take_step, trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpdiag

LOW = [row for row in PRECISIONS if row[0] in ("O2", "O3")]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((3,), 1.1))
        self.register_buffer("shift", torch.full((3,), 0.3))
        self.body = perceptron()

    def forward(self, x):
        return self.body(x) * self.gain + self.shift


@pytest.mark.parametrize("keep_fp32", [(), ("body.0",)])
@pytest.mark.parametrize(("level", "dtype"), PRECISIONS)
def test_a_deep_copy_has_fp32_weights_wherever_they_stand(level, dtype, keep_fp32):
    model = Tower()
    overrides = mpdiag.PrecisionOverrides(dtype=dtype, fp32_modules=keep_fp32)
    mp = trainer(model, torch.optim.SGD(model.parameters(), 0.1), level, dtype, overrides=overrides)
    take_step(model, mp)
    outer = nn.ModuleDict({"model": model})
    plain = Tower()
    plain.load_state_dict(mp.fp32_state_dict())
    x = torch.randn(3, 4)
    for twin in (copy.deepcopy(model), copy.deepcopy(outer)["model"]):
        assert {(type(p), p.dtype) for p in twin.parameters()} == {(nn.Parameter, torch.float32)}
        assert all(map(torch.equal, twin.parameters(), plain.parameters()))
        assert torch.equal(twin(x), plain(x))  # no casts: neither of the model's inputs nor in it
        assert twin.gain is not model.gain
        loss = twin(x).sum()
        loss.backward()  # it can be trained on
        assert twin.gain.grad.dtype == torch.float32
    assert [p.dtype for p in model.parameters()] == [
        p.dtype for p in pickle.loads(pickle.dumps(model)).parameters()
    ]


@pytest.mark.parametrize(("level", "dtype"), LOW)
def test_a_model_of_eager_dtypes_is_back_in_fp32_when_it_is_closed(level, dtype):
    model = Tower()
    model.register_buffer("narrow", torch.zeros(2, dtype=torch.float16))
    mp = trainer(model, torch.optim.SGD(model.parameters(), 0.1), level, dtype)
    model.register_buffer("late", torch.zeros(2, dtype=model.gain.dtype))
    model.late_gain = nn.Parameter(torch.ones(3, dtype=model.gain.dtype))
    take_step(model, mp)
    mp.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {n: b.dtype for n, b in model.named_buffers()} == {
        "shift": torch.float32,
        "narrow": torch.float16,
        "late": torch.float32,
    }


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("level", "dtype"), PRECISIONS)
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
