"""Checkpoints: what is saved, and what training goes on from."""

import copy
import warnings

import pytest
import torch
from conformance.models import (
    ONE,
    Weighted,
    perceptron,
    poisoned,
    rows,
    same,
    through_a_file,
    values,
)
from conformance.outcomes import Chapter, NotApplicable
from conformance.subjects.protocol import Scale, Subject, Training
from torch import nn

CHAPTER = Chapter("Checkpoints")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)


def some(training: Training, steps: range) -> None:
    for i in steps:
        output = training.forward(rows(i))
        training.backward(poisoned(output, float("inf") if i == 2 else 1.0).square().sum())
        training.step()


@CHAPTER.behaviour
def resumed_bit_for_bit(subject: Subject) -> None:
    """Resumed from a file into new objects, training goes on bit for bit."""
    model = perceptron()
    with subject.training(model, adam(model), Scale(64.0, interval=2)) as training:
        some(training, range(6))
        whole, scale = training.weights(), training.scale
    for stop in (1, 3, 5):
        model = perceptron()
        with subject.training(model, adam(model), Scale(64.0, interval=2)) as training:
            some(training, range(stop))
            state = through_a_file(training.state())
        other = perceptron(seed=1)
        with subject.training(other, adam(other), Scale(64.0, interval=2)) as training:
            training.load(state)
            some(training, range(stop, 6))
            assert same(training.weights(), whole), f"stopped at {stop}"
            assert training.scale == scale


@CHAPTER.behaviour
def a_state_is_a_copy_in_a_file(subject: Subject) -> None:
    """A state loaded twice gives the same training twice."""
    model = perceptron()
    with subject.training(model, adam(model)) as training:
        some(training, range(2))
        state = copy.deepcopy(training.state())
        found = []
        for _ in range(2):
            training.load(copy.deepcopy(state))
            some(training, range(3, 5))
            found.append(training.weights())
    assert same(*found)


@CHAPTER.behaviour
def a_state_of_another_scale(subject: Subject) -> None:
    """A state loaded by a training begun at another scale brings its own scale."""
    with subject.training(Weighted(), scale=Scale(64.0)) as training:
        training.train(ONE)
        state = training.state()
    with subject.training(Weighted(), scale=Scale(8.0)) as training:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training.load(state)
        assert training.scale == 64


@CHAPTER.behaviour
def a_refused_state_changes_nothing(subject: Subject) -> None:
    """A state whose optimizer does not fit is refused, and the model stays as it was."""
    model = Weighted()
    with subject.training(model, adam(model)) as training:
        training.train(ONE)
        state = copy.deepcopy(training.state())
    state["optimizers"][0]["param_groups"] = []
    model = Weighted(7.0, 8.0)
    with subject.training(model, adam(model)) as training:
        with pytest.raises(Exception, match=r"."):
            training.load(state)
        assert values(training.weights()) == [7, 8]
        assert model.weight.tolist() == [7, 8]


@CHAPTER.behaviour
def the_models_own_checkpoint(subject: Subject) -> None:
    """``torch.save(model.state_dict())`` after training loads into a plain FP32 model, in full."""
    model = perceptron()
    with subject.training(model, rate=0.01) as training:
        some(training, range(3))
        expected = training.weights()
    other = perceptron(seed=1)
    other.load_state_dict(through_a_file(model.state_dict()))
    assert same(dict(other.named_parameters()), expected)
    assert all(p.dtype == torch.float32 for p in other.parameters())


@CHAPTER.behaviour
def an_optimizer_with_a_past(subject: Subject) -> None:
    """An optimizer that stepped before training began, a fused one too, goes on with its state."""
    kinds = {torch.optim.Adam: {"eps": 1e-3}, torch.optim.Adagrad: {"eps": 1e-3}}
    kinds[torch.optim.SGD] = {"momentum": 0.9}
    for kind, options in kinds.items():
        for fused in (False, True):
            model = perceptron()
            optimizer = kind(model.parameters(), 0.01, fused=fused, **options)
            for i in range(2):
                model(rows(i)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with subject.training(model, optimizer) as training:
                assert training.train(rows(3)), kind.__name__
                assert all(bool(w.isfinite().all()) for w in training.weights().values())


@CHAPTER.behaviour
def the_optimizer_after_training(subject: Subject) -> None:
    """After training is closed, model and optimizer train on in plain FP32."""
    model = perceptron()
    optimizer = adam(model)
    with subject.training(model, optimizer) as training:
        some(training, range(2))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.zero_grad()
    if subject.name == "Lightning":
        raise NotApplicable("Fabric keeps its hooks on the model")
    with torch.autocast("cpu", enabled=False):
        inner = getattr(model, "_original_forward", model)
        inner(rows(4)).square().sum().backward()
    optimizer.step()
    after = dict(model.named_parameters())
    assert all(p.dtype == torch.float32 for p in after.values())
    assert not any(torch.equal(before[n], after[n]) for n in before)


@CHAPTER.behaviour
def wrapped_again(subject: Subject) -> None:
    """A model that was trained once can be wrapped and trained again."""
    model = perceptron()
    for _ in range(2):
        with subject.training(model, rate=0.01) as training:
            assert training.train(rows(0))
