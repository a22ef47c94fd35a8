"""A skip undoes what the step did to buffers, whoever wrote it, and nothing else."""

from contextlib import nullcontext

import pytest
import torch
from conformance.models import same
from support import constant, wrapped
from torch import nn
from torch.optim.swa_utils import update_bn

import mpdiag

INF = float("inf")


class HandWritten(nn.Module):
    """Batch norm on buffers of the model's own, whose kernel raises no version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("m", torch.zeros(4))
        self.register_buffer("v", torch.ones(4))
        self.register_buffer("through_data", torch.zeros(4))
        self.register_buffer("foreach", torch.zeros(4))
        self.register_buffer("late", None)
        self.register_buffer("mask", torch.full((4,), -INF))
        self.register_buffer("wide", torch.zeros(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        with torch.no_grad():
            mean = y.detach().float().mean(0)
            self.through_data.data.add_(mean)
            torch._foreach_add_([self.foreach], [mean])
            self.late = mean
            if not hasattr(self, "made"):
                self.register_buffer("made", mean.clone())
        y = nn.functional.batch_norm(y.float(), self.m, self.v, training=self.training)
        return (y + self.mask.exp() + self.wide).square().mean()


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def take(mp, model, x):
    with mp.autocast():
        loss = model(x).float().square().mean()
    return mp.step(loss)


def held(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_rolled_back(mp, model, x, part=None):
    """A step of such a batch is skipped, and leaves the model's buffers as they were."""
    before = held(model)
    assert take(mp, part or model, x).skipped
    assert same(before, held(model))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_skip_restores_buffers_that_code_of_the_model_changes(level):
    torch.manual_seed(0)
    model = HandWritten()
    mp = wrapped(model, level=level)
    bad = overflowing()
    assert_rolled_back(mp, model, bad)
    assert model.late is None
    assert not take(mp, model, torch.randn(8, 4)).skipped
    assert_rolled_back(mp, model, bad)


def test_buffers_that_were_never_finite_skip_nothing():
    torch.manual_seed(0)
    model = HandWritten()
    model.mask[0] = float("nan")
    model.forward = lambda x: model.body(x).square().mean()
    mp = wrapped(model)
    assert not any(take(mp, model, torch.randn(8, 4)).skipped for _ in range(3))
    model.forward = lambda x: (model.m.data.fill_(INF), model.body(x).square().mean())[1]
    result = take(mp, model, torch.randn(8, 4))
    assert (result.skipped, result.at_any_scale) == (True, True)
    assert (result.first.where, result.first.name) == ("buffers", "m")
    assert torch.equal(model.m, torch.zeros(4))


def overflowing():
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    x[0, 0] = INF
    return x


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_script_changed_on_purpose_is_not_rolled_back(inside):
    model = normed()
    mp = wrapped(model)
    take(mp, model, torch.randn(8, 4))
    with mp.autocast() if inside else nullcontext():
        update_bn([torch.randn(8, 4) for _ in range(3)], model)
    assert_rolled_back(mp, model, overflowing())
    model.load_state_dict({n: t + 1 for n, t in model.state_dict().items()})
    assert_rolled_back(mp, model, overflowing())
    model.eval()  # a frozen batch norm, whose statistics the script sets
    model[1].running_mean.data.fill_(3.0)
    assert_rolled_back(mp, model, overflowing())


def test_an_abandoned_step_is_no_part_of_the_next():
    model = normed()
    mp = wrapped(model)
    with mp.autocast():
        loss = model(torch.randn(8, 4)).float().square().mean()
    mp.backward(loss)
    model.zero_grad()
    with torch.no_grad():
        model[1].running_mean.fill_(3.0)
    assert_rolled_back(mp, model, overflowing())


def test_a_pass_without_gradients_inside_a_step_is_undone_with_it():
    """A generator's batch norm, while its discriminator is trained."""
    generator = normed()
    critic = nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic)]
    mp = mpdiag.MixedPrecision([generator, critic], optimizers, constant(2.0))
    before = held(generator)
    with mp.autocast():
        with torch.no_grad():
            fake = generator(torch.randn(8, 4))
        loss = critic(fake).float().mean() * INF
    assert mp.step(loss, optimizer=optimizers[1]).skipped
    assert same(before, held(generator))


def test_a_part_of_a_model_called_by_itself_is_guarded():
    model = nn.ModuleDict({"encoder": normed()})
    mp = wrapped(model)
    assert_rolled_back(mp, model, overflowing(), model["encoder"])


def test_a_restored_buffer_that_did_not_change_keeps_graphs_alive():
    model = HandWritten()
    mp = wrapped(model)
    mask = torch.ones(4)
    model.register_buffer("kept", mask)
    w = torch.ones(4, requires_grad=True)
    product = (w * model.kept).sum()
    assert take(mp, model, overflowing()).skipped
    product.backward()
    assert torch.equal(w.grad, mask)
