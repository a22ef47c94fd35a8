"""Each rule on a small model of known answer; the answer comes from training it, not from the rule.

The truth of a case is what ``MixedPrecision`` makes of it in emulated FP16 without the plan's FP32
operations: not finite, or gradients far from FP32's. Where there is none, nothing may be flagged;
where there is one, the plan's choices must mend it (unless it is written to be mended by hand).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.operations.detection import find_operations
from mpdiag.numerics.formats import BF16, FP16
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.operations import Operation, TensorRecord, decode, encode
from mpdiag.runs.run import open_run


class Head(nn.Module):
    """The function under test, in a module of its own."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Net(nn.Module):
    def __init__(self, function, gain, bias) -> None:
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


def softmax_by_hand(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)


def running(x):
    total = x[0] * 0 + 4000.0
    for i in range(32):
        total = total + x[i % 8].abs() * 0.1
    return total - 4000.0


def naive_variance(x):
    return (x * x).mean(-1) - x.mean(-1) * x.mean(-1)


def additive_mask(low, *, follows, void=False):
    """A function that adds ``low`` where there is padding, with the first row all padding."""

    def function(x):
        real = x < 0.3
        real[0] = not void
        if not follows:
            return F.softmax(x + (1 - real.to(torch.float32)) * low, -1)
        return F.softmax(x + (1 - real.to(x.dtype)) * (low or torch.finfo(x.dtype).min), -1)

    return function


def finfo_fill(x):
    hidden = x > 0.3
    hidden[0] = True
    return F.softmax(x.masked_fill(hidden, torch.finfo(x.dtype).min), -1)


# name: function, gain of the weights, bias, codes that the policy does not cover
CASES = {
    "softmax by hand": (softmax_by_hand, 1.0, None, set()),
    "square": (lambda x: (x * x).mean(-1).sqrt(), 600.0, None, {"overflow"}),
    "square of ordinary values": (lambda x: (x * x).mean(-1).sqrt(), 1.0, None, set()),
    "product": (lambda x: x * 1e-3, 4e5, None, {"overflow"}),
    "variance as a difference": (naive_variance, 1.0, 30.0, {"cancellation"}),
    "the same, small mean": (naive_variance, 1.0, 0.1, set()),
    "centred late": (lambda x: (x - x.mean(-1, keepdim=True)) ** 2, 1.0, 1000.0, {"cancellation"}),
    "RMS norm, tiny eps": (
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-8),
        3e-5,
        0.0,
        {"vanishing"},
    ),
    "RMS norm": (
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5),
        1.0,
        None,
        set(),
    ),
    "eps beside large values": (lambda x: 1 / (x.abs() + 1 + 1e-8), 1.0, None, set()),
    "mask of -1e9": (
        lambda x: F.softmax(x.masked_fill(x > 0.3, -1e9), -1),
        1.0,
        None,
        {"mask-fill"},
    ),
    "mask of -inf": (
        lambda x: F.softmax(x.masked_fill(x > 0.3, -float("inf")), -1),
        1.0,
        None,
        set(),
    ),
    "mask of the dtype's lowest": (finfo_fill, 1.0, None, set()),
    "-1e9 added in the dtype of what it is added to": (
        additive_mask(-1e9, follows=True, void=True),
        1.0,
        None,
        {"overflow"},
    ),
    "-1e9 added, no row all padding": (additive_mask(-1e9, follows=True), 1.0, None, set()),
    "-1e9 added in FP32": (additive_mask(-1e9, follows=False, void=True), 1.0, None, set()),
    "the dtype's lowest added": (
        additive_mask(None, follows=True, void=True),
        1.0,
        None,
        set(),
    ),
    "running sum": (running, 1.0, None, {"swallowed"}),
    "log(1 + x)": (lambda x: torch.log(1 + x.abs()), 1e-4, 1e-5, {"swallowed"}),
    "log(20 + x), x lost": (
        lambda x: torch.log((x.abs() + 20) + 1e-3),
        1.0,
        None,
        set(),
    ),
    "log1p": (lambda x: torch.log1p(x.abs()), 1e-4, 1e-5, set()),
    "layer norm": (lambda x: F.layer_norm(x, (16,)), 1.0, None, set()),
    "unit vectors": (lambda x: F.normalize(x, dim=-1), 1.0, None, set()),
    "pow": (lambda x: x.pow(4) * 1e-5, 1.0, 20.0, set()),
    "sum": (lambda x: x.sum() * 1e-5, 1.0, 600.0, set()),
}


def batch():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def recorded(case, folder):
    function, gain, bias, _ = CASES[case]
    model = Net(function, gain, bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with mpdiag.record(model, optimizer, folder, operations=1):
        for _ in range(2):
            optimizer.zero_grad()
            weighed(model(batch())).backward()
            optimizer.step()
    return open_run(folder)


def weighed(output):
    """A loss whose gradient is no constant: softmax always adds up to the same."""
    generator = torch.Generator().manual_seed(2)
    return (output.float() * torch.rand(output.shape, generator=generator)).mean()


def difference(value, exact):
    error = value.detach().float() - exact
    return float(error.norm() / exact.norm()) if error.isfinite().all() else float("inf")


def error_of_training(case, plan):
    """How far output and weight gradient are from FP32's, relative to their norms."""
    function, gain, bias, _ = CASES[case]
    model = Net(function, gain, bias)
    output = model(batch())
    weighed(output).backward()
    exact = model.body.weight.grad.clone()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with mpdiag.MixedPrecision(model, optimizer, plan) as mp:
        try:
            with mp.autocast():
                low = model(batch())
                loss = weighed(low)
            mp.backward(loss)
        except RuntimeError as error:
            if "overflow" not in str(error):  # a number FP16 cannot hold
                raise
            return float("inf")
        gradient = model.body.weight.grad / mp.loss_scale
    return max(difference(low, output.detach()), difference(gradient, exact))


@pytest.mark.parametrize("case", CASES)
def test_flags_are_true_and_the_plan_mends_them(case, tmp_path):
    run = recorded(case, tmp_path / "run")
    plan = mpdiag.analyze(run).plan
    found = find_operations(run.operations(), FP16, plan.loss_scale.recommended)
    needed = {f.code for f in found if not f.covered}
    assert needed == CASES[case][3]

    scale = PrecisionPlan(loss_scale=plan.loss_scale)
    bare = error_of_training(case, scale)
    assert (bare > 0.05) == bool(needed), bare
    assert error_of_training(case, plan) < 0.05
    for f in found:
        assert f.where.startswith(str(__file__)) or "test_rules.py" in f.where
        assert f.reason
        assert f.fix


def test_what_the_policy_covers_is_known_and_not_asked_for(tmp_path):
    function, _, bias, _ = CASES["softmax by hand"]
    CASES["hot softmax"] = (function, 20.0, bias, set())
    try:
        run = recorded("hot softmax", tmp_path / "run")
    finally:
        del CASES["hot softmax"]
    (found,) = find_operations(run.operations(), FP16)
    assert (found.code, found.op, found.covered) == ("overflow", "exp", True)
    assert found.evidence["highest"] > 11.09
    analysis = mpdiag.analyze(run)
    assert not [f for f in analysis.findings if f.code.startswith("operation-")]
    assert [(c.op, c.evidence["policy"]) for c in analysis.plan.fp32_operations] == [("exp", True)]


def test_bf16_has_the_range_and_not_the_digits(tmp_path):
    square = recorded("square", tmp_path / "a").operations()
    assert find_operations(square, BF16) == ()
    centred = recorded("centred late", tmp_path / "b").operations()
    assert {f.code for f in find_operations(centred, BF16)} == {"cancellation"}


def sum_of(values: int, magnitude: float) -> Operation:
    """A sum as a recording of it would be: 4096 × 16.0."""
    exponent = int(magnitude).bit_length() - 2
    read = TensorRecord(
        "self", 1, 0, "", (values,), "float32", True, exponent, (values,), b"\xff",
        absmax=magnitude, absmin=magnitude,
    )  # fmt: skip
    total = values * magnitude
    wrote = dataclasses.replace(
        read, argument="out", tensor=2, producer=1, shape=(), absmax=total, absmin=total,
        counts=(1,), first_exponent=int(total).bit_length() - 2,
        fp16_overflow=int(total >= 65520),
    )  # fmt: skip
    first = Operation(0, 0, 0, "mm", "default", "forward", "m", "", -1, "a.py", 1, "", "",
                      outputs=(dataclasses.replace(read, argument="out"),))  # fmt: skip
    return [first, Operation(0, 0, 1, "sum", "default", "forward", "m", "", -1, "a.py", 2, "", "",
                      reduction=values, inputs=(read,), outputs=(wrote,))]  # fmt: skip


def test_4096_times_16(tmp_path):
    assert torch.full((4096,), 16.0).half().sum().isinf()
    (found,) = find_operations(sum_of(4096, 16.0), FP16)
    assert (found.code, found.evidence["reduction"], found.covered) == ("overflow", 4096, True)
    assert found.evidence["mean_magnitude"] == pytest.approx(16.0)
    assert torch.full((4094,), 16.0).half().sum().isfinite()
    assert find_operations(sum_of(4094, 16.0), FP16) == ()


def test_a_round_trip_through_arrow_keeps_every_field(tmp_path):
    operations = recorded("RMS norm", tmp_path / "run").operations()
    again = decode(encode(operations))
    for a, b in zip(operations, again, strict=True):
        for field in dataclasses.fields(Operation):
            left, right = getattr(a, field.name), getattr(b, field.name)
            if field.name in ("inputs", "outputs"):
                left, right = map(dataclasses.asdict, left), map(dataclasses.asdict, right)
                left, right = list(left), list(right)
            assert left == right, field.name


def test_a_softmax_of_infinity_is_judged_too():
    """A fact that is not finite is left out of the record: here the highest of its inputs."""
    first, add = sum_of(4096, 100.0)
    low = dataclasses.replace(add.outputs[0], fp16_overflow=1)
    add = dataclasses.replace(add, op="add", reduction=1, outputs=(low,))
    softmax = dataclasses.replace(
        add, index=2, op="_softmax", inputs=(low,), outputs=(), facts={"lowest_row_maximum": 1.0}
    )
    found = find_operations([first, add, softmax], FP16)
    assert ("overflow", "add") in {(f.code, f.op) for f in found}


class Raw(nn.Module):
    """A function of the batch itself, which is FP32 at O1 and FP16 where everything is."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first = Head(function)
        self.body = nn.Linear(16, 16)

    def forward(self, x):
        return self.body(self.first(x))


def euler(x):
    start = x
    for _ in range(32):
        x = x + 1e-4 * torch.tanh(start)
    return (x - start) * 1e3


# name: function, offset and size of the batch, codes where everything is FP16
RAW = {
    "square of large values": (
        lambda x: (x * x).mean(-1, keepdim=True).sqrt() / x, 900, 30, {"overflow"},
    ),
    "square of ordinary values": (lambda x: x / (x * x).mean(-1, keepdim=True).sqrt(), 0, 1, set()),
    "tiny eps": (
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-12), 0, 1e-4, {"vanishing"},
    ),
    "small steps": (euler, 8, 1, {"swallowed", "cancellation"}),
}  # fmt: skip


@pytest.mark.parametrize("case", RAW)
def test_what_only_fp32_data_spares_is_told_and_not_kept_in_fp32(case, tmp_path):
    function, offset, size, codes = RAW[case]
    x = offset + size * batch()
    torch.manual_seed(0)
    model = Raw(function)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with mpdiag.record(model, optimizer, tmp_path / "run", operations=1):
        weighed(model(x)).backward()
        optimizer.step()
    analysis = mpdiag.analyze(tmp_path / "run")
    assert {f.code for f in analysis.operations} == codes
    assert {f.covered_by for f in analysis.operations} <= {"neighbours"}
    assert not [f for f in analysis.findings if f.code.startswith("operation-")]
    assert all(c.evidence.get("policy") is None for c in analysis.plan.fp32_operations)

    with torch.no_grad():
        exact = model(x)
        errors = {}
        for level in ("O1", "O2"):
            mp = mpdiag.MixedPrecision(model, optimizer, analysis.plan, level=level)
            with mp, mp.autocast():
                errors[level] = difference(model(x), exact)
    assert errors["O1"] < 0.05
    assert (errors["O2"] > 0.05) == bool(codes), errors


def test_only_what_rounds_to_the_size_of_a_difference_is_blamed_for_it(tmp_path):
    model = Raw(euler)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with mpdiag.record(model, optimizer, tmp_path / "run", operations=1):
        weighed(model(8 + batch())).backward()
        optimizer.step()
    blamed = {f.op for f in mpdiag.analyze(tmp_path / "run").operations}
    assert {"add", "sub"} <= blamed
    assert not {"mul", "tanh"} & blamed  # of the steps' own size: their rounding is no matter


def by_root(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-8).sqrt()


def by_root_twice(x):
    variance = x.var(-1, keepdim=True)
    return x / (variance + 1e-8).sqrt() + x / (variance + 2e-8).sqrt()


@pytest.mark.parametrize("function", [by_root, by_root_twice])
def test_a_gradient_too_large_for_what_it_is_of_is_mended_there(function, tmp_path):
    """FP32 for the root alone is no help: its gradient is cast for the FP16 value it was given."""
    model = Net(lambda x: function(x * 1e-3), 1.0, None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with mpdiag.record(model, optimizer, tmp_path / "run", operations=1):
        for _ in range(3):
            optimizer.zero_grad()
            (4 * weighed(model(batch()))).backward()
            optimizer.step()
    plan = mpdiag.analyze(tmp_path / "run").plan
    assert "var" in {c.op for c in plan.fp32_operations}
    root = [dataclasses.replace(c, op="sqrt") for c in plan.fp32_operations if c.op == "var"]
    for choices, skips in ((plan.fp32_operations, False), (tuple(root), True)):
        with mpdiag.MixedPrecision(
            model, optimizer, dataclasses.replace(plan, fp32_operations=choices)
        ) as mp:
            with mp.autocast():
                loss = 4 * weighed(model(batch()))
            assert mp.step(loss).skipped == skips
