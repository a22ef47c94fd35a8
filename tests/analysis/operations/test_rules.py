"""Each rule on a small model of known answer; the answer comes from training it, not from the rule.

The truth of a case is what ``MixedPrecision`` makes of it in emulated FP16 without the plan's FP32
operations: not finite, or gradients far from FP32's. Where there is none, nothing may be flagged;
where there is one, the plan's choices must mend it (unless it is written to be mended by hand).
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from recorded_steps import (
    Head,
    Layers,
    Net,
    batch,
    difference,
    error_by,
    of_batch,
    record_steps,
    weighed,
)
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.operations.detection import find_operations
from mpdiag.numerics.formats import BF16, FP16
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.operations import Operation, TensorRecord, decode, encode


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


def log_of_a_cast(z):
    p = F.softmax(z * 15, -1, dtype=torch.float32)
    p = p.to(z.dtype)
    return p.log().clamp_min(-1000)


def log_of_a_cast_by_name(z):
    dtype = z.dtype
    p = F.softmax(z.float() * 15, -1).to(dtype)
    return p.log().clamp_min(-1000)


def length_of_small_values(x):
    h = x * 1e-4
    return h / (h * h).sum(-1, keepdim=True).sqrt()


def rotated(x):
    angles = torch.einsum("i,j->ij", torch.arange(8.0) + 3001, 1 / torch.arange(1.0, 17))
    return x * angles.cos()


def norm_in_fp32(x):
    dtype = x.dtype
    x = (x * 1000).to(torch.float32)
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)).to(dtype)


def squares_in_fp32(x):
    h = x.float() * 1000
    return (h * h).mean(-1).sqrt()


def chances(x):
    return torch.sigmoid(x * 40).clamp(1e-6, 1 - 1e-6)


def clamped(p):
    return p.clamp(-1 + 1e-6, 1 - 1e-6)


def chances_of(bias):
    """Chances of e^bias, and a network's."""
    return lambda x: torch.sigmoid(x * 0.1 + bias)


def by_log_of_difference(p):
    """The chance of each day's event after none before, by the difference of products."""
    left = torch.cumprod(1 - p, -1)
    return torch.log(left[:, :-1] - left[:, 1:] + 1e-9)


def by_weights(p):
    """What is seen through layers, of which each hides a little."""
    return p * 1e3 * torch.cumprod(1 - p + 1e-10, -1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function behind a linear layer, and the code that the policy does not cover."""

    function: Callable
    code: str | None = None
    gain: float = 1.0
    bias: float | None = None

    @property
    def codes(self):
        return {self.code} - {None}

    def net(self):
        return Net(self.function, self.gain, self.bias)


CASES = {
    "softmax by hand": Case(softmax_by_hand),
    "square": Case(lambda x: (x * x).mean(-1).sqrt(), "overflow", gain=600.0),
    "square of ordinary values": Case(lambda x: (x * x).mean(-1).sqrt()),
    "product": Case(lambda x: x * 1e-3, "overflow", gain=4e5),
    "variance as a difference": Case(naive_variance, "cancellation", bias=30.0),
    "the same, small mean": Case(naive_variance, bias=0.1),
    "centred late": Case(
        lambda x: (x - x.mean(-1, keepdim=True)) ** 2, "cancellation", bias=1000.0
    ),
    "RMS norm, tiny eps": Case(
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-8),
        "vanishing",
        gain=3e-5,
        bias=0.0,
    ),
    "RMS norm": Case(lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)),
    "eps beside large values": Case(lambda x: 1 / (x.abs() + 1 + 1e-8)),
    "mask of -1e9": Case(lambda x: F.softmax(x.masked_fill(x > 0.3, -1e9), -1), "mask-fill"),
    "mask of -inf": Case(lambda x: F.softmax(x.masked_fill(x > 0.3, -float("inf")), -1)),
    "mask of the dtype's lowest": Case(finfo_fill),
    "-1e9 added in the dtype of what it is added to": Case(
        additive_mask(-1e9, follows=True, void=True), "overflow"
    ),
    "-1e9 added, no row all padding": Case(additive_mask(-1e9, follows=True)),
    "-1e9 added in FP32": Case(additive_mask(-1e9, follows=False, void=True)),
    "the dtype's lowest added": Case(additive_mask(None, follows=True, void=True)),
    "running sum": Case(running, "swallowed"),
    "log(1 + x)": Case(lambda x: torch.log(1 + x.abs()), "swallowed", gain=1e-4, bias=1e-5),
    "log(20 + x), x lost": Case(lambda x: torch.log((x.abs() + 20) + 1e-3)),
    "1 - p, a product of many, a difference": Case(
        lambda x: by_log_of_difference(chances_of(-8.5)(x)), "swallowed"
    ),
    "1 - p, some far smaller than others": Case(
        lambda x: by_log_of_difference(torch.sigmoid(3 * x - 6)), "swallowed"
    ),
    "the same of ordinary chances": Case(lambda x: by_log_of_difference(chances_of(-1.0)(x))),
    "1 - p, and 1 less their product": Case(
        lambda x: (1 - torch.prod(1 - chances_of(-9.0)(x), -1)) * 1e3, "swallowed"
    ),
    "1 - p, and a product that weighs": Case(lambda x: by_weights(chances_of(-8.5)(x))),
    "1 - p as a factor": Case(lambda x: x * (1 - chances_of(-8.5)(x))),
    "log1p": Case(lambda x: torch.log1p(x.abs()), gain=1e-4, bias=1e-5),
    "layer norm": Case(lambda x: F.layer_norm(x, (16,))),
    "unit vectors": Case(lambda x: F.normalize(x, dim=-1)),
    "pow": Case(lambda x: x.pow(4) * 1e-5, bias=20.0),
    "sum": Case(lambda x: x.sum() * 1e-5, bias=600.0),
    "cosine of large angles": Case(lambda x: torch.cos(x * 3000), "imprecise"),
    "cosine of small angles": Case(torch.cos),
    "angles from einsum": Case(rotated, "imprecise"),
    "logit of a clamped probability": Case(lambda x: torch.logit(chances(x)), "diverging"),
    "logit of an ordinary one": Case(lambda x: torch.logit(torch.sigmoid(x))),
    "atanh of a clamped value": Case(
        lambda x: torch.atanh(clamped(torch.tanh(x * 10))), "diverging"
    ),
    "acos of a clamped value": Case(lambda x: torch.acos(clamped(torch.tanh(x * 10))), "diverging"),
    "log1p(-p)": Case(lambda x: torch.log1p(-chances(x)), "diverging"),
    "log(1 - p)": Case(lambda x: torch.log(1 - chances(x)), "vanishing"),
    "log(1 - p) with room": Case(lambda x: torch.log(1 - torch.sigmoid(x) + 1e-3)),
    "squares that vanish before an FP32 sum": Case(length_of_small_values, "vanishing"),
    "a cast that follows another dtype": Case(log_of_a_cast, "vanishing"),
    "the same by a variable": Case(log_of_a_cast_by_name, "vanishing"),
    "a norm that converts to FP32 and back": Case(norm_in_fp32),
    "squares converted to FP32 before": Case(squares_in_fp32),
}


def recorded(case, folder):
    return record_steps(folder, CASES[case].net(), steps=2, operations=1)


@pytest.mark.parametrize("case", CASES)
def test_flags_are_true_and_the_plan_mends_them(case, tmp_path):
    run = recorded(case, tmp_path / "run")
    plan = mpdiag.analyze(run).plan
    found = find_operations(run.operations(), FP16, plan.loss_scale.recommended)
    needed = {f.code for f in found if not f.covered}
    assert needed == CASES[case].codes

    bare = error_by(CASES[case].net(), PrecisionPlan(loss_scale=plan.loss_scale))
    assert (bare > 0.05) == bool(needed), bare
    assert error_by(CASES[case].net(), plan) < 0.05
    for f in found:
        assert "test_rules.py" in f.where or (f.module == "body" and "recorded_steps.py" in f.where)
        assert f.reason
        assert f.fix


def test_what_the_policy_covers_is_known_and_not_asked_for(tmp_path):
    run = record_steps(tmp_path, Case(softmax_by_hand, gain=20.0).net(), steps=2, operations=1)
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
    assert [dataclasses.asdict(op) for op in again] == [dataclasses.asdict(op) for op in operations]


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


def raw(function):
    """A function of the batch itself, which is FP32 at O1 and FP16 where everything is."""
    torch.manual_seed(0)
    layers = {"first": Head(function), "body": nn.Linear(16, 16)}
    return Layers(lambda m, x: m.body(m.first(x)), **layers)


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
    model = raw(function)
    run = record_steps(tmp_path / "run", model, lambda m, _: weighed(m(x)), operations=1)
    analysis = mpdiag.analyze(run)
    assert {f.code for f in analysis.operations} == codes
    if function is euler:  # those of the steps' own size: their rounding is no matter
        blamed = {f.op for f in analysis.operations}
        assert ({"add", "sub"} <= blamed, {"mul", "tanh"} & blamed) == (True, set())
    assert {f.covered_by for f in analysis.operations} <= {"neighbours"}
    assert not [f for f in analysis.findings if f.code.startswith("operation-")]
    assert all(c.evidence.get("policy") is None for c in analysis.plan.fp32_operations)

    with torch.no_grad():
        exact = model(x)
        errors = {}
        for level in ("O1", "O2"):
            optimizer = torch.optim.SGD(model.parameters(), 0.0)
            mp = mpdiag.MixedPrecision(model, optimizer, analysis.plan, level=level)
            with mp, mp.autocast():
                errors[level] = difference(model(x), exact)
    assert errors["O1"] < 0.05
    assert (errors["O2"] > 0.05) == bool(codes), errors


def by_root(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-8).sqrt()


def by_root_twice(x):
    variance = x.var(-1, keepdim=True)
    return x / (variance + 1e-8).sqrt() + x / (variance + 2e-8).sqrt()


@pytest.mark.parametrize("function", [by_root, by_root_twice])
def test_a_gradient_too_large_for_what_it_is_of_is_mended_there(function, tmp_path):
    """FP32 for the root alone is no help: its gradient is cast for the FP16 value it was given."""
    model = Net(lambda x: function(x * 1e-3), 1.0, None)
    run = record_steps(
        tmp_path / "run", model, lambda *a: 4 * of_batch(*a), steps=3, rate=1e-4, operations=1
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    plan = mpdiag.analyze(run).plan
    assert "var" in {c.op for c in plan.fp32_operations}
    root = [dataclasses.replace(c, op="sqrt") for c in plan.fp32_operations if c.op == "var"]
    for choices, skips in ((plan.fp32_operations, False), (tuple(root), True)):
        with mpdiag.MixedPrecision(
            model, optimizer, dataclasses.replace(plan, fp32_operations=choices)
        ) as mp:
            with mp.autocast():
                loss = 4 * weighed(model(batch()))
            assert mp.step(loss).skipped == skips


class Running(Net):
    """A head whose running mean is kept in FP32, or in the head's dtype."""

    def __init__(self, rate, half=True) -> None:
        super().__init__(None)
        self.rate, self.half, self.mean = rate, half, torch.full((16,), 20.0)

    def forward(self, x):
        y = self.body(x)
        with torch.no_grad():
            mean = self.mean.to(y.dtype) if self.half else self.mean
            mean = mean + self.rate * (y.mean(0) - mean)
            self.mean = mean.to(y.dtype) if self.half else mean
        return y + self.mean


class Jittered(Net):
    """A batch with a small number added, in a layer's dtype."""

    def __init__(self) -> None:
        super().__init__(None)

    def forward(self, x):
        y = self.body(x)
        return y + (x.to(y.dtype) + 1e-5)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Running(1e-4), True),
        (lambda: Running(1e-4, half=False), False),
        (lambda: Running(0.1), False),
        (Jittered, False),
    ],
    ids=["in the dtype of a layer", "in FP32", "with large steps", "a batch"],
)
def test_a_running_value_that_stands_still(make, found, tmp_path):
    plan = mpdiag.analyze(record_steps(tmp_path / "run", make(), steps=12, operations=2)).plan
    assert ["running" in c.evidence for c in plan.fp32_operations] == [True] * found
    if found:
        for choices, moves in ((plan.fp32_operations, True), ((), False)):
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), 0.0)
            own = dataclasses.replace(plan, fp32_operations=choices)
            with mpdiag.MixedPrecision(model, optimizer, own) as mp, mp.autocast():
                model(batch())
            assert bool((model.mean != 20).any()) == moves
