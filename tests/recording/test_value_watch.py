"""States in half precision that a step leaves as they were."""

import pytest
import torch
from recorded_steps import record_steps
from torch import nn

import mpdiag
from mpdiag.recording.state_shadow import LEAST, hold_bf16_numbers


class Shampoo(torch.optim.Optimizer):
    """After Gupta et al. 2018, algorithm 1, with the roots left out: the factors are what counts."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                left = state.setdefault("precond_0", torch.zeros(len(p), len(p), dtype=p.dtype))
                left.add_(p.grad @ p.grad.T)
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_factors_that_stay_are_measured(tmp_path, dtype):
    torch.manual_seed(0)
    net = nn.Linear(8, 16, bias=False).to(dtype)
    optimizer = Shampoo(net.parameters(), lr=1e-2)
    with mpdiag.record(net, optimizer, tmp_path / "run", operations=0, every=50):
        always = torch.randn(16, 8)
        for _ in range(601):
            (net.weight * (always + torch.randn(16, 8) / 8).to(dtype)).sum().backward()
            before = {k: v.clone() for k, v in optimizer.state[net.weight].items()}
            optimizer.step()
            optimizer.zero_grad()
    found = mpdiag.audit(tmp_path / "run")
    stuck = [f for f in found.findings if f.code == "precision-stuck-state"]
    after = optimizer.state[net.weight]["precond_0"]
    share = float((after == before["precond_0"]).float().mean())
    if dtype == torch.float32:
        assert not stuck
    else:
        (observed,) = (one for one in found.facts.observed if one.kind == "still-state")
        assert observed.size == pytest.approx(share, abs=1e-6)
        assert [f.severity for f in stuck] == ["info"]
        assert "did not change in" in stuck[0].message


class Momentum(torch.optim.Optimizer):
    """Rounds the last of its states to BF16 from step 25 on, after the dense beginning."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for p in group["params"]:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p))
            moment.mul_(0.9).add_(p.grad)
            if p is group["params"][-1] and self.steps >= 25:
                moment.copy_(moment.bfloat16())
            p.sub_(moment, alpha=group["lr"])
        self.steps += 1


def test_states_take_turns_and_a_late_narrow_one_is_seen(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(12)))
    loss = lambda net, _: net(torch.randn(16, 16)).square().sum()  # noqa: E731
    record_steps(tmp_path / "run", net, loss, 35, Momentum, 1e-2, operations=0, every=1)
    observed = mpdiag.audit(tmp_path / "run").facts.observed
    (one,) = (one for one in observed if one.kind == "narrow-values")
    assert one.names == ("Momentum.moment", "11.weight")
    assert 25 <= one.first <= 27 < one.last


def test_rows_hold_bf16_numbers_if_enough_of_them_are_not_zero():
    torch.manual_seed(0)
    wide = torch.randn(4, 256)
    narrow = wide.bfloat16().float()
    few = torch.where(torch.arange(256) < LEAST - 1, narrow, -0.0)
    enough = torch.where(torch.arange(256) < LEAST, narrow, 0.0)
    one_off = narrow.clone()
    one_off[:, 7] = 1.0 + 2.0**-23
    for rows, expected in ((wide, 0), (narrow, 1), (few, 0), (enough, 1), (one_off, 0)):
        assert hold_bf16_numbers(rows).tolist() == [bool(expected)] * 4
    assert not hold_bf16_numbers(narrow.bfloat16()).any()
