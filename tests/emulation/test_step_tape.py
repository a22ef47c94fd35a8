"""A taped step: its effects are those of training with the operation rounded, and nothing else moves."""

import pytest
import torch
from recorded import Wrapped
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.emulation import step_effects, step_tape
from mpdiag.runs.run import open_run


class Solved(nn.Module):
    """A layer's answer to badly conditioned normal equations, with a view and a write in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trust = nn.Linear(3, 1)
        self.rounded = ""

    def forward(self, batch):
        rows, right, look = batch
        weight = torch.sigmoid(self.trust(look))
        normal = self.product((rows * weight).transpose(1, 2), rows)
        normal.add_(1e-3 * torch.eye(4))
        answer = self.product((rows * weight).transpose(1, 2), right[..., None])
        return torch.linalg.solve(normal, answer).squeeze(-1)

    def product(self, a, b):
        return Rounded.apply(a, b) if self.rounded else a @ b


def low(x):
    return x.half().float()


class Rounded(torch.autograd.Function):
    """A product of FP16 in both passes; gradients keep their exponent."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return low(low(a) @ low(b))

    @staticmethod
    def backward(ctx, g):
        a, b = (kept(x) for x in ctx.saved_tensors)
        g = kept(g)
        return kept(g @ b.mT), kept(a.mT @ g)


def kept(x):
    """Rounded to 11 bits, whatever the exponent."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(low(mantissa), exponent)


def batches(step):
    g = torch.Generator().manual_seed(step)
    far = torch.rand(8, 24, generator=g)
    rows = far[..., None] ** torch.arange(4)
    return rows, torch.randn(8, 24, generator=g), torch.randn(8, 24, 3, generator=g)


def train(model, folder=None, steps=12):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    recorder = mpdiag.record(model, optimizer, folder, budget=None) if folder else None
    with recorder if recorder is not None else torch.enable_grad():
        for step in range(steps):
            optimizer.zero_grad()
            F.smooth_l1_loss(model(batches(step)), torch.ones(8, 4)).backward()
            optimizer.step()


def facts(folder, op, step=10, module=""):
    found = [
        o.facts
        for o in open_run(folder).operations()
        if (o.op, o.step, o.module) == (op, step, module) and not o.node
    ]
    return found[0]


def test_the_effect_is_that_of_the_rounded_product(tmp_path):
    train(Solved(), tmp_path / "run")
    found = facts(tmp_path / "run", "bmm")
    gradients, losses = [], []
    for rounded in ("", "fp16"):
        model = Solved()
        train(model, steps=10)
        model.rounded = rounded
        loss = F.smooth_l1_loss(model(batches(10)), torch.ones(8, 4))
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in model.trust.parameters()]))
    exact, changed = gradients
    error = float((changed - exact).norm() / exact.norm())
    assert error > 0.1  # the solution is far off
    assert found["loss_change_fp16"] == pytest.approx(abs(losses[1] - losses[0]), rel=1e-4)
    # What an inverse magnifies turns on the last bit of each sum in the backward pass.
    assert 0.5 * error < found["gradient_error_fp16"] < 2 * error
    assert facts(tmp_path / "run", "addmm", module="trust")["gradient_error_fp16"] < 0.05


def normed(call=lambda body, x: body(x)):
    """A model that draws random numbers and keeps statistics."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.5)]
    body = nn.Sequential(*layers, nn.Linear(16, 4))
    return Wrapped(body, lambda body, batch: call(body, batch[1]))


def test_random_numbers_and_statistics_stay(tmp_path):
    plain, recorded = normed(), normed()
    torch.manual_seed(1)
    train(plain)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    train(recorded, tmp_path / "run")
    assert torch.equal(torch.rand(3), drawn)
    for a, b in zip(plain.state_dict().values(), recorded.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    found = facts(tmp_path / "run", "addmm", module="body.0")
    assert 1e-5 < found["gradient_error_fp16"] < found["gradient_error_bf16"] < 0.2


def test_of_a_large_step_only_the_whole_is_run_again(tmp_path, monkeypatch):
    runs = []
    effect = step_tape.StepReplay.effect
    monkeypatch.setattr(
        step_tape.StepReplay, "effect", lambda *a, **k: runs.append(a[1]) or effect(*a, **k)
    )
    monkeypatch.setattr(step_effects, "SMALL", 0)
    monkeypatch.setattr(step_effects, "RUNS", 0)
    train(Solved(), tmp_path / "run", steps=11)
    everything, again = runs  # in FP16 and in BF16
    assert everything == again
    assert len(everything) > 3


def test_rounding_keeps_what_leaves_the_range():
    x = torch.tensor([1e6, 1.0 + 2.0**-12, 1e-30, float("inf")])
    assert step_tape._round(x, "fp16", False).tolist() == [999936.0, 1.0, 0.0, float("inf")]
    tiny = step_tape._round(x, "fp16", True)[2]
    assert float(tiny) == pytest.approx(1e-30, rel=2.0**-11)
    assert torch.equal(step_tape._round(x, "bf16", False), x.bfloat16().float())


@torch.library.custom_op("mpdiag_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_autograd(lambda ctx, g: 2 * g)


def test_a_step_that_is_too_large_or_has_operations_of_others_says_nothing(tmp_path, monkeypatch):
    train(normed(lambda body, x: twice(body(x))), tmp_path / "foreign")
    monkeypatch.setattr(step_tape, "LARGEST", 100)
    train(Solved(), tmp_path / "large")
    for name in ("foreign", "large"):
        operations = open_run(tmp_path / name).operations()
        assert not any("gradient_error_fp16" in o.facts for o in operations)
