"""Closures, second backward passes, schedulers, hooks, groups and unusual optimizers."""

import warnings
from typing import Any

import pytest
import torch
from conformance.models import INF, ONE, Weighted, close, perceptron, poisoned, rows, values
from conformance.outcomes import Chapter, NotApplicable
from conformance.subjects.protocol import Scale, Subject, Training
from torch import nn

CHAPTER = Chapter("Optimizers, hooks and closures", about_loops=True)


@CHAPTER.behaviour
def lbfgs(subject: Subject) -> None:
    """LBFGS with a closure trains, as in FP32."""
    model = Weighted(3.0, 4.0)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=3)
    with subject.training(model, optimizer) as training:
        x = torch.tensor([1.0, 0.5])

        def closure() -> torch.Tensor:
            return (training.model(x).float() - 1.0).square().sum()

        before = float(closure().detach())
        assert training.step_with(closure)
        assert float(closure().detach()) < before / 4


@CHAPTER.trained([-1, -1], model=lambda: Weighted(0.5, 0.5), scale=Scale(64.0))
def a_gradient_penalty(training: Training) -> None:
    """A penalty on the gradients' norm, by a second backward pass, is that of FP32."""
    x = torch.ones(2, requires_grad=True)
    loss = training.forward(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)  # 2 w² x
    training.backward(loss + gradient.float().square().sum())  # w² + 4 w⁴
    assert training.step()
    # 2 w + 16 w³ = 1 + 2


@CHAPTER.trained([0, 1])
def retained_graphs(training: Training) -> None:
    """Two backward passes through one graph with ``retain_graph`` add up."""
    loss = training.forward(ONE).sum()
    training.backward(loss, retain_graph=True)
    training.backward(loss)
    assert training.step()


# -- schedulers, hooks, groups ---------------------------------------------------------------------


@CHAPTER.trained()
def a_scheduler_after_a_skip(training: Training) -> None:
    """A scheduler stepped after a first step that was skipped does not warn."""
    inner = getattr(training.optimizer, "optimizer", training.optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    training.backward(poisoned(training.forward(ONE)).sum())
    training.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@CHAPTER.behaviour
def a_skip_is_told(subject: Subject) -> None:
    """The loop can learn whether a step was skipped: taken, skipped, skipped, taken."""
    told = {
        "torch.amp": lambda t, before: t.scale < before,  # all that torch shows
        "Accelerate": lambda t, _: t.optimizer.step_was_skipped,
        "Lightning": lambda t, before: t.scale < before,
        "mpdiag": lambda t, _: t.last.skipped,
    }[subject.name]
    with subject.training(Weighted()) as training:
        seen = []
        for value in (1.0, INF, INF, 1.0):
            before = training.scale
            training.backward(poisoned(training.forward(ONE), value).sum())
            training.step()
            seen.append(bool(told(training, before)))
        assert seen == [False, True, True, False]


@CHAPTER.behaviour
def step_hooks(subject: Subject) -> None:
    """Hooks of the optimizer run around a step that is taken, and not around a skipped one."""
    calls: list[str] = []
    with subject.training(Weighted()) as training:
        inner = getattr(training.optimizer, "optimizer", training.optimizer)
        inner.register_step_pre_hook(lambda *_: calls.append("before"))
        inner.register_step_post_hook(lambda *_: calls.append("after"))
        training.train(ONE)
        assert calls == ["before", "after"]
        training.backward(poisoned(training.forward(ONE)).sum())
        training.step()
        assert calls == ["before", "after"]


@CHAPTER.behaviour
def parameter_hooks(subject: Subject) -> None:
    """Hooks on parameters run once in each backward pass, and what they return counts."""
    model, seen = Weighted(), []
    model.weight.register_hook(lambda g: seen.append(1) or g * 2)
    with subject.training(model) as training:
        training.train(ONE)
        assert seen == [1]
        assert values(training.weights()) == [0, 1]


@CHAPTER.behaviour
def post_accumulate_hooks(subject: Subject) -> None:
    """Hooks after the accumulation of a parameter's gradient find it in ``.grad``."""
    model, seen = Weighted(), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    with subject.training(model) as training:
        training.train(ONE)
        assert seen == [True]


@CHAPTER.behaviour
def a_group_added_later(subject: Subject) -> None:
    """A parameter group added after some steps is trained with its own learning rate."""
    first, second = Weighted(1.0, 1.0), Weighted(1.0, 1.0)
    optimizer = torch.optim.SGD(first.parameters(), 0.5)
    both = nn.Sequential(first, second)
    with subject.training(both, optimizer) as training:
        assert training.train(ONE)
        training.model.zero_grad()
        training.optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.25})
        assert training.train(ONE)
        assert values(training.weights()) == [0, 0, 0.875, 0.875]


@CHAPTER.trained(
    [0.75, 0.75, 0, 0], model=lambda: nn.Sequential(Weighted(1.0, 1.0), Weighted(1.0, 1.0))
)
def frozen_and_thawed(training: Training) -> None:
    """A layer frozen with ``requires_grad_(False)`` stands still, and moves again once it is thawed."""
    training.raw[0].requires_grad_(False)
    training.train(ONE)
    assert values(training.weights()) == [1, 1, 0.5, 0.5]
    training.raw[0].requires_grad_(True)
    training.train(ONE)


@CHAPTER.behaviour
def fused_optimizers(subject: Subject) -> None:
    """Fused Adam, AdamW, SGD and Adagrad train as the plain ones do, and skip what is not finite."""
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        found = []
        for fused in (False, True):
            model = perceptron()
            options: dict[str, Any] = {"fused": fused}
            if "Ada" in kind.__name__:
                options["eps"] = 0.1
            optimizer = kind(model.parameters(), 0.01, **options)
            with subject.training(model, optimizer) as training:
                for i in range(3):
                    output = training.forward(rows(i))
                    training.backward(poisoned(output, INF if i == 1 else 1.0).sum())
                    training.step()
                found.append(training.weights())
        assert close(*found, tolerance=2e-3 if subject.low_model else 1e-6), kind.__name__


@CHAPTER.behaviour
def an_optimizer_around_an_optimizer(subject: Subject) -> None:
    """A wrapper that rescales gradients in its ``step`` (LARC) is stepped on unscaled gradients."""
    if subject.name in ("Accelerate", "Lightning"):
        raise NotApplicable("takes torch's optimizers alone")
    model = Weighted()
    optimizer = Halving(torch.optim.SGD(model.parameters(), 0.5))
    with subject.training(model, [optimizer], scale=Scale(64.0)) as training:
        training.backward(training.forward(ONE).sum())
        assert training.step()
        assert values(training.weights()) == [0.75, 1.75]


class Halving:
    """Halves gradients before the optimizer inside steps; is no ``Optimizer`` itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optim = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optim, name)

    def step(self) -> None:
        for group in self.param_groups:
            for held in group["params"]:
                if held.grad is not None:
                    held.grad.mul_(0.5)
        self.optim.step()


@CHAPTER.behaviour
def a_step_that_raised_is_tried_again(subject: Subject) -> None:
    """A step tried again after ``optimizer.step()`` raised once unscales once."""
    model = Weighted()
    optimizer = Failing(model.parameters(), 0.5)
    with subject.training(model, optimizer, scale=Scale(64.0)) as training:
        training.backward(training.forward(ONE).sum())
        with pytest.raises(RuntimeError, match="once"):
            training.step()
        assert training.step()
        assert values(training.weights()) == [0.5, 1.5]


class Failing(torch.optim.SGD):
    """Raises at its first step, before anything has changed."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise RuntimeError("failed once")
        return super().step(closure)


@CHAPTER.behaviour
def groups_with_options_of_their_own(subject: Subject) -> None:
    """Groups keep their own learning rate and weight decay, and the loop may change them."""
    model = nn.Sequential(Weighted(1.0, 1.0), Weighted(1.0, 1.0))
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": model[1].parameters(), "lr": 0.25, "weight_decay": 1.0},
    ]
    with subject.training(model, torch.optim.SGD(groups, 0.1)) as training:
        training.train(ONE)
        assert values(training.weights()) == [0.5, 0.5, 0.5, 0.5]
        training.optimizer.param_groups[0]["lr"] = 0.0
        training.train(ONE)
        assert values(training.weights())[:2] == [0.5, 0.5]


# -- unusual parameters ----------------------------------------------------------------------------


@CHAPTER.behaviour
def one_parameter_in_two_optimizers(subject: Subject) -> None:
    """A parameter that two optimizers hold is stepped by both, on gradients unscaled once."""
    model = Weighted()
    optimizers = [torch.optim.SGD(model.parameters(), rate) for rate in (0.5, 0.25)]
    with subject.training(model, optimizers, scale=Scale(64.0)) as training:
        training.backward(training.forward(ONE).sum())
        assert training.step()
        assert values(training.weights()) == [0.25, 1.25]


class Rotated(Weighted):
    """The real part of the product of input and a complex weight."""

    def __init__(self) -> None:
        super().__init__(1 + 1j, 2 - 1j)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).real


@CHAPTER.trained(model=Rotated, scale=Scale(64.0))
def complex_parameters(training: Training) -> None:
    """Complex parameters are unscaled, checked and stepped."""
    training.backward(training.forward(ONE).sum())
    assert training.step()
    assert training.raw.weight.tolist() == [0.5 + 1j, 1.5 - 1j]
    training.backward(poisoned(training.forward(ONE)).sum())
    assert not training.step()
    assert training.raw.weight.tolist() == [0.5 + 1j, 1.5 - 1j]


@CHAPTER.behaviour
def double_parameters(subject: Subject) -> None:
    """A double parameter beside FP32 ones keeps its precision."""
    model = Weighted()
    model.shift = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    plain = model.forward
    model.forward = lambda x: plain(x) + model.shift  # type: ignore[method-assign]
    with subject.training(model, rate=2.0**-40) as training:
        assert training.train(ONE)
        assert model.shift.dtype == torch.float64
        assert model.shift.tolist() == [-(2.0**-40)] * 2


class Swapping(torch.optim.SGD):
    """Evaluates at half of the weights it trains, as schedule-free optimizers swap theirs."""

    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)

    def train(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(2.0)


@CHAPTER.behaviour
def an_optimizer_that_swaps_weights(subject: Subject) -> None:
    """Weights that an optimizer swaps in ``eval()`` and back in ``train()`` are what the model uses."""
    model = Weighted()
    with subject.training(model, Swapping(model.parameters(), 0.5)) as training:
        training.train(ONE)
        inner = getattr(training.optimizer, "optimizer", training.optimizer)
        inner.eval()
        with torch.no_grad():
            assert training.forward(ONE).tolist() == [0.25, 0.75]
        inner.train()
        training.train(ONE)
        assert values(training.weights()) == [0, 1]
