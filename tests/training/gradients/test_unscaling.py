"""Check and unscale in one pass: what torch's own operations give, to the last bit."""

from __future__ import annotations

import math

import pytest
import torch

from mpdiag.training.gradients import unscaling
from mpdiag.training.gradients.judgement import judge_gradients

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch):
    monkeypatch.setattr(unscaling, "WORTH", 1)
    monkeypatch.setattr(unscaling, "_PORTION", 5000)


def some_gradients():
    torch.manual_seed(0)
    sizes = (1, 7, 4096, 4097, 12_001, 0)
    found = [torch.randn(n) * 2.0**i for i, n in enumerate(sizes)]
    found.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    return found


@pytest.mark.parametrize("threads", [1, 3])
def test_one_pass_writes_and_finds_what_torch_does(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    ours, theirs = some_gradients(), some_gradients()
    found = unscaling.unscaled(ours, 1024.0)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(theirs))).item()
    assert found.norm.item() == pytest.approx(norm, rel=1e-6)
    assert found.absmax == max(g.abs().max().item() for g in theirs if g.numel())
    torch._foreach_mul_(theirs, 1 / 1024.0)
    assert all(map(torch.equal, ours, theirs))
    assert ours[0]._version > 0  # autograd knows that they were written


def test_the_norm_is_the_same_whichever_threads_read(monkeypatch):
    found = set()
    for threads in (2, 3, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        norm, absmax = unscaling.unscaled(some_gradients(), 8.0)
        found.add((norm.item(), absmax))
    assert len(found) == 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 4000, 4999])
def test_one_value_that_is_not_finite_is_found_and_all_are_given_back(bad, place):
    gradients = [torch.randn(100), torch.randn(5000)]
    gradients[1][place] = bad
    before = [g.clone() for g in gradients]
    judged = judge_gradients(gradients, carried=2.0**16, scale=2.0**16, device=CPU, absmax=True)
    assert not judged.finite
    assert not math.isfinite(judged.norm)
    assert not math.isfinite(judged.absmax)
    assert all(
        torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())
        for a, b in zip(gradients, before, strict=True)
    )


def test_squares_that_leave_fp32_are_refused_as_by_torch():
    gradients = [torch.full((10,), 1e20)]
    assert torch._foreach_norm(gradients)[0].isinf()
    judged = judge_gradients(gradients, carried=4.0, scale=4.0, device=CPU)
    assert (judged.finite, judged.norm) == (False, math.inf)
    assert torch.equal(gradients[0], torch.full((10,), 1e20))


def test_a_step_that_is_taken_leaves_gradients_unscaled_once():
    gradients = [torch.tensor([24.0, 0.0]), torch.tensor([[32.0]])]
    judged = judge_gradients(gradients, carried=8.0, scale=8.0, device=CPU, absmax=True)
    assert (judged.finite, judged.norm, judged.absmax) == (True, 5.0, 4.0)
    assert [g.tolist() for g in gradients] == [[3.0, 0.0], [[4.0]]]
    seen = []
    judge_gradients(gradients, carried=2.0, scale=2.0, device=CPU, inspect=seen.extend)
    assert seen[0].tolist() == [1.5, 0.0]


@pytest.mark.parametrize(
    ("gradients", "scale"),
    [
        ([torch.ones(8)], 3.0),  # not a power of two: what is given back would be rounded
        ([torch.ones(8)], 1.0),
        ([torch.ones(8)], 0.5),
        ([torch.ones(8)[::2]], 2.0),
        ([torch.ones(8, requires_grad=True)], 2.0),
        ([torch.ones(8, device="meta")], 2.0),
    ],
)
def test_what_the_pass_cannot_do_exactly_is_left_alone(gradients, scale):
    before = [g.clone() for g in gradients if not g.is_meta]
    assert unscaling.unscaled(gradients, scale) is None
    assert all(map(torch.equal, (g for g in gradients if not g.is_meta), before))


def test_where_numba_refuses_torch_does_it(monkeypatch):
    monkeypatch.setattr(unscaling, "_kernel", lambda: None)
    gradients = [torch.tensor([24.0, 32.0])]
    assert judge_gradients(gradients, carried=8.0, scale=8.0, device=CPU).norm == 5.0
    assert gradients[0].tolist() == [3.0, 4.0]


def test_few_gradients_do_not_import_numba(monkeypatch):
    monkeypatch.setattr(unscaling, "WORTH", 1 << 20)
    monkeypatch.setattr(unscaling, "_kernel", lambda: pytest.fail("not worth it"))
    assert unscaling.unscaled([torch.ones(100)], 2.0) is None
