"""Levels: what each would take; reductions: in which dtype ranks can sum."""

from __future__ import annotations

import made_runs as hand
import numpy as np
import pytest
import torch
from support import batch, network
from torch import nn

import mpdiag
from mpdiag.analysis.format_advice import choose_reduction
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.run_statistics import RunStatistics
from mpdiag.analysis.weight_updates import activations_per_step
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.histograms import ExponentHistogram, stack


def record(folder, optimizer):
    model = network()
    made = optimizer(model.parameters())
    with mpdiag.record(model, made, folder, every=1):
        for i in range(3):
            x, y = batch(i)
            made.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            made.step()
    return model


def test_activations_are_those_of_modules_without_children(tmp_path):
    record(tmp_path / "run", torch.optim.Adam)
    run = mpdiag.open_run(tmp_path / "run")
    # Convolution and batch norm, whose output the ReLU's replaces and flattening shares; linear.
    expected = 8 * (2 * 4 * 36 + 10)
    assert activations_per_step(run, RunStatistics.of(run.records)) == expected


def residual(in_place: bool) -> nn.Module:
    """A convolution, batch norm and ReLU, three times, and a linear layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(in_place)]
    return nn.Sequential(*layers, nn.Identity(), nn.Flatten(), nn.Linear(16 * 64, 10))


@pytest.mark.parametrize("in_place", [False, True])
def test_the_estimate_is_about_what_autograd_keeps(tmp_path, in_place):
    model = residual(in_place)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(4, 3, 8, 8)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            held, kept = kept, {}
    for parameter in model.parameters():
        held.pop(parameter.data_ptr(), None)
    run = mpdiag.open_run(tmp_path / "run")
    estimated = 4 * activations_per_step(run, RunStatistics.of(run.records))
    assert sum(held.values()) == pytest.approx(estimated, rel=0.1)


def test_activations_are_those_of_one_device(tmp_path):
    """Each of two ranks keeps its own part of the batch, and no other's."""
    alone, both = (
        mpdiag.open_run(hand.write_run(tmp_path / str(ranks), world_size=ranks)) for ranks in (1, 2)
    )
    held = activations_per_step(both, RunStatistics.of(both.records))
    assert held == activations_per_step(alone, RunStatistics.of(alone.records)) > 0
    assert held == activations_per_step(both, RunStatistics(both.pieces))


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (torch.optim.Adam, 2),
        (lambda p: torch.optim.SGD(p, 0.1), 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1),
    ],
)
def test_the_baseline_counts_weights_gradients_states_and_activations(tmp_path, optimizer, states):
    model = record(tmp_path / "run", optimizer)
    levels = {a.level: a for a in mpdiag.analyze(tmp_path / "run").plan.levels}
    weights = sum(p.numel() for p in model.parameters())
    activations = 8 * (2 * 4 * 36 + 10)
    assert levels["O0"].memory_bytes == 4 * (weights * (2 + states) + activations)
    assert levels["O0"].batch_factor == 1.0
    # Activations take half, and a copy of the weights in FP16 is to be paid from that.
    assert levels["O1"].batch_factor == round(2 - weights / activations, 2) > 1


def test_the_levels_come_in_the_order_to_try_them(tmp_path):
    record(tmp_path / "run", torch.optim.Adam)
    plan = mpdiag.analyze(tmp_path / "run").plan
    assert [a.level for a in plan.levels] == ["O0", "O1", "O2", "O3"]
    assert plan.level == "O1"
    assert all(a.reason for a in plan.levels)


@pytest.mark.parametrize(("momentum", "possible"), [(0.0, True), (0.9, False)])
def test_an_optimizers_own_state_in_fp16_is_not_judged(tmp_path, momentum, possible):
    record(tmp_path / "run", lambda p: torch.optim.SGD(p, 0.1, momentum=momentum))
    plan = mpdiag.analyze(tmp_path / "run").plan
    assert not plan.master_weights.needed
    assert plan.levels[3].possible == possible


def gradients(*values):
    histogram = ExponentHistogram.of(np.array(values, np.float32))
    one = stack([histogram])
    names = np.array(["w"], object)
    return Layers(np.array(["weight_grad"], object), names, one, np.array([1]))


def exact(values, scale, ranks, divide):
    """What FP16 really gives for equal ranks: infinite, or the share of Σ|g| that is lost."""
    parts = torch.tensor(values) * scale / (ranks if divide else 1)
    total = parts.half() * ranks
    lost = (parts.half() == 0).float() @ parts.abs() / parts.abs().sum()
    return bool(torch.isinf(total).any()), float(lost)


@pytest.mark.parametrize(
    ("values", "scale", "ranks", "dtype", "divided"),
    [
        ((1.0, 0.5), 1.0, 8, "fp16", False),
        ((1000.0, 1.0), 8.0, 64, "fp16", True),
        ((60000.0, 1.0), 1.0, 2, "fp32", False),
        ((1000.0, *[2.0**-20] * 2000000), 8.0, 2**14, "fp32", False),
    ],
)
def test_the_reduction_fits_the_recorded_maximum_times_the_ranks(
    values, scale, ranks, dtype, divided
):
    plan = choose_reduction(gradients(*values), scale, ranks)
    assert (plan.dtype, plan.pre_divide) == (dtype, divided)
    if dtype == "fp16":
        overflow, lost = exact(values, scale, ranks, divided)
        assert not overflow
        assert lost < 0.001


def test_one_rank_reduces_nothing():
    assert choose_reduction(gradients(1.0), 1.0, 1) is None
    assert FP16.max == 65504
