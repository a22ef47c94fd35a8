"""One set of sizes for a model: the cases in which padding each size alone was refused by torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.analysis.shapes.advice import advise_shapes, shape_findings, solve_run
from mpdiag.analysis.shapes.recorded import from_operations
from mpdiag.analysis.shapes.solution import Wanted


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(36, 36, 3, groups=3)

    def forward(self, x):
        return self.conv(x)


class Attention(nn.Module):
    """Nine values a head in functional attention, packed and split by the script."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Linear(45, 135)
        self.out = nn.Linear(45, 45)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 5, c // 5).transpose(1, 2) for y in self.packed(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(b, t, c))


def recorded(model, x, folder):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, folder):
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).square().mean().backward()
        optimizer.step()
    return mpdiag.open_run(folder)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    return recorded(Grouped(), torch.randn(2, 36, 8, 8), tmp_path_factory.mktemp("g") / "run")


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    return recorded(Attention(), torch.randn(4, 6, 45), tmp_path_factory.mktemp("a") / "run")


def sizes(advice):
    return {(a.module, a.dimension): a.padded for a in advice if a.module}


def test_groups_are_padded_each(grouped):
    advice = advise_shapes(grouped, "fp16")
    assert sizes(advice) == {("conv", "in_channels"): 48, ("conv", "out_channels"): 48}
    one = advice[0]
    assert "3 groups of 12 → 16" in one.reason
    assert one.evidence["together_with"] == []
    assert one.evidence["proved"]


def test_a_head_that_the_script_splits(attention):
    """Nine is padded nowhere alone: the whole width follows, and it is no proof."""
    advice = advise_shapes(attention, "fp16", worthwhile=False)
    assert sizes(advice) == {
        ("packed", "in_features"): 80, ("packed", "out_features"): 240,
        ("out", "in_features"): 80, ("out", "out_features"): 80,
    }  # fmt: skip
    assert not any(a.evidence["proved"] for a in advice if a.module)
    assert all("not proved" in a.reason for a in advice if a.module)


def test_what_does_not_pay_is_said_to_stay(attention):
    (left,) = [f for f in shape_findings(attention, "fp16") if f.code == "shapes-left-alone"]
    assert {s["module"] for s in left.evidence["sizes"]} >= {"packed", "out"}
    assert all(s["growth"] > 0 for s in left.evidence["sizes"])


def test_attention_modules_stay_divisible(tmp_path):
    run = recorded(_Own(), torch.randn(5, 2, 63), tmp_path / "run")
    advice = advise_shapes(run, "fp16", worthwhile=False)
    (one,) = [a for a in advice if a.dimension == "embed_dim"]
    assert one.padded % 7 == 0
    assert (one.padded, "7 heads of 9 → 16" in one.reason) == (112, True)
    assert not [
        a for a in advice if a.module == "own" and a.dimension not in ("embed_dim", "sequence")
    ]
    left = [f for f in shape_findings(run, "fp16") if f.code == "shapes-left-alone"]
    assert left[0].fix.startswith("own: 8 heads of 8 need embed_dim 64 alone")


class _Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(63, 7)

    def forward(self, x):
        return x + self.own(x, x, x)[0]


@pytest.mark.parametrize(
    ("target", "shards", "padded"),
    [("fp8_e4m3", 1, 48), ("mxfp8_e4m3", 1, 96), ("fp8_128x128", 1, 384), ("fp8_e4m3", 2, 96)],
)
def test_other_formats_and_shards(grouped, target, shards, padded):
    found = advise_shapes(grouped, target, shards=shards, worthwhile=False)
    assert set(sizes(found).values()) == {padded}


def test_a_recording_without_strides_proves_nothing(grouped, attention):
    for run in (grouped, attention):
        plain = [
            replace(op, scalars={k: v for k, v in op.scalars.items() if k != "views"})
            for op in run.operations()
        ]
        assert from_operations(run.modules(), plain) is None


def test_views_keep_their_own_shape(attention):
    shapes = {t.shape for op in attention.operations() for t in op.inputs if t.shape[-1:] == (45,)}
    assert {(24, 45), (4, 6, 45)} <= shapes  # one tensor, read in two shapes


def test_all_changes_together_have_a_cost(grouped):
    solved = solve_run(grouped, Wanted("fp16"))
    assert solved.cost == pytest.approx((48 / 36) ** 2 - 1)
    assert solved.expected_time == pytest.approx((48 / 36) ** 2 / 2)
