"""Sums in FP16: against sums by hand, and what they lose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support import wrapped
from torch import nn

from mpdiag.emulation.mode import Emulation
from mpdiag.plan import PrecisionPlan
from studies.fp16_sums import DEPTH, LowSums, in_trainers, product, total


def halves(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def test_a_sum_stalls_at_2048_where_fp32_goes_on():
    ones = torch.ones(1, 4096 * DEPTH).half()
    # Every instruction adds 16 · (1/16) = 1; an FP16 accumulator cannot count beyond 2048.
    assert product(ones, ones.t() / DEPTH).item() == 2048
    with Emulation():
        assert torch.mm(ones, ones.t() / DEPTH).item() == 4096


def test_short_sums_are_exact_as_before():
    a, b, c = halves(5, DEPTH), halves(DEPTH, 3, seed=1), halves(3, seed=2)
    assert torch.equal(product(a, b), (a.float() @ b.float()).half())
    assert torch.equal(product(c, a, b), (a.float() @ b.float()).half() + c)


def test_long_sums_by_hand():
    a, b = halves(2, 3, 2 * DEPTH), halves(2, 2 * DEPTH, 4, seed=1)
    first = (a[..., :DEPTH].float() @ b[:, :DEPTH].float()).half()
    second = a[..., DEPTH:].float() @ b[:, DEPTH:].float()
    assert torch.equal(product(a, b), (first.float() + second).half())


def test_the_trainer_accumulates_low_in_both_passes():
    def gradient():
        torch.manual_seed(0)
        model = nn.Linear(8, 1, bias=False)
        with wrapped(model, PrecisionPlan()) as trainer:
            with trainer.autocast():
                loss = model(torch.ones(4096 * DEPTH, 8)).sum() / DEPTH
            trainer.backward(loss)
            trainer.unscale()
            return model.weight.grad.clone()

    assert torch.equal(gradient(), torch.full((1, 8), 4096.0))
    with in_trainers():
        assert torch.equal(gradient(), torch.full((1, 8), 2048.0))
    assert torch.equal(gradient(), torch.full((1, 8), 4096.0))


def by_hand(values):
    """One after another, each sum rounded."""
    sum_ = np.float16(0)
    for value in values:
        sum_ = np.float16(np.float32(sum_) + np.float32(np.float16(value)))
    return float(sum_)


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_a_total_adds_one_after_another(shape, seed, data):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 100
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    found = total(x, tuple(sorted(dims)), keepdim=False)
    others = [d for d in range(x.dim()) if d not in dims]
    flat = x.permute(*others, *sorted(dims)).reshape(found.numel(), -1)
    assert found.shape == tuple(x.shape[d] for d in others)
    assert found.flatten().tolist() == [by_hand(row) for row in flat.numpy()]
    assert torch.equal(total(x, tuple(sorted(dims)), keepdim=True).reshape(found.shape), found)


def test_a_single_column_is_not_added_in_pairs():
    assert total(torch.ones(5000), (0,), keepdim=False).item() == 2048
    assert total(torch.full((4,), 60000.0), (0,), keepdim=False).item() == float("inf")


def test_reductions_stall_where_fp32_goes_on():
    ones = torch.ones(4, 4096)
    with LowSums():
        assert ones.sum().item() == 2048
        assert ones.sum(1).tolist() == [2048] * 4
        assert ones.mean(dim=1, keepdim=True).tolist() == [[0.5]] * 4
        assert ones.half().sum(1).dtype == torch.float16
        assert ones.long().sum().item() == 4 * 4096
        assert ones.double().sum().item() == 4 * 4096
        assert torch.softmax(ones, 1)[0, 0].item() == 1 / 2048
        assert torch.log_softmax(ones, 1)[0, 0].item() == pytest.approx(-np.log(2048))
    with Emulation():
        assert ones.sum().item() == 4 * 4096
        assert torch.softmax(ones, 1)[0, 0].item() == 1 / 4096


def test_short_reductions_are_as_before():
    """Few small integers add up exactly in FP16, so both must agree, backward passes included."""
    x = torch.randint(-3, 4, (4, 3, 2, 2), generator=torch.Generator().manual_seed(0)).float()
    forms = {
        "batch": lambda t: F.batch_norm(t, torch.zeros(3), torch.ones(3), training=True),
        "layer": lambda t: F.layer_norm(t, (3, 2, 2)),
        "group": lambda t: F.group_norm(t, 1),
        "variance": lambda t: torch.stack(torch.var_mean(t, dim=(0, 2), correction=0)),
        "sample": lambda t: torch.stack(torch.var_mean(t, dim=1, keepdim=True)),
        "all": lambda t: t.mean() * t.sum(),
        "softmax": lambda t: torch.softmax(t, 1),
        "log_softmax": lambda t: torch.log_softmax(t, 1),
    }
    for name, form in forms.items():
        results = []
        for low in (False, True):
            leaf = x.clone().requires_grad_()
            with (LowSums if low else Emulation)():
                out = form(leaf)
                (out * torch.arange(1, out.numel() + 1).view(out.shape)).sum().backward()
            results.append((out.detach(), leaf.grad))
        (out, gradient), (low_out, low_gradient) = results
        torch.testing.assert_close(low_out, out, rtol=4e-3, atol=4e-3, msg=name)
        scale = gradient.abs().max()
        torch.testing.assert_close(
            low_gradient / scale, gradient / scale, rtol=0, atol=1e-2, msg=name
        )
