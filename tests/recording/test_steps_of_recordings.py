"""The step clock in recordings: several optimizers, closures and none."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from recorded import model_and_optimizer, rows, step
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
    for name, expected in (("0", [0, 2, 4, 6]), ("2", [1, 3, 5, 7])):
        assert steps_of(run, "activation_grad", name) == expected
        assert steps_of(run, "update", f"{name}.weight") == expected
    told = [(o["steps_taken"], o["steps_recorded"]) for o in open_run(run).meta["optimizers"]]
    assert told == [(4, 4), (4, 4)]


def test_a_loss_function_that_is_called_begins_no_step(tmp_path, model):
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    with mpdiag.record(model, optimizers, tmp_path / "run", every=1) as recorder:
        for _ in range(3):
            output = model(torch.randn(8, 4))
            output.square().mean().backward()
            optimizers[0].step()
            nn.MSELoss()(output.detach(), torch.zeros(8, 1))
            optimizers[1].step()
    assert recorder.steps_recorded == 3


def test_losses_that_are_differentiated_one_after_another_have_steps_of_their_own(tmp_path, model):
    """As in an actor and a critic whose losses are both computed first."""
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    with mpdiag.record({"0": model[0], "2": model[2]}, optimizers, tmp_path / "run", every=1):
        for _ in range(3):
            losses = [model[i](torch.randn(8, 4)).square().mean() for i in (0, 2)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert steps_of(tmp_path / "run", "activation_grad", "0") == [0, 2, 4]
    assert steps_of(tmp_path / "run", "activation_grad", "2") == [1, 3, 5]


def test_the_last_step_counts_though_it_is_not_recorded(tmp_path, model):
    often, never = (torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2))
    with mpdiag.record(model, [often, never], tmp_path / "run", every=4):
        for _ in range(10):
            model(torch.randn(8, 4)).square().mean().backward()
            often.step()
    meta = open_run(tmp_path / "run").meta
    # For the one that never steps, the first round waits as long as it does for any.
    assert (meta["steps_seen"], meta["steps_recorded"]) == (10, 8)


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


def test_closures_two_optimizers_and_none(tmp_path):
    model, _ = model_and_optimizer()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(5, 8)

    def closure():
        lbfgs.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with mpdiag.record(model, lbfgs, tmp_path / "lbfgs", every=1):
        lbfgs.step(closure)
    assert set(rows(tmp_path / "lbfgs")["kind"]) >= {"weight_grad", "update", "activation_grad"}

    models = {"generator": nn.Linear(8, 8), "critic": nn.Linear(8, 1)}
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models.values()]
    with mpdiag.record(models, optimizers, tmp_path / "gan", every=1):
        for _ in range(2):
            for model_, optimizer in zip(models.values(), optimizers, strict=True):
                step(model_, optimizer)
    assert set(rows(tmp_path / "gan", kind="update")["name"]) == {
        f"{m}.{p}" for m in models for p in ("weight", "bias")
    }

    model, _ = model_and_optimizer()
    with mpdiag.record(model, None, tmp_path / "none", every=1):
        for _ in range(3):
            model(x).square().mean().backward()
    found = rows(tmp_path / "none", kind="weight_grad", name="0.weight")
    assert found["step"].tolist() == [0, 1, 2]


def test_alternating_optimizers_lose_no_step_of_either(tmp_path):
    """A GAN whose critic steps twice as often as its generator."""
    torch.manual_seed(0)
    models = {"generator": nn.Linear(8, 8), "critic": nn.Linear(8, 1)}
    g, c = (torch.optim.SGD(m.parameters(), 0.1) for m in models.values())
    updates = {"generator": [], "critic": []}

    def apply(name, optimizer):
        before = models[name].weight.detach().clone()
        optimizer.step()
        updates[name].append((models[name].weight.detach() - before).abs().max().item())

    with mpdiag.record(models, [g, c], tmp_path / "run", every=1) as recorder:
        for _ in range(3):
            for _ in range(2):
                c.zero_grad()
                made = models["generator"](torch.randn(5, 8)).detach()
                (models["critic"](made) - models["critic"](torch.randn(5, 8))).mean().backward()
                apply("critic", c)
            g.zero_grad()
            models["critic"](models["generator"](torch.randn(5, 8))).mean().backward()
            apply("generator", g)
    assert recorder.failures == []
    for name, expected in updates.items():
        found = rows(tmp_path / "run", kind="update", name=f"{name}.weight").sort_values("step")
        assert (found["tensors"] == 1).all()
        assert found["absmax"].tolist() == expected


@pytest.mark.parametrize("closure", [None, lambda: None])
def test_closures_that_do_nothing_begin_no_step(tmp_path, model, closure):
    """Lightning's manual optimization gives each optimizer a closure, after the one ``backward()``."""
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model[0], model[2])]
    with mpdiag.record(model, optimizers, tmp_path / "run", every=1) as recorder:
        for _ in range(3):
            model(torch.randn(5, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step(closure)
            model.zero_grad()
    assert (recorder.step, recorder.failures) == (3, [])
    updates = rows(tmp_path / "run", kind="update")
    assert sorted(updates.step[updates.name == "2.weight"]) == [0, 1, 2]
    assert sorted(updates.step[updates.name == "0.weight"]) == [0, 1, 2]


def test_optimizer_in_backward(tmp_path):
    model, _ = model_and_optimizer()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def apply(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)
    with mpdiag.record(model, list(optimizers.values()), tmp_path / "run", every=1):
        for _ in range(3):
            model(torch.randn(5, 8)).square().mean().backward()
    for kind, names in (("weight_grad", 4), ("update", 4), ("activation_grad", 4)):
        found = rows(tmp_path / "run", kind=kind)
        assert found.groupby("step").size().tolist() == [names] * 3, kind
