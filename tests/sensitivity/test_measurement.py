"""Measured sensitivity against rounding written out by hand, and the estimate against derivatives."""

import math

import pytest
import torch
import torch.nn.functional as F
from recorded_steps import Layers
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.runs.results import by_weight, read_sensitivities
from mpdiag.sensitivity.loss_estimate import Estimator, by_operation, estimate
from mpdiag.sensitivity.measurement import measure, run_once
from mpdiag.tracing.operation_calls import OUTSIDE


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
    def error(scale):
        rows = measure(net, lambda: mse() * 1e-6, part="backward", scale=scale)
        return {row.module: row for row in rows}["2"].gradient_error

    assert error(1.0) > 0.05 > 0.001 > error(2.0**20) > 0


def test_overflow_is_infinite_and_gentle_formats_are_gentler(data):
    x, y = data
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 3))

    def found(fmt):
        rows = measure(net, lambda: F.mse_loss((net(x) * 1000).square().sqrt(), y), fmt=fmt)
        return {s.op: s for s in rows}

    fp16 = found("fp16")
    assert math.isinf(fp16["square"].loss_error)
    assert math.isfinite(fp16["linear"].loss_error)
    assert found("bf16")["square"].loss_error < 0.01
    e4, e5 = (found(fmt)["linear"] for fmt in ("fp8_e4m3", "fp8_e5m2"))
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
    assert run_once(net, lambda: net(x).sum()).loss == run_once(net, lambda: net(x).sum()).loss
    estimate(net, lambda: net(x).sum())
    assert {s.op for s in found} >= {"conv2d", "batch_norm", "relu"}
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert torch._C._get_mkldnn_enabled() == onednn
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_recurrent_layer_shows_its_gates(data):
    net = nn.LSTM(6, 4, batch_first=True)
    x = data[0][None]
    found = {s.op: s for s in measure(net, lambda: net(x)[0].sum())}
    assert len(found["lstm"].sites) > 16  # gates and states of 16 steps
    assert 0 < found["lstm"].output_error < 0.01


def test_the_estimate_of_a_linear_chain_is_the_exact_change():
    """Of the second order there is none."""
    first, second = (
        Layers(lambda m, x: x * m.w, w=nn.Parameter(torch.tensor([1.2345, 0.777, -2.3456])))
        for _ in range(2)
    )
    x = torch.tensor([0.1, 0.2, 0.3])
    estimates = estimate(nn.ModuleList([first, second]), lambda: second(first(x)).sum())
    w, y = first.w.detach(), x * first.w.detach()
    moved = {"0": (half(half(x) * half(w)) - y) * w, "1": half(half(y) * half(w)) - y * w}
    for found in estimates:
        by_hand = moved.pop(found.site.module, None)
        if by_hand is not None:
            assert found.loss_change == pytest.approx(float(by_hand.sum()), rel=1e-4)
            assert found.site.module != "0" or found.reach == pytest.approx(
                float(by_hand.abs().sum()), rel=1e-4
            )
    assert not moved


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


def test_buffers_change_once_while_a_training_is_ranked():
    """An operation is run twice: what it writes to must be written to once."""
    net, twin = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    estimator = Estimator(net)
    with estimator.forward():
        loss = net(x).sum()
    estimator.attach(loss)
    loss.backward()
    twin(x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), twin.buffers(), strict=True))
    assert torch.equal(net.weight.grad, twin.weight.grad)


def blocks(again):
    """Two blocks that are computed twice where ``again`` says so."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
    second = nn.Sequential(nn.Softmax(-1), nn.Linear(8, 3))

    def forward(model, x):
        for block in (model.first, model.second):
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x

    return Layers(forward, first=first, second=second)


@pytest.mark.parametrize("part", ["forward", "backward", "both", "estimated"])
def test_activation_checkpointing_changes_no_figure(data, part):
    """What backward computes again is a forward operation, of the module that it was of before."""
    x, y = data

    def figures(model):
        def step():
            return F.mse_loss(model(x), y)

        return estimate(model, step) if part == "estimated" else measure(model, step, part=part)

    plain, again = (figures(blocks(again)) for again in (False, True))
    assert again == plain
    assert part == "estimated" or {s.op for s in plain} >= {"linear", "tanh", "softmax"}


class Squares(nn.Module):
    """Squares of some hundreds, whose sum leaves FP16's range."""

    def forward(self, x):
        return (300 * x).pow(2).sum(-1).sqrt()


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Squares())
    x = torch.randn(6, 4)
    return model, lambda: model(x).mean()


def test_the_overflowing_operation_is_on_top_and_figures_are_those_of_the_measurement(tmp_path):
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
    stored = {(r.module, r.op): r for r in found.operations}
    for row in measure(model, step, scale=8.0):
        own = stored.pop((row.module, row.op))
        if own.finite:
            assert own.gradient_error == row.gradient_error
            assert own.estimate > 0
    assert not stored


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (lambda _: None, {}, UsageError, "must return its loss"),
        (lambda _: 1.0, {}, UsageError, "must return its loss"),
        (torch.Tensor.detach, {}, UsageError, "must return its loss"),
        (lambda loss: loss.repeat(2), {}, UsageError, "must return its loss"),
        (lambda loss: loss, {"fmt": "fp12"}, ValueError, "no number format"),
        (lambda loss: loss, {"part": "sideways"}, UsageError, "part must be"),
    ],
)
def test_what_makes_no_sense_is_refused(change, options, error, words):
    model, step = training()
    call = measure if "part" in options else mpdiag.measure_sensitivity
    with pytest.raises(error, match=words):
        call(model, lambda: change(step()), **options)


def test_a_model_that_trains_nothing_is_refused():
    model = nn.Linear(4, 2).requires_grad_(False)
    x = torch.randn(6, 4, requires_grad=True)
    with pytest.raises(UsageError, match="requires a gradient"):
        mpdiag.measure_sensitivity(model, lambda: model(x).mean())
