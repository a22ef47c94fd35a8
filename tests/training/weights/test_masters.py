"""What people write into a model, or into its masters, is kept at every level."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from support import PRECISIONS, perceptron, take_step, trainer
from torch import nn
from torch.nn.utils import prune

from mpdiag.errors import StateMismatch
from mpdiag.runs.training_log import read_log

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
every_level = pytest.mark.parametrize(("level", "dtype"), PRECISIONS)
with_masters = pytest.mark.parametrize("dtype", ["fp16", "bf16"])


def build(level, dtype, lr=0.1, kind=torch.optim.SGD, **options):
    model = perceptron()
    optimizer = kind(model.parameters(), lr)
    return model, optimizer, trainer(model, optimizer, level, dtype, **options)


def full(mp, model):
    """The optimizer's own values of a model's parameters, copied."""
    return [
        mp.context.wrapped.masters.master(p).detach().float().clone() for p in model.parameters()
    ]


# -- written into the model ------------------------------------------------------------------------


def load_another(model):
    model.load_state_dict({n: t * 0.5 for n, t in model.state_dict().items()})


def load_in_fp32(model):
    model.load_state_dict(perceptron(seed=3).state_dict())


def assign_data(model):
    model[0].weight.data = model[0].weight.data.flip(0)


def transpose_data(model):
    model[2].weight.data = model[2].weight.data.view(6, 3).t()


def edit_data(model):
    model[0].weight.data[1].fill_(0.25)
    model[2].bias.data.view(-1)[0] = -0.5


def clamp(model):
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def edit_in_place(model):
    with torch.no_grad():
        model[2].weight[:, ::2].mul_(2)


def edit_by_foreach(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.5)


def edit_by_another_view(model):
    flat = torch.from_dlpack(model[0].weight.detach())
    flat[2, 1] = 0.75


def reset(model):
    model[2].reset_parameters()


def initialize(model):
    nn.init.orthogonal_(model[0].weight.data[:4, :4].float())
    nn.init.constant_(model[0].bias, 0.125)


def prune_smallest(model):
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.remove(model[0], "weight")


HABITS = [
    load_another, assign_data, transpose_data, edit_data, clamp, edit_in_place, edit_by_foreach,
    edit_by_another_view, reset, initialize, prune_smallest,
]  # fmt: skip


@pytest.mark.parametrize("habit", HABITS)
@every_level
def test_what_is_written_into_the_model_is_stepped_from(level, dtype, habit):
    model, optimizer, mp = build(level, dtype)
    take_step(model, mp)
    optimizer.param_groups[0]["lr"] = 0.0
    parameters = list(model.parameters())
    before, masters = [p.detach().clone() for p in parameters], full(mp, model)
    habit(model)
    after = [p.detach().clone() for p in parameters]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    take_step(model, mp)
    mp.close()
    for parameter, was, now, master in zip(parameters, before, after, masters, strict=True):
        expected = torch.where(now != was, now.float(), master)  # other masters keep all their bits
        assert torch.equal(parameter.detach(), expected)


@pytest.mark.parametrize("habit", [load_another, edit_data])
@every_level
def test_what_is_written_last_is_kept_by_close(level, dtype, habit):
    model, _, mp = build(level, dtype)
    take_step(model, mp)
    habit(model)
    after = [p.detach().float().clone() for p in model.parameters()]
    mp.close()
    for parameter, now in zip(model.parameters(), after, strict=True):
        low = LOW.get(dtype, torch.float32) if level == "O2" else torch.float32
        assert torch.equal(parameter.detach().to(low).float(), now)


@every_level
def test_a_state_in_fp32_is_loaded_with_all_its_bits(level, dtype):
    model, optimizer, mp = build(level, dtype)
    take_step(model, mp)
    load_in_fp32(model)
    optimizer.param_groups[0]["lr"] = 0.0
    take_step(model, mp)
    mp.close()
    wanted = perceptron(seed=3)
    for a, b in zip(model.parameters(), wanted.parameters(), strict=True):
        b = b.detach()
        assert torch.equal(a.detach(), b.to(LOW[dtype]).float() if level == "O3" else b)


@every_level
def test_an_average_swapped_in_and_out_costs_no_bit(level, dtype):
    model, _, mp = build(level, dtype)
    take_step(model, mp)
    before = full(mp, model)
    kept = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.5)
    halved = mp.fp32_state_dict()
    saved = mp.state_dict()
    with torch.no_grad():
        model(torch.ones(1, 4))
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)
    assert all(torch.equal(a, b) for a, b in zip(before, full(mp, model), strict=True))
    for (name, p), value in zip(model.named_parameters(), kept, strict=True):
        assert torch.equal(halved[name], (value * 0.5).float())
        if level == "O2":
            assert torch.equal(saved["masters"][0][name], (value * 0.5).float())
        assert torch.equal(p.detach(), value)
    take_step(model, mp, 1)
    twin, _, other = build(level, dtype)
    take_step(twin, other)
    take_step(twin, other, 1)
    assert all(torch.equal(a, b) for a, b in zip(full(mp, model), full(other, twin), strict=True))


@every_level
def test_an_fp32_average_swapped_in_by_assignment(level, dtype):
    model, _, mp = build(level, dtype)
    take_step(model, mp)
    before = full(mp, model)
    kept = [p.data for p in model.parameters()]
    average = [p.data.float() * 0.3 for p in model.parameters()]
    for p, value in zip(model.parameters(), average, strict=True):
        p.data = value
    with torch.no_grad():
        assert (
            model(torch.ones(1, 4)).isfinite().all()
        )  # FP32 in a half model is cast, not an error
    if level != "O3":
        for value, state in zip(average, mp.fp32_state_dict().values(), strict=True):
            assert torch.equal(value, state)  # all bits of it
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data = value
    assert all(torch.equal(a, b) for a, b in zip(before, full(mp, model), strict=True))
    take_step(model, mp, 1)


@every_level
def test_a_checkpoint_written_to_is_the_model_as_it_is(level, dtype):
    model, _, mp = build(level, dtype)
    take_step(model, mp)
    clamp(model)
    state = copy.deepcopy(mp.state_dict())
    take_step(model, mp, 1)
    other, _, again = build(level, dtype)
    again.load_state_dict(state)
    take_step(other, again, 1)
    assert all(torch.equal(a, b) for a, b in zip(full(mp, model), full(again, other), strict=True))


@every_level
def test_a_model_whose_weights_are_nan_is_not_taken_for_written(level, dtype):
    model, _, mp = build(level, dtype)
    model[0].bias.data[0] = float("nan")
    mp.context.wrapped.masters.settle()
    written = []
    mp.context.wrapped.masters.note_written = written.append
    model[0].weight.data[0, 0] = 0.5
    mp.context.wrapped.masters.settle()
    assert [len(found) for found in written] == ([1] if level == "O2" else [])


@pytest.mark.parametrize("run", [False, True])
def test_it_is_logged_once_that_weights_were_written(tmp_path, caplog, run):
    model, _, mp = build("O2", "bf16", **({"run": tmp_path / "run"} if run else {}))
    with caplog.at_level("INFO", logger="mpdiag"):
        for step in range(3):
            take_step(model, mp, step)
            model[2].bias.data[1] = step
    mp.close()
    said = [r.message for r in caplog.records if "written" in r.message]
    wanted = (
        "weights were written into the model (2.bias) before step 1: what was written is in the FP32 "
        "masters now, as BF16 holds it"
    )
    assert said == [wanted]
    if run:
        text = (tmp_path / "run" / "training.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["written"] for line in lines if "written" in line] == [["2.bias"]]
        assert len(read_log(tmp_path / "run").steps) == 3


@every_level
def test_what_is_written_after_a_step_that_raised_is_kept(level, dtype):
    model, optimizer, mp = build(level, dtype, lr=0.0)
    take_step(model, mp)
    plain, optimizer.step = optimizer.step, fail
    with pytest.raises(ZeroDivisionError):
        take_step(model, mp)
    optimizer.step = plain
    model[2].bias.data[1] = 0.5
    model.zero_grad()
    assert all(p.grad is None for p in mp.master_parameters())
    take_step(model, mp)
    assert float(full(mp, model)[3][1]) == 0.5
    mp.close()


def fail(*_args):
    raise ZeroDivisionError


@with_masters
def test_steps_taken_inside_autocast_are_in_the_next_forward_pass(dtype):
    torch.manual_seed(0)
    model = nn.Linear(128, 128, bias=False)  # large enough for emulation to keep a copy of
    mp = trainer(model, torch.optim.SGD(model.parameters(), 1.0), "O2", dtype)
    x, seen, held = torch.eye(128), [], []
    with mp.autocast():
        for _ in range(4):
            out = model(x)
            seen.append(out.detach().clone())
            held.append(model.weight.detach().clone())
            mp.step(out.sum())
    assert all(torch.equal(a, b.float().t()) for a, b in zip(seen, held, strict=True))
    assert not torch.equal(seen[0], seen[-1])


# -- written into the masters ----------------------------------------------------------------------


@with_masters
def test_what_is_written_into_masters_is_in_the_next_forward_pass(dtype):
    model, _, mp = build("O2", dtype)
    take_step(model, mp)
    for master in mp.master_parameters():
        master.data.clamp_(-0.125, 0.125)
    model[2].bias.data[0] = 0.5  # the model's own change stays
    with torch.no_grad(), mp.autocast():
        model(torch.ones(1, 4))
    assert max(float(p.detach().abs().max()) for p in model[0].parameters()) == 0.125
    assert float(model[2].bias.detach()[0]) == 0.5
    mp.close()
    assert float(model[2].bias.detach()[0]) == 0.5
    assert float(model[2].bias.detach()[1:].abs().max()) <= 0.125


# -- layers and parameters -------------------------------------------------------------------------


@every_level
def test_a_layer_added_while_training(level, dtype):
    model, optimizer, mp = build(level, dtype)
    take_step(model, mp)
    torch.manual_seed(5)
    model.append(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    new = model[3][1].weight
    value = new.detach().clone()
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 1e-6})
    take_step(model, mp)
    assert not torch.equal(mp.context.wrapped.masters.master(new), value) or level == "O3"
    mp.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {b.dtype for b in model.buffers()} == {torch.float32, torch.int64}
    tolerance = 0.02 if level == "O3" else 1e-4  # the master has the bits from before the cast
    torch.testing.assert_close(new.detach(), value, rtol=0, atol=tolerance)


@every_level
def test_a_head_put_in_the_place_of_another(level, dtype):
    model, _, mp = build(level, dtype)
    take_step(model, mp)
    model[2] = nn.Linear(6, 3)
    take_step(model, mp)
    mp.close()
    assert model(torch.ones(1, 4)).dtype == torch.float32


@with_masters
def test_a_weight_that_no_optimizer_holds_comes_back_as_the_level_held_it(dtype):
    model = perceptron()
    frozen = model[2].weight.detach().clone()
    mp = trainer(model, torch.optim.SGD(model[0].parameters(), 0.1), "O2", dtype)
    take_step(model, mp)
    mp.close()
    assert torch.equal(model[2].weight.detach(), frozen.to(LOW[dtype]).float())


# -- several optimizers, and checkpoints that are refused ------------------------------------------


@every_level
def test_a_refused_checkpoint_has_changed_nothing(level, dtype):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), 0.1, eps=1e-4)
    mp = trainer(model, optimizer, level, dtype)
    take_step(model, mp)
    state = copy.deepcopy(mp.state_dict())
    take_step(model, mp, 1)
    before = full(mp, model)
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    damaged = copy.deepcopy(state)
    del damaged["models"][0]["2.bias"]
    shorter = copy.deepcopy(state)
    shorter["optimizers"][0]["param_groups"][0]["params"].pop()
    for bad in (damaged, shorter):
        with pytest.raises(StateMismatch):
            mp.load_state_dict(bad)
        assert all(torch.equal(a, b) for a, b in zip(before, full(mp, model), strict=True))
        for a, s in zip(moments, optimizer.state.values(), strict=True):
            assert torch.equal(a, s["exp_avg"])
        for p, b in zip(model.parameters(), before, strict=True):
            assert torch.equal(p.detach(), b.to(p.dtype))
