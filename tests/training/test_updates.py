"""Steps of optimizers that evaluate a closure several times, and of sparse gradients."""

import copy

import pytest
import torch
from support import constant, wrapped
from torch import nn

import mpdiag
from mpdiag.numerics.loss_scalers import LogNormal


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_closure_that_is_not_finite_undoes_the_whole_step(level):
    model = nn.Linear(4, 1)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    mp = wrapped(model, constant(64.0), lbfgs, level=level)
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
    mp = wrapped(model, constant(), lbfgs, level=level, overrides=overrides)
    result, calls = evaluations_of(mp, model, lbfgs, 4.0)
    assert not result.skipped
    assert calls > 1
    assert mp.loss_scaler == start.adjust(4.0)
    assert result.next_scale == mp.loss_scale


def test_a_closure_that_leaves_no_gradient_is_refused():
    model = nn.Linear(2, 1)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)
    mp = wrapped(model, constant(), lbfgs)
    with pytest.raises(mpdiag.errors.UsageError, match="no gradient"):
        mp.step(closure=lambda: torch.ones((), requires_grad=True))


def test_the_norm_of_sparse_gradients():
    model = nn.Embedding(20, 4, sparse=True)
    mp = wrapped(model, constant(), torch.optim.SparseAdam(model.parameters(), 0.1))
    with mp.autocast():
        loss = model(torch.tensor([1, 3, 3])).sum()
    assert mp.step(loss, clip_norm=1.0).gradient_norm == pytest.approx((4 + 4 * 4) ** 0.5)
