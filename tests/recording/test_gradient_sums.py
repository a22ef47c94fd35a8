"""Sums of half-precision gradients, against the same training without a recorder, added in FP64."""

import pytest
import torch
from audited_trainings import BF16, FP32, model

import mpdiag

STEPS, MICRO = 4, 8


def batches(dtype):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS * MICRO):
        yield torch.randn(12, 8, generator=generator).to(dtype)


def train(net, optimizer, between=lambda _: None, clear=lambda o: o.zero_grad()):
    """Train; ``between`` runs after each backward pass."""
    data = batches(net[0].weight.dtype)
    for _ in range(STEPS):
        for _ in range(MICRO):
            net(next(data)).float().square().mean().backward()
            between(net)
        optimizer.step()
        clear(optimizer)
    return net


def made(dtype=BF16):
    net = model(dtype)
    return net, torch.optim.SGD(net.parameters(), lr=0.01)


def recorded(folder, dtype=BF16, **how):
    net, optimizer = made(dtype)
    with mpdiag.record(net, optimizer, folder, operations=0):
        train(net, optimizer, **how)
    return net, mpdiag.audit(folder)


def by_hand():
    """The relative error of the last step's sums after each backward pass, over all parameters."""
    net, optimizer = made()
    exact, off = {}, []
    for name, p in net.named_parameters():
        p.register_hook(lambda g, n=name: exact.update({n: exact.get(n, 0) + g.double()}))

    def compare(net):
        pairs = [(p.grad.double(), exact[n]) for n, p in net.named_parameters()]
        error = sum(float((a - b).square().sum()) for a, b in pairs)
        off.append((error / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)

    def clear(optimizer):
        optimizer.zero_grad()
        exact.clear()

    return train(net, optimizer, compare, clear), off[-MICRO:]


@pytest.mark.parametrize("keep", [False, True], ids=["freed", "zeroed"])
def test_a_sums_error_is_that_of_the_training_and_changes_no_bit(tmp_path, keep):
    net, found = recorded(tmp_path / "run", clear=lambda o: o.zero_grad(set_to_none=not keep))
    plain, off = by_hand()
    seen = {one.count: one.size for one in found.facts.observed if one.kind == "gradient-sum"}
    assert seen == pytest.approx(dict(enumerate(off, 1)), rel=1e-4, abs=1e-9)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    (finding,) = (f for f in found.findings if f.code == "precision-narrow-sum")
    assert "over 8 micro-batches" in finding.message
    assert finding.evidence["stops_growing"] == 256


def test_gradients_that_the_script_adds_in_fp32_are_no_narrow_sum(tmp_path):
    sums = {}

    def move(net):
        for p in net.parameters():
            sums[p] = sums.get(p, 0) + p.grad.float()
            p.grad = None

    def clear(optimizer):
        sums.clear()

    def back(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = sums[p].to(p.dtype)

    net, optimizer = made()
    optimizer.register_step_pre_hook(back)
    with mpdiag.record(net, optimizer, tmp_path / "run", operations=0):
        train(net, optimizer, move, lambda o: (o.zero_grad(), clear(o)))
    found = mpdiag.audit(tmp_path / "run")
    assert found.facts.accumulating
    assert "precision-narrow-sum" not in {f.code for f in found.findings}


def test_what_a_loop_does_to_a_sum_meanwhile_is_no_error_of_it(tmp_path):
    def halve(net):
        for p in net.parameters():
            p.grad.mul_(0.5)

    _, found = recorded(tmp_path / "run", between=halve)
    sizes = [one.size for one in found.facts.observed if one.kind == "gradient-sum"]
    assert max(sizes) < 2**-8  # one addition's rounding: each sum begins with what was there


def test_fp32_gradients_are_left_alone(tmp_path):
    assert not recorded(tmp_path / "run", FP32)[1].facts.observed
