"""A loop that steps the optimizer itself, and one that does as it should."""

import gc
import warnings

import pytest
import torch
from support import BF16, constant, loss_of_batch, network, summed, wrapped
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

import mpdiag
from mpdiag.errors import TrainingDiverged, UsageError
from mpdiag.training import stepping
from mpdiag.training.stepping import _parameters_of_all
from mpdiag.training.weights import given, masters


def trainer():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, mpdiag.MixedPrecision(model, optimizer, constant(8.0))


@pytest.mark.parametrize("closed", [False, True])
def test_a_step_past_a_trainer_that_is_not_closed_is_said_once_at_its_line(closed):
    model, optimizer, mp = trainer()
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # wraps step
    mp.step(loss_of_batch(model, mp))
    if closed:
        mp.close()

    def by_hand():
        loss_of_batch(model, mp).backward()
        optimizer.step()

    said = said_by(by_hand)
    assert ["mp.step(loss)" in words for words in said] == [True] * (not closed)
    assert "loss scale 8, 1 step, 0 skipped" in repr(mp)


def said_by(act):
    """The warnings of two calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
        act()
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_optimizer_made_later_and_stepped_on_waiting_gradients_is_said_once(level):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mp = mpdiag.MixedPrecision(model, optimizer, constant(8.0), level=level)
    later = torch.optim.SGD(model[0].parameters(), 0.1)
    other = nn.Linear(2, 1)
    unrelated = torch.optim.SGD(other.parameters(), 0.1)

    def step(one):
        other(torch.ones(1, 2)).sum().backward()
        mp.backward(loss_of_batch(model, mp))
        one.step()
        mp.step()

    assert said_by(lambda: step(unrelated)) == []
    assert said_by(later.step) == []  # no gradient waits
    (message,) = said_by(lambda: step(later))
    assert "does not know" in message
    mp.close()


def test_a_guard_ends_with_its_trainer():
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    _, _, mp = trainer()
    assert len(_global_optimizer_pre_hooks) == before + 1
    mp.close()
    _, _, mp = trainer()
    del mp
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("way", ["step", "unscale", "scaler"])
def test_a_backward_pass_by_hand_is_refused_before_the_step(way, level):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    overrides = mpdiag.PrecisionOverrides(loss_scale=64.0)
    mp = mpdiag.MixedPrecision(model, optimizer, constant(64.0), level=level, overrides=overrides)
    before = model.weight.detach().clone()

    def by_hand():
        summed(model, mp).backward()
        if way == "scaler":
            mp.scaler().step(optimizer)
        elif way == "unscale":
            mp.unscale()
        else:
            mp.step()

    with pytest.raises(UsageError, match="were not multiplied by the loss scale 64"):
        by_hand()
    optimizer.zero_grad()
    assert not mp.step(summed(model, mp)).skipped
    assert not torch.equal(before, model.weight)
    with pytest.raises(UsageError, match="were not multiplied by the loss scale 64"):
        by_hand()


@pytest.mark.parametrize("resumed", [False, True])
def test_gradients_that_have_the_scale_are_stepped_whoever_ran_the_backward_pass(resumed):
    """At a scale of 1 all have it; a state that is loaded leaves it to those that wait."""
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    mp = wrapped(model, constant(64.0 if resumed else 1.0))
    loss = summed(model, mp)
    if resumed:
        state = mp.state_dict()
        mp.backward(loss)
        mp.load_state_dict(state)
    else:
        loss.backward()
    assert not mp.step().skipped
    torch.testing.assert_close(model.weight.detach(), before - 0.2)


class Waits(TorchFunctionMode):
    """Counts the calls that wait for a device: those that give Python a value of a tensor."""

    names = frozenset(
        {"item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "equal"}
    )

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.names:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Answers(Waits):
    """Waits, without the values that were copied to this side before something was waited for."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "copy_":
            self.copies.append(args[0])
        if any(args and args[0] is copy for copy in self.copies):
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def as_on_an_accelerator(monkeypatch):
    """Let a step at O2 treat the CPU as a device that must be waited for."""
    for module in (masters, given):
        monkeypatch.setattr(module, "answers_late", lambda _device: True)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_step_waits_for_the_device_once(level, monkeypatch):
    if level == "O2":
        as_on_an_accelerator(monkeypatch)
    model = network()
    overrides = BF16 if level != "O0" else mpdiag.PrecisionOverrides()
    mp = wrapped(model, constant(8.0), level=level, backend="native", overrides=overrides)
    waits = Answers() if level == "O2" else Waits()
    for _ in range(2):
        waits.seen.clear()
        with waits:
            assert mp.step(loss_of_batch(model, mp)).loss > 0
    assert waits.seen == ["tolist"]


@pytest.mark.parametrize("late", [False, True])
def test_a_weight_beyond_the_format_ends_training_once_the_device_has_answered(late, monkeypatch):
    if late:
        as_on_an_accelerator(monkeypatch)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), 1e5)  # -1e5 does not fit FP16
    mp = wrapped(model, constant(1.0), sgd, level="O2", backend="emulated")

    def take():
        with mp.autocast():
            loss = model(torch.ones(1, 1)).sum()
        return mp.step(loss)

    if late:
        assert not take().skipped
    said = r"weight 'weight' grew beyond FP16's range at step 0:"
    with pytest.raises(TrainingDiverged, match=said):
        take()
    assert late or torch.isfinite(model.weight).all()
    assert mp.fp32_state_dict()["weight"].item() == 1 - 1e5


def test_a_step_without_masters_waits_a_second_time_to_undo_what_does_not_fit():
    """Whether the update fits is in the result of the same step, and the old weights are back."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    mp = mpdiag.MixedPrecision(model, optimizer, constant(1.0), level="O3", backend="emulated")

    def take(size):
        with mp.autocast():
            loss = model(torch.full((1, 1), size)).sum()
        with Waits() as waits:
            result = mp.step(loss)
        return result, waits.seen

    result, seen = take(2.0)
    assert (result.skipped, seen) == (False, ["tolist", "__bool__"])
    before = model.weight.item(), optimizer.state[model.weight]["momentum_buffer"].item()
    assert before == (-1.0, 2.0)
    optimizer.param_groups[0]["lr"] = 1e5
    result, seen = take(4.0)
    assert result.skipped
    assert (result.first.where, result.first.name) == ("weights", "weight")
    assert seen[:2] == ["tolist", "__bool__"]
    after = model.weight.item(), optimizer.state[model.weight]["momentum_buffer"].item()
    assert after == before


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_micro_batch_is_thrown_away_with_its_loss(
    monkeypatch, level, by_model, late, set_to_none
):
    if late:  # as an accelerator, whose values nobody waits for
        monkeypatch.setattr(stepping, "answers_late", lambda _device: True)
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    options = {} if level == "O0" else {"overrides": BF16}
    mp = wrapped(model, constant(8.0), optimizer, level=level, **options)

    def loss_of(value):
        return summed(model, mp, torch.full((1, 4), value))

    for value in (1.0, float("nan")):
        mp.backward(loss_of(value))
    (model if by_model else optimizer).zero_grad(set_to_none=set_to_none)
    mp.backward(loss_of(0.5))
    result = mp.step(loss_of(0.25))
    mp.close()
    assert (result.skipped, result.loss) == (False, 3.0)
    assert torch.equal(model.weight.detach(), torch.full((1, 4), 1 - 0.75 / 2))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_are_zero_are_stepped_after_another_forward_pass(level):
    model = nn.Linear(4, 1, bias=False)
    mp = wrapped(model, constant(8.0), level=level, overrides=BF16)
    mp.backward(summed(model, mp, torch.zeros(1, 4)))
    with torch.no_grad(), mp.autocast():
        model(torch.ones(1, 4))
    assert not mp.step().skipped


def test_a_parameter_of_two_optimizers_is_taken_once():
    first, shared = (nn.Parameter(torch.ones(n)) for n in (1, 2))
    optimizers = [torch.optim.SGD([first, shared], 0.1), torch.optim.SGD([shared], 0.1)]
    assert [id(p) for p in _parameters_of_all(optimizers)] == [id(first), id(shared)]
