"""Gradients are where people look for them, and copies of a model are of full precision."""

import pickle

import pytest
import torch
from support import PRECISIONS, build, perceptron, take_step
from torch import nn

every_level = pytest.mark.parametrize(("level", "dtype"), PRECISIONS)


def backward(model, mp, seed=0):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    with mp.autocast():
        loss = model(x).square().mean()
    mp.backward(loss)


def true_norm():
    model = perceptron()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


@pytest.mark.parametrize("which", ["model", "masters", "masters, nothing unscaled"])
@every_level
def test_clipping_by_hand_clips_what_the_optimizer_uses(level, dtype, which):
    model, _, mp = build(level, dtype, lr=1.0)
    before = mp.fp32_state_dict()
    backward(model, mp)
    if which != "masters, nothing unscaled":
        mp.unscale()
    clipped = model.parameters() if which == "model" else mp.master_parameters()
    norm = torch.nn.utils.clip_grad_norm_(clipped, 0.01)
    torch.testing.assert_close(norm.float(), true_norm(), rtol=2e-2, atol=0)
    mp.step()
    mp.close()
    moved = [a - before[n] for n, a in model.state_dict().items()]
    size = float(torch.nn.utils.get_total_norm(moved))
    assert size == pytest.approx(0.01, rel=0.3 if level == "O3" else 1e-2)


@every_level
def test_master_parameters_are_what_the_optimizers_step(level, dtype):
    model, _, mp = build(level, dtype)
    held = mp.master_parameters()
    assert [id(p) for p in held] == [
        id(p) for o in mp.context.wrapped.optimizers for g in o.param_groups for p in g["params"]
    ]
    if level != "O2":
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    if level != "O3":
        assert {p.dtype for p in held} == {torch.float32}
    assert all(p.grad is None for p in held)


@every_level
def test_gradients_cleared_through_the_model_are_not_stepped(level, dtype):
    model, _, mp = build(level, dtype)
    before = mp.fp32_state_dict()
    backward(model, mp)
    mp.unscale()
    model.zero_grad()
    assert all(p.grad is None for p in mp.context.wrapped.optimizers[0].param_groups[0]["params"])
    backward(model, mp, 1)
    mp.step()
    mp.close()
    other, _, plain = build(level, dtype)
    take_step(other, plain, 1)
    plain.close()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert any(not torch.equal(a, before[n]) for n, a in model.state_dict().items())


@every_level
def test_gradients_added_after_unscaling_are_not_lost(level, dtype):
    model, _, mp = build(level, dtype)
    backward(model, mp, 0)
    mp.unscale()
    backward(model, mp, 1)
    mp.step()
    mp.close()
    other, _, whole = build(level, dtype)
    backward(other, whole, 0)
    backward(other, whole, 1)
    whole.step()
    whole.close()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@every_level
def test_a_gradient_that_a_script_sets_is_used(level, dtype):
    model, _, mp = build(level, dtype, lr=1.0)
    before = mp.fp32_state_dict()["0.weight"]
    backward(model, mp)
    mp.unscale()
    for p in model.parameters():
        p.grad = torch.full_like(p.grad, 0.5)
    mp.step()
    mp.close()
    moved = before - model[0].weight.detach()
    torch.testing.assert_close(moved, torch.full((6, 4), 0.5), rtol=0, atol=4e-3)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_closed_training_leaves_plain_parameters(dtype):
    model, _, mp = build("O2", dtype)
    take_step(model, mp)
    parameter = pickle.loads(pickle.dumps(model[0].weight))
    assert type(parameter) is nn.Parameter
    assert torch.equal(parameter, model[0].weight)
    mp.close()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all("_master" not in p.__dict__ for p in model.parameters())
