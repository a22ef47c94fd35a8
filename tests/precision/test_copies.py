"""Copies of weights that part: over ranks, and averages that half precision keeps where they are."""

import copy

import numpy as np
import pytest
import torch
from audited_trainings import BF16, FP32, Masters, model

import mpdiag
from mpdiag.precision.copies import copies_over_ranks
from mpdiag.runs.operations import Operation, TensorRecord
from mpdiag.runs.precision import ParameterPrecision

LOOSE = {"reduced": "no DDP or FSDP holds it: the script reduces it, or nothing does"}


def tensor(values, parameter=""):
    values = np.asarray(values, np.float32)
    extremes = {"absmax": float(np.abs(values).max()), "absmin": float(np.abs(values).min())}
    shape, dtype = values.shape, "float32"
    return TensorRecord("", 0, -1, parameter, shape, dtype, True, **extremes)


def multiplied(rank, x, scale, op="mul"):
    place = {"file": "net.py", "line": 3, "code": "", "function": "", "node": "", "forward": -1}
    inputs = (tensor(x), tensor(scale, "scale"))
    return Operation(4, rank, 0, op, "Tensor", "forward", "net", **place, inputs=inputs)


X = np.random.default_rng(0).normal(size=(8, 16))
SCALE = np.random.default_rng(1).normal(size=16)


@pytest.mark.parametrize(
    ("x", "scale", "op", "unknown", "said"),
    [
        (X, SCALE + 0.1, "mul", LOOSE, True),
        (X, SCALE, "mul", LOOSE, False),
        (X + 1, SCALE + 0.1, "mul", LOOSE, False),  # channels, or samples, of its own
        (X, SCALE + 0.1, "mm", LOOSE, False),  # its part of a matrix
        (X, SCALE + 0.1, "mul", {}, False),  # a wrapper keeps the copies equal
        (X[:1], SCALE + 0.1, "mul", LOOSE, False),  # too little to tell
        (X.T[:, :, None], SCALE + 0.1, "mul", LOOSE, False),  # one for each head, not each channel
    ],
)
def test_what_ranks_apply_to_the_same_channels_is_a_copy(x, scale, op, unknown, said):
    first = X if x.shape == X.shape else x
    operations = [multiplied(0, first, SCALE, op), multiplied(1, x, scale, op)]
    parameter = ParameterPrecision("scale", 16, True, "SGD", "float32", unknown=unknown)
    found = list(copies_over_ranks(operations, [parameter]))
    assert [f.evidence["parameters"] for f in found] == [["scale"]] * said
    assert list(copies_over_ranks(operations[:1], [parameter])) == []


def moves(average, net):
    for mean, p in zip(average.parameters(), net.parameters(), strict=True):
        mean.sub_(1e-3 * (mean - p.to(mean.dtype)))


def copies(average, net):
    for mean, p in zip(average.parameters(), net.parameters(), strict=True):
        mean.copy_(p)


def nothing(average, net):
    del average, net


class Wide:
    """Averages in FP32, and writes a half-precision copy of the average."""

    def __init__(self, net):
        self.wide = copy.deepcopy(net).float().requires_grad_(False)

    def __call__(self, average, net):
        moves(self.wide, net)
        copies(average, self.wide)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("dtype", "update", "said"),
    [
        (BF16, moves, True),
        (FP32, moves, False),
        (BF16, copies, False),
        (BF16, nothing, False),
        (BF16, Wide, False),
    ],
)
def test_an_average_that_does_not_follow_is_seen(dtype, update, said, late, tmp_path):
    net = model(BF16)
    average = copy.deepcopy(net).to(dtype).requires_grad_(False)
    update = update(net) if isinstance(update, type) else update
    optimizer = Masters(net.parameters(), lr=1e-2)
    with mpdiag.record(net, optimizer, tmp_path / "run", every=1, operations=0) as recorder:
        for _ in range(4):
            with torch.no_grad():
                if late:
                    update(average, net)
            net(torch.randn(12, 8, dtype=BF16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                if not late:
                    update(average, net)
    assert recorder.failures == []
    found = mpdiag.audit(tmp_path / "run").findings
    assert [f.code for f in found] == ["precision-average-still"] * said
