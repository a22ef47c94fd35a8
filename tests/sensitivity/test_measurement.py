"""Measured sensitivity against rounding written out by hand, and the estimate against derivatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.emulation.rounding import round_to
from mpdiag.errors import UsageError
from mpdiag.numerics.formats import FORMATS
from mpdiag.runs.results import by_weight, read_sensitivities
from mpdiag.sensitivity.loss_estimate import by_operation, estimate
from mpdiag.sensitivity.measurement import measure, run_once
from mpdiag.tracing.operation_calls import OUTSIDE
from studies.gradient_estimate import estimate_gradients


def half(x):
    return x.half().float()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)


@pytest.fixture
def mse(net, data):
    x, y = data
    return lambda: F.mse_loss(net(x), y)


@pytest.fixture
def smooth(net, data):
    x, y = data
    return lambda: F.smooth_l1_loss(net(x), y)


def relative(exact, narrow):
    error = (narrow - exact).double().norm() / exact.double().norm()
    return float(error.detach())


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_that_of_the_format(name):
    fmt = FORMATS[name]
    exponents = torch.arange(-40, 40).float().exp2()
    x = torch.cat([exponents * f for f in (1.0, 1.03125, 1.0625, 1.21, 1.9999)])
    x = torch.cat([x, -x, torch.tensor([0.0, math.inf, -math.inf, math.nan, 464.0, 65520.0])])
    expected = fmt.round(x.numpy())
    np.testing.assert_array_equal(round_to(x, fmt).double().numpy(), expected)


def test_a_forward_operation_rounds_what_it_reads_and_returns(net, data, mse):
    x, y = data
    found = {(s.module, s.op): s for s in measure(net, mse, part="forward")}
    assert list(found) == [("0", "linear"), ("1", "tanh"), ("2", "linear"), (OUTSIDE, "mse_loss")]

    (w0, b0), (w2, b2) = ((m.weight, m.bias) for m in (net[0], net[2]))
    out = net(x)
    # The first layer in FP16: its gradients are still FP32's formulas at the rounded output.
    h = half(F.linear(half(x), half(w0), half(b0))).detach().requires_grad_()
    narrow = F.linear(torch.tanh(h), w2, b2)
    first = found["0", "linear"]
    assert first.output_error == pytest.approx(relative(out, narrow), rel=1e-3)
    loss, exact = F.mse_loss(narrow, y), F.mse_loss(out, y)
    assert first.loss_error == pytest.approx(
        abs(float(((loss - exact) / exact).detach())), rel=1e-2
    )
    g2, gh = torch.autograd.grad(loss, [w2, h])
    e0, e2 = torch.autograd.grad(exact, [w0, w2])
    assert first.gradient_errors["2.weight"][0] == pytest.approx(relative(e2, g2), rel=1e-3)
    assert first.gradient_errors["0.weight"][0] == pytest.approx(relative(e0, gh.T @ x), rel=1e-3)
    # What lies behind an operation cannot change what comes before it.
    last = found["2", "linear"]
    assert last.output_error == pytest.approx(
        relative(out, half(F.linear(half(torch.tanh(F.linear(x, w0, b0))), half(w2), half(b2)))),
        rel=1e-3,
    )
    assert found[OUTSIDE, "mse_loss"].output_error == 0


def test_a_backward_operation_is_rounded_alone(net, data, mse):
    x, y = data
    found = {(s.module, s.op): s for s in measure(net, mse, part="backward")}
    assert all(s.output_error == s.loss_error == 0 for s in found.values())
    h = torch.tanh(net[0](x)).detach()
    g = (2 * (net[2](h) - y) / y.numel()).detach()
    narrow = half(half(g).T @ half(h))
    s = found["2", "linear"]
    assert s.gradient_errors["2.weight"][0] == pytest.approx(relative(g.T @ h, narrow), rel=1e-3)
    assert s.gradient_errors["0.weight"][0] > 0  # it hands a rounded gradient on
    assert found["0", "linear"].gradient_errors["2.weight"][0] == 0


def test_a_loss_scale_saves_small_gradients(net, mse):
    lost, saved = (
        {
            s.module: s
            for s in measure(net, lambda: mse() * 1e-6, part="backward", by="module", scale=k)
        }
        for k in (1.0, 2.0**20)
    )
    assert lost["2"].gradient_error > 0.05 > 0.001 > saved["2"].gradient_error > 0


def test_a_module_is_all_it_contains(data):
    x, y = data
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    step = lambda: F.mse_loss(net(x), y)  # noqa: E731
    found = {s.module: s for s in measure(net, step, by="module")}
    assert set(found) == {"0", "1", "1.0", "1.1", OUTSIDE}
    assert [s.op for s in found["1"].sites] == ["linear", "relu"]


def test_overflow_is_infinite_and_gentle_formats_are_gentler(data):
    x, y = data
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 3))

    def step():
        return F.mse_loss((net(x) * 1000).square().sqrt(), y)

    fp16 = {s.op: s for s in measure(net, step, fmt="fp16")}
    assert math.isinf(fp16["square"].loss_error)
    assert math.isfinite(fp16["linear"].loss_error)
    bf16 = {s.op: s for s in measure(net, step, fmt="bf16")}
    assert bf16["square"].loss_error < 0.01
    e4, e5 = (
        {s.op: s for s in measure(net, lambda: F.mse_loss(net(x), y), fmt=f)}["linear"]
        for f in ("fp8_e4m3", "fp8_e5m2")
    )
    assert fp16["linear"].output_error < e4.output_error < e5.output_error


def test_nothing_is_left_behind():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU(inplace=True)
    )
    x = torch.randn(4, 1, 8, 8)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    random = torch.get_rng_state()
    onednn = torch._C._get_mkldnn_enabled()
    found = measure(net, lambda: net(x).sum())
    estimate(net, lambda: net(x).sum())
    assert {s.op for s in found} >= {"conv2d", "batch_norm", "relu"}
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert torch._C._get_mkldnn_enabled() == onednn
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_dropout_draws_the_same_in_every_pass(data):
    x, _ = data
    net = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5))
    passes = [run_once(net, lambda: net(x).square().mean()) for _ in range(2)]
    assert passes[0].loss == passes[1].loss


def test_a_recurrent_layer_shows_its_gates(data):
    net = nn.LSTM(6, 4, batch_first=True)
    x = data[0][None]
    found = {s.op: s for s in measure(net, lambda: net(x)[0].sum())}
    assert len(found["lstm"].sites) > 16  # gates and states of 16 steps
    assert 0 < found["lstm"].output_error < 0.01


def test_what_makes_no_sense_is_refused(net, data):
    with pytest.raises(UsageError, match="part must be"):
        measure(net, lambda: net(data[0]).sum(), part="sideways")
    with pytest.raises(UsageError, match="by must be"):
        measure(net, lambda: net(data[0]).sum(), by="weight")
    with pytest.raises(UsageError, match="must return its loss"):
        measure(net, lambda: net(data[0]))


# -- the estimate ----------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.2345, 0.777, -2.3456]))

    def forward(self, x):
        return x * self.w


def test_the_estimate_of_a_linear_chain_is_the_exact_change():
    first, second = Chain(), Chain()
    x = torch.tensor([0.1, 0.2, 0.3])
    found = {
        e.site.module: e
        for e in estimate(nn.ModuleList([first, second]), lambda: second(first(x)).sum())
    }
    y = (x * first.w).detach()
    moved = (
        half(half(x) * half(first.w.detach())) - y
    ) * second.w.detach()  # linear: no second order
    assert found["0"].loss_change == pytest.approx(float(moved.sum()), rel=1e-4)
    assert found["0"].reach == pytest.approx(float(moved.abs().sum()), rel=1e-4)
    moved = (half(half(y) * half(second.w)) - y * second.w).detach()
    assert found["1"].loss_change == pytest.approx(float(moved.sum()), rel=1e-4)


def test_the_estimate_predicts_the_measured_change(net, smooth):
    exact = run_once(net, smooth)
    for e in estimate(net, smooth):
        narrow = run_once(net, smooth, [e.site], part="forward")
        assert narrow.loss - exact.loss == pytest.approx(e.loss_change, rel=0.05, abs=3e-7)


def test_the_gradient_error_is_that_of_rounding_under_the_scale(net, data, mse):
    x, y = data
    bare, scaled = (
        {e.site.module: e for e in estimate(net, lambda: mse() * 1e-6, scale=k)}
        for k in (1.0, 2.0**20)
    )
    h = torch.tanh(net[0](x)).detach()
    g = (2e-6 * (net[2](h) - y) / y.numel()).detach()
    gradients = [g @ net[2].weight.detach(), g.T @ h, g.sum(0)]
    error = sum(float((half(v) - v).double().pow(2).sum()) for v in gradients)
    size = sum(float(v.double().pow(2).sum()) for v in gradients)
    assert bare["2"].gradient_error == pytest.approx(math.sqrt(error / size), rel=1e-3)
    assert scaled["2"].gradient_error < 0.001


def test_overflow_and_vanished_epsilons_come_first(data):
    x, _ = data
    torch.manual_seed(0)
    net = nn.Linear(6, 4)

    def step():
        h = net(x) * 1e-4
        return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-12)).square().sum()

    found = estimate(net, step)
    assert "rsqrt" in {e.site.op for e in found if math.isinf(e.loss_change)}
    squares = [
        e for e in found if e.site.op in ("mean", "add")
    ]  # they vanish: all of the loss goes
    assert all(e.reach > 0.1 * e.loss for e in squares)
    assert math.isinf(by_operation(found)[0][1])


def test_the_estimated_gradient_error_is_the_measured_one(net, smooth):
    """Over many directions it is ‖Δg‖, forward and backward, for every operation."""
    assert len(measured_estimates(net, smooth)) == 4


def test_gradients_that_no_weight_moves_count_as_well(net, data):
    """The last bias's, sixteen times 1: no rounding reaches it, and most of ‖g‖ is its."""
    measured_estimates(net, lambda: net(data[0]).sum())


def test_of_a_model_whose_gradients_no_weight_moves_the_backward_pass_rounds_alone(data):
    net = nn.Linear(6, 2)
    found = measured_estimates(net, lambda: net(data[0]).sum())
    assert [e.forward for e in found] == [0.0, 0.0]
    assert found[0].backward > 0


def measured_estimates(net, step):
    """The estimates, which are what running each site in FP16 gives."""
    found = estimate_gradients(net, step, scale=1024.0, directions=400)
    exact = run_once(net, step, scale=1024.0)
    assert len(found) == len(exact.sites)
    size = math.sqrt(sum(float(g.double().pow(2).sum()) for g in exact.gradients.values()))
    for e in found:
        for part, estimated in (("forward", e.forward), ("backward", e.backward)):
            narrow = run_once(net, step, [e.site], part=part, scale=1024.0)
            error = math.sqrt(
                sum(
                    float((narrow.gradients[n] - g).double().pow(2).sum())
                    for n, g in exact.gradients.items()
                )
            )
            assert estimated == pytest.approx(error / size, rel=0.25, abs=1e-6), (e.site, part)
    return found


def test_what_cannot_be_differentiated_twice_is_said_with_a_way_out():
    q = nn.Parameter(torch.randn(1, 2, 4, 8))

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = q

        def forward(self):
            return F.scaled_dot_product_attention(self.q, self.q, self.q)

    model = Attention()
    with pytest.raises(UsageError, match="SDPBackend"):
        estimate_gradients(model, lambda: model().square().sum())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert estimate_gradients(model, lambda: model().square().sum())


def test_buffers_change_once_while_a_training_is_ranked():
    """An operation is run twice: what it writes to must be written to once."""
    net = nn.BatchNorm1d(3)
    twin = nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    from mpdiag.sensitivity.loss_estimate import Estimator

    estimator = Estimator(net)
    with estimator.forward():
        loss = net(x).sum()
    estimator.attach(loss)
    loss.backward()
    twin(x).sum().backward()
    assert torch.equal(net.running_mean, twin.running_mean)
    assert torch.equal(net.running_var, twin.running_var)
    assert torch.equal(net.weight.grad, twin.weight.grad)


class Blocks(nn.Module):
    """Two blocks that are computed twice where ``again`` says so."""

    def __init__(self, again):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.second = nn.Sequential(nn.Softmax(-1), nn.Linear(8, 3))
        self.again = again

    def forward(self, x):
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


@pytest.mark.parametrize("part", ["forward", "backward", "both"])
def test_activation_checkpointing_changes_no_measurement(data, part):
    """What backward computes again is a forward operation, of the module that it was of before."""
    x, y = data
    plain, again = (
        measure(model, lambda m=model: F.mse_loss(m(x), y), part=part)
        for model in (Blocks(again=False), Blocks(again=True))
    )
    assert again == plain
    assert {s.op for s in plain} >= {"linear", "tanh", "softmax"}


def test_activation_checkpointing_changes_no_estimate(data):
    x, y = data
    plain, again = (
        estimate(model, lambda m=model: F.mse_loss(m(x), y))
        for model in (Blocks(again=False), Blocks(again=True))
    )
    assert again == plain


class Squares(nn.Module):
    """Squares of some hundreds, whose sum leaves FP16's range."""

    def forward(self, x):
        return (300 * x).pow(2).sum(-1).sqrt()


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Squares())
    x = torch.randn(6, 4)
    return model, lambda: model(x).mean()


def test_the_overflowing_operation_is_on_top(tmp_path):
    model, step = training()
    before = {n: p.clone() for n, p in model.named_parameters()}
    found = mpdiag.measure_sensitivity(model, step, tmp_path / "run", scale=8.0)
    lost = [row for row in by_weight(found.operations) if not row.finite]
    assert lost == by_weight(found.operations)[: len(lost)]
    assert ("2", "pow", None) in [(row.module, row.op, row.loss_error) for row in lost]
    assert "linear" not in {row.op for row in lost}
    assert read_sensitivities(tmp_path / "run") == found
    assert (found.format, found.scale) == ("fp16", 8.0)
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in model.named_parameters())


def test_the_numbers_are_those_of_the_measurement():
    model, step = training()
    stored = {(r.module, r.op): r for r in mpdiag.measure_sensitivity(model, step).operations}
    for row in measure(model, step):
        own = stored.pop((row.module, row.op))
        if own.finite:
            assert own.gradient_error == row.gradient_error
            assert own.estimate is not None
            assert own.estimate > 0
    assert not stored


def test_another_format_is_less_exact():
    model, step = training()
    errors = {}
    for fmt in ("fp16", "fp8_e5m2"):
        rows = mpdiag.measure_sensitivity(model, step, fmt=fmt).operations
        errors[fmt] = next(r.gradient_error for r in rows if (r.module, r.op) == ("0", "linear"))
    assert errors["fp8_e5m2"] > 10 * errors["fp16"] > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: None,
        lambda loss: 1.0,
        lambda loss: loss.detach(),
        lambda loss: torch.stack([loss, loss]),
    ],
)
def test_a_step_without_a_loss_is_refused(change):
    model, step = training()
    with pytest.raises(UsageError, match="must return its loss"):
        mpdiag.measure_sensitivity(model, lambda: change(step()))


def test_a_model_that_trains_nothing_is_refused():
    model, _ = training()
    x = torch.randn(6, 4, requires_grad=True)
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="requires a gradient"):
        mpdiag.measure_sensitivity(model, lambda: model(x).mean())


def test_an_unknown_format_is_refused():
    model, step = training()
    with pytest.raises(ValueError, match="no number format"):
        mpdiag.measure_sensitivity(model, step, fmt="fp12")
