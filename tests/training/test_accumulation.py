"""Sums in FP16: against sums by hand, and what they lose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpdiag.errors import UsageError
from mpdiag.plan import PrecisionPlan
from mpdiag.training.accumulation import DEPTH, product
from mpdiag.training.emulation import Emulation
from mpdiag.training.trainer import MixedPrecision


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
    def gradient(**options):
        torch.manual_seed(0)
        model = nn.Linear(8, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with MixedPrecision(model, optimizer, PrecisionPlan(), **options) as trainer:
            with trainer.autocast():
                loss = model(torch.ones(4096 * DEPTH, 8)).sum() / DEPTH
            trainer.backward(loss)
            trainer.unscale()
            return model.weight.grad.clone()

    assert torch.equal(gradient(), torch.full((1, 8), 4096.0))
    assert torch.equal(gradient(fp16_accumulation=True), torch.full((1, 8), 2048.0))


def test_only_an_emulation_can():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match="emulated"):
        MixedPrecision(model, optimizer, PrecisionPlan(), dtype="bf16", fp16_accumulation=True)
