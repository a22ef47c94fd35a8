"""Recorded steps of small models, and how far a plan's training of them is from FP32's."""

import support
import torch
from torch import nn

import mpdiag
from mpdiag.runs.run import open_run


class Layers(nn.Module):
    def __init__(self, call, **layers) -> None:
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.call(self, x)


class Head(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Net(nn.Module):
    def __init__(self, function, gain=1.0, bias=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 16)
        self.head = Head(function)
        with torch.no_grad():
            self.body.weight.mul_(gain)
            if bias is not None:
                self.body.bias.fill_(bias)

    def forward(self, x):
        return self.head(self.body(x))


def batch():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def weighed(output):
    """A loss whose gradient is no constant: softmax always adds up to the same."""
    generator = torch.Generator().manual_seed(2)
    return (output.float() * torch.rand(output.shape, generator=generator)).mean()


def of_batch(model, _step):
    return weighed(model(batch()))


def record_steps(folder, model, loss=of_batch, steps=1, make=torch.optim.SGD, rate=0.0, **options):
    """The run of a training: ``loss(model, step)`` gives each step's loss, ``make`` its optimizer."""
    optimizer = make(model.parameters(), rate)
    with mpdiag.record(model, optimizer, folder, **options):
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
    return open_run(folder)


def recorded_twice(model, x, folder):
    """The run of two training steps of a model."""

    def loss(model, _step):
        y = model(x)
        return sum(out.square().mean() for out in (y if isinstance(y, tuple) else (y,)))

    return record_steps(folder, model, loss, 2, rate=0.1)


def loss_of_network(model, step):
    x, y = support.batch(step)
    return nn.functional.cross_entropy(model(x), y)


def difference(value, exact):
    """The error of a tensor as a share of its size; infinite where it is not finite."""
    error = value.detach().float() - exact
    return float(error.norm() / exact.norm()) if error.isfinite().all() else float("inf")


def error_by(model, plan, forward=lambda model: model(batch())):
    """How far the plan's output and its gradient of ``body.weight`` are from FP32's."""
    model.zero_grad()
    output = forward(model)
    weighed(output).backward()
    exact = model.body.weight.grad.clone()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with mpdiag.MixedPrecision(model, optimizer, plan) as mp:
        try:
            with mp.autocast():
                low = forward(model)
                loss = weighed(low)
            mp.backward(loss)
        except RuntimeError as error:
            if "overflow" not in str(error):  # a number FP16 cannot hold
                raise
            return float("inf")
        gradient = model.body.weight.grad / mp.loss_scale
    return max(difference(low, output.detach()), difference(gradient, exact))
