"""The step clock in recordings: several optimizers, closures and none."""

import pytest
import torch
from recorded import model_and_optimizer, rows
from torch import nn

import mpdiag
from mpdiag.runs.run import open_run


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def steps_of(run, kind, name):
    return rows(run, kind=kind, name=name)["step"].tolist()


def backward(module):
    module(torch.randn(8, 4)).square().mean().backward()


def after_one_backward(model, first, second):
    for _ in range(5):
        backward(model)
        first.step()
        second.step()


def one_steps_seldom(model, often, seldom):
    for i in range(6):
        backward(model)
        often.step()
        if i % 3 == 2:
            seldom.step()


def in_turn(model, *optimizers):
    for _ in range(4):
        for part, optimizer in zip((model[0], model[2]), optimizers, strict=True):
            backward(part)
            optimizer.step()


def a_loss_function_is_called_between(model, first, second):
    for _ in range(3):
        output = model(torch.randn(8, 4))
        output.square().mean().backward()
        first.step()
        nn.MSELoss()(output.detach(), torch.zeros(8, 1))
        second.step()


def losses_are_differentiated_one_after_another(model, *optimizers):
    """As in an actor and a critic whose losses are both computed first."""
    for _ in range(3):
        losses = [model[i](torch.randn(8, 4)).square().mean() for i in (0, 2)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()


def closures_that_do_nothing(model, *optimizers):
    """Lightning's manual optimization gives each optimizer a closure, after the one ``backward()``."""
    for _ in range(3):
        backward(model)
        for optimizer in optimizers:
            optimizer.step(lambda: None)


ALL, APART = (lambda model: model), (lambda model: {"0": model[0], "2": model[2]})


@pytest.mark.parametrize(
    ("loop", "models", "first", "second"),
    [
        (after_one_backward, ALL, range(5), range(5)),
        (one_steps_seldom, ALL, range(6), [2, 5]),
        (in_turn, APART, [0, 2, 4, 6], [1, 3, 5, 7]),
        (in_turn, ALL, [0, 2, 4, 6], [1, 3, 5, 7]),  # of one model, by its parts
        (a_loss_function_is_called_between, ALL, range(3), range(3)),
        (losses_are_differentiated_one_after_another, APART, [0, 2, 4], [1, 3, 5]),
        (closures_that_do_nothing, ALL, range(3), range(3)),
    ],
)
def test_steps_of_two_optimizers(tmp_path, model, loop, models, first, second):
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    run = tmp_path / "run"
    with mpdiag.record(models(model), optimizers, run, every=1) as recorder:
        loop(model, *optimizers)
    assert recorder.failures == []
    steps = len({*first, *second})
    assert recorder.steps_recorded == steps
    assert open_run(run).meta["steps_seen"] == steps
    told = [(o["steps_taken"], o["steps_recorded"]) for o in open_run(run).meta["optimizers"]]
    assert told == [(len(first),) * 2, (len(second),) * 2]
    for name, expected in (("0", first), ("2", second)):
        assert steps_of(run, "update", f"{name}.weight") == list(expected)
        if loop is not one_steps_seldom:  # whose gradients arrive in every step
            assert steps_of(run, "activation_grad", name) == list(expected)


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
