"""What a state holds, what it refuses, and under which plan training goes on."""

import copy
import io
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import backoff, constant, loss_of_batch, network, planned
from torch import nn

import mpdiag
from mpdiag.errors import StateMismatch, UsageError
from mpdiag.plan import Fp32Choice
from mpdiag.training.checkpoint import load_masters, masters_of


def build(level, plan=None):
    torch.manual_seed(0)
    body = network()
    model = nn.Sequential(body, nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, mpdiag.MixedPrecision(
        model, optimizer, plan or backoff(64.0, growth_interval=2), level=level
    )


def advance(model, mp, first, last):
    for step in range(first, last):
        loss = loss_of_batch(model, mp, step) * (float("nan") if step == 2 else 1.0)
        mp.step(loss, clip_norm=1.0)


@pytest.mark.parametrize("factor", [1.0, 1e-30], ids=["plain", "squares vanish"])
def test_a_state_in_the_middle_of_an_accumulation_is_refused(factor):
    model, mp = build("O1")
    loss = loss_of_batch(model, mp)
    mp.backward(loss)
    for parameter in model.parameters():
        parameter.grad *= factor
    with pytest.raises(UsageError, match="accumulation"):
        mp.state_dict()
    mp.step()
    mp.state_dict()


def resumed(plan, edited):
    _, mp = build("O1", plan)
    advance(mp.context.wrapped.models[0], mp, 0, 3)
    state = mp.state_dict()
    mp.close()
    _, again = build("O1", edited)
    with pytest.warns(RuntimeWarning, match="under another plan") as caught:
        again.load_state_dict(state)
    assert (again.steps, again.skipped) == (3, 1)
    return again, str(caught[0].message)


def test_a_training_goes_on_under_an_edited_plan_and_says_what_differs():
    plan = backoff(64.0, growth_interval=2)
    mp, said = resumed(plan, backoff(128.0, growth_interval=2))
    assert (mp.loss_scale, mp.loss_scaler.quiet) == (128.0, 0)
    assert "loss_scale.init_scale (64 → 128); training goes on by today's" in said
    mp, said = resumed(plan, backoff(64.0, growth_interval=500))
    assert (mp.loss_scale, mp.loss_scaler.growth_interval) == (64.0, 500)  # grown once, and skipped
    assert mp.loss_scaler.current == 64.0
    assert "growth_interval (2 → 500)" in said
    mp, said = resumed(plan, constant(8.0))
    assert mp.loss_scale == 8.0
    assert "loss_scale.method (backoff → constant)" in said
    kept = replace(plan, fp32_modules=(Fp32Choice("Linear", "0.4", "asked for", {}),))
    assert "fp32_modules ([] → [['0.4', 'Linear']])" in resumed(plan, kept)[1]
    reworded = replace(plan, run="elsewhere", shapes=())
    _, mp = build("O1", plan)
    state = mp.state_dict()
    mp.close()
    build("O1", reworded)[1].load_state_dict(state)  # decides the same


def test_numpys_and_pythons_random_numbers_go_on_too():
    _, mp = build("O1")
    np.random.normal()  # noqa: NPY002 - one of a pair: the other waits in the generator
    file = io.BytesIO()
    torch.save(mp.state_dict(), file)

    def draw():
        numbers = (np.random.rand(), np.random.normal(), random.random(), random.gauss(0, 1))  # noqa: NPY002
        return (*numbers, torch.rand(()).item())

    expected = draw()
    file.seek(0)
    state = torch.load(file, weights_only=True)
    mp.load_state_dict(state)
    assert draw() == expected
    for name in ("numpy", "python"):
        del state["random"][name]
    mp.load_state_dict(state)  # of an earlier version
    assert draw()[:4] != expected[:4]


def test_masters_alone_are_taken_element_by_element():
    """What a model was given since stays; so does what the state does not know."""
    model, mp = build("O2")
    advance(model, mp, 0, 2)
    saved = [{n: m.clone() for n, m in masters_of(mp.context.wrapped)[0].items()}]
    weight = model[0][0].weight
    full = saved[0]["0.0.weight"]
    unknown = mp.master_parameters()[1].detach().clone()
    del saved[0]["0.0.bias"]
    advance(model, mp, 3, 5)
    with torch.no_grad():
        weight.copy_(full)
        weight.view(-1)[0] = 0.5
    kept = masters_of(mp.context.wrapped)[0]["0.0.bias"].clone()
    load_masters(saved, mp.context.wrapped)
    found = masters_of(mp.context.wrapped)[0]
    assert found["0.0.weight"].flatten()[0] == 0.5
    assert torch.equal(found["0.0.weight"].flatten()[1:], full.flatten()[1:])
    assert torch.equal(found["0.0.bias"], kept)
    assert not torch.equal(kept, unknown)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda saved: saved.append({}), "of 2 models, the trainer has 1"),
        (lambda saved: saved[0].update({"0.0.weight": torch.zeros(2)}), "'0.0.weight'"),
    ],
)
def test_masters_of_another_model_change_nothing(change, said):
    _, mp = build("O2")
    before = [m.clone() for m in mp.master_parameters()]
    saved = masters_of(mp.context.wrapped)
    saved = [{n: m + 1 for n, m in saved[0].items()}]
    change(saved)
    with pytest.raises(StateMismatch, match=said):
        load_masters(saved, mp.context.wrapped)
    assert all(map(torch.equal, before, mp.master_parameters()))


def test_a_value_written_into_a_master_is_in_the_state_of_the_model_too():
    _, mp = build("O2")
    with torch.no_grad():
        mp.master_parameters()[0].fill_(0.25)
    assert (mp.state_dict()["models"][0]["0.0.weight"] == 0.25).all()


def test_a_damaged_state_is_refused_in_a_sentence():
    _, mp = build("O1")
    state = mp.state_dict()
    for changed, said in (
        ({"scaler": {"method": "mystery"}}, "unknown here"),
        ({"scaler": {"method": "backoff", "init_scale": -1.0}}, "cannot be read"),
        ({"models": state["models"] * 2}, "2 models"),
        ({"precision": {**state["precision"], "level": "O2"}}, "another level: its level is 'O2'"),
        ({"version": None}, "not a state"),
    ):
        with pytest.raises(StateMismatch, match=said):
            mp.load_state_dict({**state, **changed})
    with pytest.raises(StateMismatch, match="not a state"):
        mp.load_state_dict({"scale": 3})


def test_a_training_in_block_formats_goes_on_with_the_same_random_bits():
    layers = ("0.0", "weight", "convolution"), ("0.4", "weight", "linear")
    plan = planned("nvfp4", *layers)
    model, mp = build("O1", plan)
    advance(model, mp, 0, 4)
    assert not mp.context.wrapped.policy.products._missing
    state = copy.deepcopy(mp.state_dict())
    advance(model, mp, 4, 6)
    mp.close()
    again, mp = build("O1", plan)
    for _ in range(2):
        mp.load_state_dict(copy.deepcopy(state))
        again.eval()
        with torch.no_grad():  # draws nothing
            loss_of_batch(again, mp)
        again.train()
        advance(again, mp, 4, 6)
        assert all(map(torch.equal, again.parameters(), model.parameters()))
        mp.load_state_dict(copy.deepcopy(state))
        mp.backward(loss_of_batch(again, mp))  # draws in a step that is given up
        mp.context.wrapped.optimizers[0].zero_grad()
    mp.close()
    _, mp = build("O1", replace(plan, blocks=None))
    with pytest.warns(RuntimeWarning, match=r"another plan: blocks \(\['nvfp4', .* → None\)"):
        mp.load_state_dict(state)
