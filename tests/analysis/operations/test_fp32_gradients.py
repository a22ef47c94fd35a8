"""Which gradients a training by a plan keeps in FP32, and what a loss scale that they limit becomes."""

from dataclasses import replace

import pytest
import torch
from recorded_steps import Layers, batch, record_steps
from torch import nn

import mpdiag
from mpdiag.analysis.operations.fp32_gradients import fp32_gradients
from mpdiag.analysis.operations.graph import split

STEPS = 60


class Scaled(nn.Module):
    """Multiplies by a parameter, which no product reads."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.gain


def loss(model, _step):
    return model(batch()).square().mean()


ALL = {"", "a", "b", "a.weight", "a.bias", "b.weight", "b.bias"}


@pytest.mark.parametrize(
    ("call", "layers", "kept", "wide"),
    [
        # The model's output is FP16, as is what the products read.
        (lambda m, x: m.b(m.a(x)), {"a": nn.Linear, "b": nn.Linear}, set(), set()),
        # The loss reads it in FP32; b casts the output of a.
        (lambda m, x: m.b(m.a(x)), {"a": nn.Linear, "b": nn.Linear}, {"b"}, {"", "b", "b.bias"}),
        (lambda m, x: m.b(m.a(x)), {"a": nn.Linear, "b": nn.Linear}, {"a"}, {"a.bias"}),
        (lambda m, x: m.b(m.a(x)), {"a": nn.Linear, "b": nn.Linear}, {"a", "b"}, ALL),
        # FP32 data times an FP32 parameter; the product after it casts the result.
        (lambda m, x: m.b(m.a(x)), {"a": Scaled, "b": nn.Linear}, set(), {"a.gain"}),
        (lambda m, x: m.a(m.b(x)), {"a": Scaled, "b": nn.Linear}, set(), {"", "a", "a.gain"}),
    ],
)
def test_a_gradient_is_fp32_where_its_tensor_is_and_no_reader_casts_it(
    tmp_path, call, layers, kept, wide
):
    narrow = 4 if layers["a"] is nn.Linear else 16
    made = {"a": layers["a"](16, 16) if layers["a"] is nn.Linear else Scaled()}
    made["b"] = nn.Linear(16, narrow)
    model = Layers(call, **made)
    run = record_steps(tmp_path / "run", model, loss, operations=1)
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    graphs = split(run.operations())
    found = fp32_gradients(graphs, parameters, lambda op: op.module in kept)
    # A weight is read transposed, without a name: one of as many elements may be another.
    assert found == wide | {f"{name}.weight" for name in kept if layers[name] is nn.Linear}


def head(width=16):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))


def train(model, make, objective, plan=None):
    """The losses of both heads after a training, in units of their own."""
    optimizer = make(model.parameters())
    with mpdiag.MixedPrecision(model, optimizer, plan, backend="emulated") as mp:
        for _ in range(STEPS):
            with mp.autocast():
                value = objective(model)
            mp.step(value)


@pytest.mark.parametrize(
    ("large", "small", "split_head", "kept"),
    [
        (1e6, 1e-8, False, ("b",)),
        (1e6, 1e-8, True, ("b", "c")),
        (1.0, 1e-2, False, ()),
    ],
)
def test_a_module_in_fp32_gives_two_losses_far_apart_one_loss_scale(
    tmp_path, large, small, split_head, kept
):
    """One parameter in FP32 would not do: each of the head's gradients is too small."""
    x = batch()
    first, second = x.mean(1, keepdim=True), x[:, :1].tanh()

    def made():
        torch.manual_seed(0)
        if split_head:
            hidden = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
            return Layers(
                lambda m, v: (m.a(v), m.c(m.b(v))), a=head(), b=hidden, c=nn.Linear(16, 1)
            )
        return Layers(lambda m, v: (m.a(v), m.b(v)), a=head(), b=head())

    def losses(model):
        a, b = model(x)
        return (a - first).square().mean(), (b - second).square().mean()

    def values(model):
        return [float(value.detach()) for value in losses(model)]

    def objective(model, _step=0):
        a, b = losses(model)
        return large * a + small * b

    def optimizer(parameters, rate=0.01):
        return torch.optim.Adam(parameters, rate, eps=1e-30)

    run = record_steps(
        *(tmp_path / "run", made(), objective, STEPS),
        make=optimizer,
        rate=0.01,
        operations=2,
    )
    analysis = mpdiag.analyze(run)
    plan, scale = analysis.plan, analysis.loss_scale
    assert (analysis.verdict.level, scale.fits) == ("expected", True)
    assert {m.split(".")[0] for m in scale.fp32_modules} == set(kept)
    assert tuple(c.module for c in plan.fp32_modules) == scale.fp32_modules
    assert ("no-loss-scale-fits" in {f.code for f in analysis.findings}) == bool(kept)
    trained = made()
    train(trained, optimizer, objective, plan)
    reference = made()
    train(reference, optimizer, objective, replace(plan, level="O0"))
    for by_plan, fp32 in zip(values(trained), values(reference), strict=True):
        assert by_plan < 1.2 * fp32 + 1e-3
    if kept:
        bare = made()
        train(bare, optimizer, objective, replace(plan, fp32_modules=(), fp32_operations=()))
        assert values(bare)[1] > 2 * values(reference)[1]
