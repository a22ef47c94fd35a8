"""What infinite values lead to, as the emulation of FP16 shows it: a loss, gradients, or neither."""

import pytest
import torch
from recorded_steps import Net, batch, record_steps, weighed
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.operations.consequences import fate
from mpdiag.analysis.operations.detection import find_operations
from mpdiag.analysis.operations.graph import split, store
from mpdiag.numerics.formats import FP16
from mpdiag.plan import PrecisionPlan

# name: a function of values up to some thousands, what its first overflow leads to, and the words
CASES = {
    "a square, brought back": (lambda x: x * x * 1e-6, "end", "the loss becomes NaN or Inf"),
    "a square, and a layer norm": (lambda x: F.layer_norm(x * x, (16,)), "end", "NaN or Inf"),
    "the logits of a softmax": (lambda x: F.softmax(x * 1000, -1), "end", "NaN or Inf"),
    "RMS norm": (
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), "zeros",
        "turns them into 0: the result is wrong, and no step is skipped",
    ),
    "a divisor": (lambda x: 1e4 / (x * x + 1e4), "zeros", "reciprocal turns them into 0"),
    "a divisor that is squared": (
        lambda x: 1 / (1 + (x * x) * (x * x) * 1e-6), "gradients", "the gradients become NaN",
    ),
    "a bounded function": (lambda x: torch.tanh(x * 1000), "alike", ""),
    "a clamp": (lambda x: (x * 1000).clamp(-5, 5), "alike", ""),
    "a branch that is not taken": (
        lambda x: torch.where(x.abs() < 50, x * x, x.sign()), "alike", "",
    ),
    "an operation of its own kind": (
        lambda x: torch.special.entr((x * 1000).abs()) * 0, "unknown", "the result is wrong or NaN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_infinity_is_followed_to_the_loss(case, tmp_path):
    function, reaches, words = CASES[case]
    run = record_steps(tmp_path / "run", Net(function, gain=1500.0), operations=1)
    (graph,) = split(run.operations())
    step = store(graph, FP16, fp32=frozenset())
    first = next(op for op in step.forward if graph.overflow(op.outputs[0], FP16))
    found = fate(step, first)
    assert found.reaches == reaches
    assert words in found.of_values("values become infinite")

    findings = [f for f in mpdiag.analyze(run).findings if f.code == "operation-overflow"]
    assert [words in f.fix for f in findings] == [True] * (reaches != "alike")
    model = Net(function, gain=1500.0)
    with mpdiag.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), 0.0), PrecisionPlan()
    ) as mp:
        with mp.autocast():
            loss = weighed(model(batch()))
        mp.backward(loss)
        gradient = model.body.weight.grad
    truth = "end" if not loss.isfinite() else "" if gradient.isfinite().all() else "gradients"
    assert reaches in (truth, "unknown") or (not truth and reaches in ("zeros", "alike"))


@pytest.mark.parametrize(("factor", "found"), [(1e4, True), (1.0, False)])
@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda x, by: x * by, "mul"),
        (lambda x, by: F.linear(x, by * torch.eye(16)), "mm"),
        (lambda x, by: torch.add(torch.zeros_like(x), x, alpha=by), "add"),
        (lambda x, by: F.conv1d(x[:, None], torch.full((1, 1, 1), by))[:, 0], "convolution"),
    ],
)
def test_a_gradient_that_is_lost_before_it_is_multiplied_is_found(
    tmp_path, call, op, factor, found
):
    """The layer's own gradient is a ten-thousand times that of the product, and is not lost."""
    net = Net(lambda x: F.layer_norm(call(x, factor), (16,)))
    run = record_steps(
        tmp_path / "run", net, loss=lambda model, _: weighed(model(batch())) / 30, operations=1
    )
    analysis = mpdiag.analyze(run)
    assert analysis.loss_scale.plan.need == "not needed"
    assert [c.op for c in analysis.plan.fp32_operations] == [op] * found


def test_a_gradient_that_a_mask_may_drop_is_not_said_to_skip_steps(tmp_path):
    run = record_steps(
        tmp_path / "run", Net(lambda x: torch.atan2(x, x + 1e-4), gain=1e-4, bias=0.0), operations=1
    )
    (found,) = (f for f in mpdiag.analyze(run).findings if f.code == "operation-gradient-overflow")
    assert "the gradient is wrong, or the step is skipped" in found.fix


def test_a_gradient_is_beyond_the_range_by_the_loss_scale_it_carries(tmp_path):
    operations = record_steps(tmp_path / "run", Net(lambda x: x), operations=1).operations()
    for scale, said in ((1.0, []), (2.0**22, ["its backward pass (mm) reaches 0.0328 times"])):
        found = find_operations(operations, FP16, scale)
        reasons = [f.reason for f in found if f.code == "gradient-overflow"]
        assert [reason.partition(" the loss scale")[0] for reason in reasons] == said


def test_a_gradient_of_what_another_finding_puts_into_fp32_is_not_said_to_skip_steps(tmp_path):
    """In FP16 alone atan2's own mask makes it 0: that it overflows a cast is so only once it is FP32."""

    def heading(y):
        y = y * 1e-6
        return 1 - torch.cos(torch.atan2(y[:, 1], y[:, 0]) - torch.ones(len(y)))

    run = record_steps(tmp_path / "run", Net(heading), operations=1)
    (found,) = (f for f in mpdiag.analyze(run).findings if f.code == "operation-gradient-overflow")
    assert found.fix.startswith("keep mul in FP32")
    assert found.fix.endswith("the gradient is wrong, or the step is skipped")
