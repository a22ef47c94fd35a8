"""Learning rates from which weights move, against torch's own steps."""

import pytest
import torch
from audited_trainings import BF16, model, train
from torch import nn

from mpdiag.recording.value_watch import half_distances, moving_rates

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_distances_are_where_rounding_turns(dtype):
    bits = torch.arange(0, 0x7B00, 7, dtype=torch.int16)
    weight = torch.cat((bits.view(DTYPES[dtype]), -bits.view(DTYPES[dtype])))
    for direction in (1.0, -1.0):
        update = torch.full(weight.shape, direction)
        half = half_distances(weight, update, dtype).double() * direction
        for factor, moves in ((0.999, False), (1.001, True)):
            moved = (weight.double() - half * factor).to(weight.dtype) != weight
            assert bool((moved == moves).all())


def still_at(make, settings, rate, steps=3):
    """The share of weights that torch's own step leaves where they are, at a learning rate."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = make(net.parameters(), lr=1e-3, **settings)
    for step in range(steps):
        before = net.weight.detach().clone()
        net.weight.grad = torch.randn(64, 64).bfloat16()
        if step == steps - 1:
            optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return float((net.weight == before).float().mean()), optimizer


@pytest.mark.parametrize(("make", "settings"), [
    (torch.optim.AdamW, {"weight_decay": 0.0}),
    (torch.optim.Adam, {"amsgrad": True, "betas": (0.8, 0.95)}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
])  # fmt: skip
def test_as_many_stand_still_below_a_rate_as_it_says(make, settings):
    _, optimizer = still_at(make, settings, 1e-6)
    rates = dict(moving_rates(optimizer))
    assert sorted(rates) == ["0.5", "0.99"]
    for share, rate in ((float(share), rate) for share, rate in rates.items()):
        still, _ = still_at(make, settings, rate)
        assert still == pytest.approx(1.0 - share, abs=0.03 if share == 0.5 else 0.006)


def test_nothing_is_said_of_what_is_not_known():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    for make in (torch.optim.Muon, Own):
        net = model(BF16)[:1]
        net.bias = None
        optimizer = make([net[0].weight], lr=0.1)
        net[0].weight.grad = torch.ones_like(net[0].weight)
        optimizer.step()
        assert list(moving_rates(optimizer)) == []
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert list(moving_rates(optimizer)) == []


def test_the_audit_says_at_which_rate_it_begins(tmp_path):
    net = model(BF16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    (finding,) = train(net, optimizer, tmp_path / "run").findings
    begins, half = (finding.evidence["rates"][share] for share in ("0.99", "0.5"))
    assert (
        f"1 % of the weights do not move below a learning rate of about {begins:.2g}"
        in finding.message
    )
    assert half < begins
