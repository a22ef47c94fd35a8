"""What people write into a model, or into its masters, is kept at every level."""

import copy
import json
from unittest.mock import Mock

import pytest
import torch
from support import PRECISIONS, build, perceptron, summed, take_step, trainer
from torch import nn

import mpdiag
from mpdiag.errors import StateMismatch
from mpdiag.numerics.loss_scalers import ConstantScale
from mpdiag.runs.training_log import read_log

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
every_level = pytest.mark.parametrize(("level", "dtype"), PRECISIONS)
with_masters = pytest.mark.parametrize("dtype", ["fp16", "bf16"])


def full(mp, model):
    """The optimizer's own values of a model's parameters, copied."""
    return [
        mp.context.wrapped.masters.master(p).detach().float().clone() for p in model.parameters()
    ]


# -- written into the model ------------------------------------------------------------------------


HABITS = {
    "load": "model.load_state_dict({n: t * 0.5 for n, t in model.state_dict().items()})",
    "assign data": "model[0].weight.data = model[0].weight.data.flip(0)",
    "transpose data": "model[2].weight.data = model[2].weight.data.view(6, 3).t()",
    "edit data": """model[0].weight.data[1].fill_(0.25)
model[2].bias.data.view(-1)[0] = -0.5""",
    "clamp": "for p in model.parameters(): p.data.clamp_(-0.1, 0.1)",
    "edit in place": "with torch.no_grad(): model[2].weight[:, ::2].mul_(2)",
    "edit by foreach": "with torch.no_grad(): torch._foreach_mul_([*model.parameters()], 1.5)",
    "edit by another view": "torch.from_dlpack(model[0].weight.detach())[2, 1] = 0.75",
    "reset": "model[2].reset_parameters()",
    "initialize": "nn.init.constant_(model[0].bias, 0.125)",
    "prune": """from torch.nn.utils import prune
prune.l1_unstructured(model[0], "weight", 0.5)
prune.remove(model[0], "weight")""",
}


def apply_habit(habit, model):
    exec(HABITS[habit], globals() | {"model": model})


@pytest.mark.parametrize("habit", HABITS)
@every_level
def test_what_is_written_into_the_model_is_stepped_from(level, dtype, habit):
    model, optimizer, mp = build(level, dtype)
    take_step(model, mp)
    optimizer.param_groups[0]["lr"] = 0.0
    parameters = list(model.parameters())
    before, masters = [p.detach().clone() for p in parameters], full(mp, model)
    apply_habit(habit, model)
    after = [p.detach().clone() for p in parameters]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    take_step(model, mp)
    mp.close()
    for parameter, was, now, master in zip(parameters, before, after, masters, strict=True):
        expected = torch.where(now != was, now.float(), master)  # other masters keep all their bits
        assert torch.equal(parameter.detach(), expected)


@every_level
def test_a_state_in_fp32_is_loaded_with_all_its_bits(level, dtype):
    model, optimizer, mp = build(level, dtype)
    take_step(model, mp)
    model.load_state_dict(perceptron(seed=3).state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    take_step(model, mp)
    mp.close()
    wanted = perceptron(seed=3)
    for a, b in zip(model.parameters(), wanted.parameters(), strict=True):
        b = b.detach()
        assert torch.equal(a.detach(), b.to(LOW[dtype]).float() if level == "O3" else b)


@every_level
def test_an_fp32_average_swapped_in_by_assignment(level, dtype):
    model, _, mp = build(level, dtype)
    take_step(model, mp)
    before = full(mp, model)
    kept = [p.data for p in model.parameters()]
    average = [p.data.float() * 0.3 for p in model.parameters()]
    for p, value in zip(model.parameters(), average, strict=True):
        p.data = value
    with torch.no_grad():  # FP32 in a half model is cast, not an error
        assert model(torch.ones(1, 4)).isfinite().all()
    if level != "O3":
        saved = mp.state_dict()["masters" if level == "O2" else "models"][0]
        for state in (mp.fp32_state_dict(), saved):  # all bits of it
            assert all(map(torch.equal, average, state.values()))
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data = value
    assert all(torch.equal(a, b) for a, b in zip(before, full(mp, model), strict=True))
    take_step(model, mp, 1)


@every_level
def test_a_checkpoint_written_to_is_the_model_as_it_is(level, dtype):
    model, _, mp = build(level, dtype)
    take_step(model, mp)
    apply_habit("clamp", model)
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
    plain, optimizer.step = optimizer.step, Mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        take_step(model, mp)
    optimizer.step = plain
    model[2].bias.data[1] = 0.5
    model.zero_grad()
    assert all(p.grad is None for p in mp.master_parameters())
    take_step(model, mp)
    assert float(full(mp, model)[3][1]) == 0.5
    mp.close()


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


@with_masters
def test_a_weight_that_no_optimizer_holds_comes_back_as_the_level_held_it(dtype):
    model = perceptron()
    frozen = model[2].weight.detach().clone()
    mp = trainer(model, torch.optim.SGD(model[0].parameters(), 0.1), "O2", dtype)
    take_step(model, mp)
    mp.close()
    assert torch.equal(model[2].weight.detach(), frozen.to(LOW[dtype]).float())


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


# -- a master is the parameter ---------------------------------------------------------------------


def linear(value=None):
    model = nn.Linear(4, 1, bias=False)
    if value is not None:
        nn.init.constant_(model.weight, value)
    return model


def step_of_ones(model, mp, factor=1.0):
    return mp.step(summed(model, mp, torch.ones(1, 4)) * factor)


@with_masters
@pytest.mark.parametrize("of_master", [False, True])
@pytest.mark.parametrize(("trained", "factor"), [(False, 1.0), (True, 0.9)])
def test_what_is_frozen_or_unfrozen_is_so_for_the_model_and_the_optimizer(
    dtype, trained, factor, of_master
):
    model = nn.Sequential(linear(0.5), nn.Linear(1, 1, bias=False))
    model[0].requires_grad_(not trained)
    mp = trainer(model, torch.optim.SGD(model.parameters(), 0.1), "O2", dtype)
    mp.add_regularizer(lambda ps: 0.5 * sum(p.square().sum() for p in ps.values()))
    changed = mp.master_parameters()[0] if of_master else model[0].weight
    changed.requires_grad_(trained)
    step_of_ones(model, mp, 0.0)
    assert model[0].weight.requires_grad is mp.master_parameters()[0].requires_grad is trained
    mp.close()
    torch.testing.assert_close(model[0].weight.detach(), torch.full((1, 4), 0.5 * factor))
    assert model[0].weight.requires_grad is trained


class Scaled(torch.optim.SGD):
    """A learning rate of each parameter's own, as muP and Megatron have; notes what it has stepped."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * getattr(p, "lr_scale", 1.0))
                p.stepped = True


@with_masters
def test_attributes_of_a_parameter_and_its_master_are_the_same(dtype):
    model = linear(1.0)
    model.weight.lr_scale = 4.0
    mp = trainer(model, Scaled(model.parameters(), 0.1), "O2", dtype)
    assert isinstance(mp.master_parameters()[0], nn.Parameter)
    step_of_ones(model, mp)
    model.weight.lr_scale = 2.0
    step_of_ones(model, mp)
    assert model.weight.stepped
    mp.close()
    assert float(model.weight.detach().mean()) == pytest.approx(1 - 0.4 - 0.2, abs=1e-6)


class ByIdentity(torch.optim.SGD):
    """Looks for parameters with settings of their own as bitsandbytes does, when it steps."""

    def __init__(self, model):
        self.overridden, self.found = [(model[2], "weight")], set()
        super().__init__(model.parameters(), 0.1)

    def check_overrides(self):
        for module, name in self.overridden:
            for i, p in enumerate(self.param_groups[0]["params"]):
                if p is getattr(module, name):
                    self.found.add(i)

    def step(self, closure=None):
        self.check_overrides()
        return super().step(closure)


@with_masters
def test_an_optimizer_that_looks_for_a_parameter_itself_finds_its_place(dtype):
    model = perceptron()
    optimizer = ByIdentity(model)
    take_step(model, trainer(model, optimizer, "O2", dtype))
    assert optimizer.found == {2}


@every_level
def test_hooks_after_a_step_see_its_weights_and_may_write_to_them(level, dtype):
    model, seen = linear(1.0), []
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    optimizer.register_step_post_hook(lambda *_: model.weight.data.clamp_(min=0.25))
    mp = trainer(model, optimizer, level, dtype)
    optimizer.register_step_post_hook(lambda *_: seen.append(float(model.weight.detach().mean())))
    for _ in range(4):
        assert not step_of_ones(model, mp).skipped
    assert seen == [0.75, 0.5, 0.25, 0.25]
    mp.close()
    assert torch.equal(model.weight.detach(), torch.full((1, 4), 0.25))


@with_masters
def test_what_a_hook_writes_into_a_master_is_given_to_the_model(dtype):
    model = linear(1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    mp = trainer(model, optimizer, "O2", dtype)
    (master,) = mp.master_parameters()
    optimizer.register_step_post_hook(lambda *_: master.data.clamp_(min=0.875))
    step_of_ones(model, mp)
    assert torch.equal(model.weight.detach().float(), torch.full((1, 4), 0.875))


@with_masters
@pytest.mark.parametrize("touch", ["read", "double", "replace", "clear", "zero", "other scale"])
def test_gradients_between_micro_batches_are_those_of_all_so_far(dtype, touch):
    model = linear(0.0)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    mp = trainer(model, optimizer, "O2", dtype, overrides=mpdiag.PrecisionOverrides(dtype=dtype))
    scale = mp.loss_scale

    def backward(value):
        mp.backward(summed(model, mp, torch.full((1, 4), value)))

    for value in (1.0, 2**-12, 2**-12):
        backward(value)
    before = 1.0 + 2**-11
    if touch == "read":
        torch.testing.assert_close(model.weight.grad, torch.full((1, 4), before * scale))
    elif touch == "double":
        model.weight.grad.mul_(2)
    elif touch == "replace":
        model.weight.grad = torch.full((1, 4), 3.0 * scale).to(LOW[dtype])
    elif touch == "other scale":
        mp.context.scaling.scaler = ConstantScale(scale / 4)
    else:
        optimizer.zero_grad(set_to_none=touch == "clear")
    left = {"double": 2 * before, "replace": 3.0, "clear": 0.0, "zero": 0.0}.get(touch, before)
    backward(2**-12)
    backward(2**-12)
    mp.step()
    assert model.weight.grad is None
    mp.close()
    torch.testing.assert_close(-model.weight.detach(), torch.full((1, 4), left + 2**-11))
