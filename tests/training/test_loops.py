"""What training loops really do, each with the real construct, against FP32 done plainly."""

from __future__ import annotations

import copy

import pytest
import torch
from support import backoff, batch, constant, network
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.numerics.loss_scalers import Backoff, LogNormal

LEVELS = ["O1", "O2"]


def wrap(model, optimizer, plan=None, **options):
    return mpdiag.MixedPrecision(model, optimizer, plan or constant(), **options)


def close(model, other, tolerance=2e-3):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", LEVELS)
def test_accumulated_micro_batches_are_one_step(level):
    x, y = batch(size=8)
    model, whole = network().eval(), network().eval()
    mp = wrap(model, torch.optim.SGD(model.parameters(), 0.1), level=level)
    sgd = torch.optim.SGD(whole.parameters(), 0.1)
    for _ in range(3):
        for part in range(4):
            with mp.autocast():
                rows = slice(2 * part, 2 * part + 2)
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) / 4
            mp.backward(loss)
        mp.step()
        sgd.zero_grad()
        nn.functional.cross_entropy(whole(x), y).backward()
        sgd.step()
    mp.close()
    close(model, whole)


@pytest.mark.parametrize("level", LEVELS)
def test_a_gan_with_two_models_optimizers_and_losses(level):
    def build():
        torch.manual_seed(0)
        g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        d = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        return g, d, torch.optim.Adam(g.parameters(), 1e-3), torch.optim.Adam(d.parameters(), 1e-3)

    bce = nn.functional.binary_cross_entropy_with_logits
    g, d, opt_g, opt_d = build()
    mp = wrap([g, d], [opt_g, opt_d], backoff(256.0, growth_interval=2), level=level)
    pg, pd, plain_g, plain_d = build()
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        real, noise = torch.randn(8, 8, generator=draw), torch.randn(8, 4, generator=draw)
        opt_d.zero_grad()
        with mp.autocast():
            fake = d(g(noise).detach())
            truth = d(real)
            loss = bce(truth.float(), torch.ones(8, 1)) + bce(fake.float(), torch.zeros(8, 1))
        assert not mp.step(loss, optimizer=opt_d).skipped
        with mp.autocast():
            loss = bce(d(g(noise)).float(), torch.ones(8, 1))
        assert not mp.step(loss, optimizer=opt_g).skipped

        plain_d.zero_grad()
        loss = bce(pd(real), torch.ones(8, 1)) + bce(pd(pg(noise).detach()), torch.zeros(8, 1))
        loss.backward()
        plain_d.step()
        plain_g.zero_grad()
        bce(pd(pg(noise)), torch.ones(8, 1)).backward()
        plain_g.step()
    mp.close()
    close(g, pg, 4e-3)
    close(d, pd, 4e-3)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_lbfgs_evaluates_a_closure_several_times(level):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    mp = wrap(model, lbfgs, constant(64.0), level=level)
    x = torch.randn(32, 4)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]])

    def closure():
        with mp.autocast():
            return nn.functional.mse_loss(model(x), y)

    losses = [mp.step(closure=closure).loss for _ in range(6)]
    assert losses[-1] < (1e-6 if level == "O0" else 1e-2) * losses[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_closure_that_is_not_finite_undoes_the_whole_step(level):
    model = nn.Linear(4, 1)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    mp = wrap(model, lbfgs, constant(64.0), level=level)
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    calls = []

    def closure():
        with mp.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        calls.append(loss)
        return loss * (float("nan") if len(calls) == 2 else 1.0)

    before = copy.deepcopy(mp.fp32_state_dict())
    result = mp.step(closure=closure)
    assert result.skipped
    assert len(calls) == 2
    assert all(torch.equal(a, before[n]) for n, a in mp.fp32_state_dict().items())
    assert not lbfgs.state[lbfgs.param_groups[0]["params"][0]]
    assert not mp.step(closure=closure).skipped


def evaluations_of(mp, model, lbfgs, size):
    """One step whose gradient of ``w`` is ``size`` in the first evaluation, and 0 afterwards."""
    calls = []

    def closure():
        calls.append(None)
        with mp.autocast():
            return (model.weight * (size if len(calls) == 1 else 0.0)).sum()

    return mp.step(optimizer=lbfgs, closure=closure), len(calls)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lognormal_learns_the_largest_gradient_of_all_evaluations(level):
    model = nn.Linear(1, 1, bias=False)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)
    start = LogNormal(init_scale=8.0)
    overrides = mpdiag.PrecisionOverrides(loss_scale=start)
    mp = wrap(model, lbfgs, level=level, overrides=overrides)
    result, calls = evaluations_of(mp, model, lbfgs, 4.0)
    assert not result.skipped
    assert calls > 1
    assert mp.loss_scaler == start.adjust(4.0)
    assert result.next_scale == mp.loss_scale


def test_scalers_that_need_no_maximum_are_told_zero_under_closures():
    model = nn.Linear(1, 1, bias=False)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)
    mp = wrap(model, lbfgs, backoff(8.0, growth_interval=2))
    evaluations_of(mp, model, lbfgs, 4.0)
    assert mp.loss_scaler == Backoff(8.0, growth_interval=2).adjust(0.0)


def test_a_closure_that_leaves_no_gradient_is_refused():
    model = nn.Linear(2, 1)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)
    mp = wrap(model, lbfgs)
    with pytest.raises(mpdiag.errors.UsageError, match="no gradient"):
        mp.step(closure=lambda: torch.ones((), requires_grad=True))


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_penalty_differentiates_twice(level):
    """apex#654."""

    def loss_of(model, x):
        x = x.clone().requires_grad_()
        score = model(x).float().sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score + ((slope.float().norm(dim=1) - 1) ** 2).mean()

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    model, plain = build(), build()
    mp = wrap(model, torch.optim.SGD(model.parameters(), 0.05), constant(64.0), level=level)
    sgd = torch.optim.SGD(plain.parameters(), 0.05)
    x = torch.randn(16, 4)
    for _ in range(3):
        with mp.autocast():
            loss = loss_of(model, x)
        assert not mp.step(loss).skipped
        sgd.zero_grad()
        loss_of(plain, x).backward()
        sgd.step()
    mp.close()
    close(model, plain, 5e-3)


class Square(torch.autograd.Function):
    """An operation with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert gradient.dtype == x.dtype
        return 2 * x * gradient


@pytest.mark.parametrize("level", LEVELS)
def test_custom_functions_see_one_dtype(level):
    """pytorch#87979."""
    model = nn.Linear(4, 4)
    mp = wrap(model, torch.optim.SGD(model.parameters(), 0.1), level=level)
    with mp.autocast():
        loss = Square.apply(model(torch.ones(2, 4))).float().mean()
    assert not mp.step(loss).skipped


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_activation_checkpointing_changes_nothing(level, reentrant):
    def final(checkpointed):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 16), nn.Softmax(1), nn.LayerNorm(16))
        head = nn.Linear(16, 1)
        model = nn.ModuleList([body, head])
        mp = wrap([body, head], torch.optim.SGD(model.parameters(), 0.1), level=level)
        for _ in range(3):
            x = torch.ones(2, 4, requires_grad=True)
            with mp.autocast():
                h = checkpoint(body, x, use_reentrant=reentrant) if checkpointed else body(x)
                loss = head(h).float().mean()
            mp.step(loss)
        mp.close()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(final(True), final(False), strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_an_average_of_weights_by_deepcopy(level):
    model = network()
    mp = wrap(model, torch.optim.SGD(model.parameters(), 0.1), level=level)
    average = torch.optim.swa_utils.AveragedModel(model)
    x, y = batch()
    with mp.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    mp.step(loss)
    average.update_parameters(model)
    with mp.autocast():
        assert average(x).shape == (8, 10)


def test_a_scheduler_follows_the_steps_taken():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    mp = wrap(model, sgd)
    x, y = batch()
    for i in range(3):
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if i == 1 else 1.0)
        if not mp.step(loss).skipped:
            scheduler.step()
    assert sgd.param_groups[0]["lr"] == 0.1 * 0.25


def test_sparse_gradients():
    model = nn.Embedding(20, 4, sparse=True)
    before = model.weight.detach().clone()
    mp = wrap(model, torch.optim.SparseAdam(model.parameters(), 0.1))
    index = torch.tensor([1, 3, 3])
    with mp.autocast():
        loss = model(index).sum()
    result = mp.step(loss, clip_norm=1.0)
    assert result.gradient_norm == pytest.approx((4 + 4 * 4) ** 0.5)
    moved = (model.weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == [1, 3]
    with mp.autocast():
        loss = model(index).sum() * float("nan")
    assert mp.step(loss).skipped


@pytest.mark.parametrize("level", LEVELS)
def test_parameter_groups_added_later(level):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    sgd = torch.optim.SGD(model["a"].parameters(), 0.1)
    mp = wrap(model, sgd, level=level)

    def forward():
        return model["b"](model["a"](torch.ones(2, 4).to(model["a"].weight.dtype)))

    def take():
        with mp.autocast():
            return mp.step(forward().float().square().sum())

    before = model["b"].weight.detach().clone()
    take()
    assert torch.equal(model["b"].weight, before)
    sgd.add_param_group({"params": list(model["b"].parameters()), "lr": 0.2})
    take()
    assert not torch.equal(model["b"].weight, before)
    mp.close()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(isinstance(p, nn.Parameter) for g in sgd.param_groups for p in g["params"])


@pytest.mark.parametrize("level", LEVELS)
def test_frozen_parameters_stay(level):
    model = network()
    for p in model[0].parameters():
        p.requires_grad_(False)
    before = model[0].weight.detach().clone()
    mp = wrap(model, torch.optim.Adam(model.parameters(), 0.1), level=level)
    x, y = batch()
    for _ in range(2):
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        assert not mp.step(loss).skipped
    mp.close()
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("level", LEVELS)
def test_tied_weights_are_one(level):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, index):
            return self.head(self.embedding(index))

    model = Tied()
    mp = wrap(model, torch.optim.Adam(model.parameters(), 0.1), level=level)
    index = torch.arange(10)
    for _ in range(2):
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(index).float(), index)
        mp.step(loss)
    assert model.head.weight is model.embedding.weight
    mp.close()
    assert model.head.weight is model.embedding.weight


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of its own
def test_a_compiled_model_on_the_native_backend():
    model = network()
    compiled = torch.compile(model, backend="aot_eager")
    mp = wrap(
        compiled,
        torch.optim.SGD(model.parameters(), 0.1),
        overrides=mpdiag.PrecisionOverrides(dtype="bf16"),
    )
    plain = network()
    reference = wrap(
        plain,
        torch.optim.SGD(plain.parameters(), 0.1),
        overrides=mpdiag.PrecisionOverrides(dtype="bf16"),
    )
    x, y = batch()
    for _ in range(2):
        for one, trainer in ((compiled, mp), (plain, reference)):
            with trainer.autocast():
                loss = nn.functional.cross_entropy(one(x), y)
            assert not trainer.step(loss).skipped
    close(model, plain)
    mp.close()
    with pytest.raises(mpdiag.errors.UsageError, match="compiled"):
        wrap(
            compiled,
            torch.optim.SGD(model.parameters(), 0.1),
            overrides=mpdiag.PrecisionOverrides(dtype="fp16"),
        )


def test_training_with_dropout_is_repeatable():
    def losses():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1))
        mp = wrap(model, torch.optim.SGD(model.parameters(), 0.1))
        found = []
        for _ in range(3):
            with mp.autocast():
                loss = model(torch.ones(4, 4)).float().mean()
            found.append(mp.step(loss).loss)
        return found

    assert losses() == losses()


def test_evaluation_inside_and_outside_autocast():
    model = network()
    mp = wrap(model, torch.optim.SGD(model.parameters(), 0.1), level="O2")
    x, _ = batch()
    model.eval()
    before = model[1].running_mean.clone()
    with torch.no_grad():
        inside = None
        with mp.autocast():
            inside = model(x)
        outside = model(x)
    assert inside.dtype == outside.dtype == torch.float32
    torch.testing.assert_close(inside, outside, rtol=1e-2, atol=1e-2)
    assert torch.equal(model[1].running_mean, before)
