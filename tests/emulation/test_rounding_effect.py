"""What rounding an input does, against what the formats say it must."""

import math

import pytest
import torch

from mpdiag.emulation.rounding_effect import measure_rounding
from mpdiag.tracing.dispatch import by_name

aten = torch.ops.aten


def figures(func, *args, **kwargs):
    with torch.no_grad():
        found = measure_rounding(func, by_name(func, args, kwargs))
    return {name: float(value) for name, value in found.items()}


def test_the_error_of_a_cosine_is_that_of_its_angle():
    x = torch.linspace(1000.1, 1030.3, 999)
    found = figures(aten.cos.default, x)
    exact, low = torch.cos(x), torch.cos(x.half().float())
    assert found["error_of_self_fp16"] == pytest.approx(float((low - exact).norm() / exact.norm()))
    assert found["error_of_self_fp16"] > 0.1
    assert figures(aten.cos.default, x / 1000)["error_of_self_fp16"] < 1e-3


def test_each_operand_is_rounded_by_itself():
    p, ones = torch.full((8,), 1 - 1e-6), torch.ones(8)
    found = figures(aten.sub.Tensor, ones, p)
    assert found["zeroed_of_other_fp16"] == 8
    assert found["zeroed_of_self_fp16"] == 0
    assert figures(aten.logit.default, p)["diverged_of_self_fp16"] == 8


def test_what_overflows_is_no_divergence():
    assert figures(aten.log.default, torch.full((4,), 1e6))["diverged_of_self_fp16"] == 0


def test_integers_past_the_significand():
    x = torch.arange(2040.0, 2060.0)
    found = figures(aten._to_copy.default, x, dtype=torch.int64)
    assert found["changed_of_self_fp16"] == pytest.approx(6 / 20)  # odd ones past 2048
    assert found["changed_of_self_bf16"] > 0.8


def test_an_operation_in_place_leaves_its_input_alone():
    x = torch.rand(16) * 1000
    before = x.clone()
    assert figures(aten.cos_.default, x)["error_of_self_bf16"] > 0.1
    assert torch.equal(x, before)


def test_noise_of_data_beside_its_spread():
    x = 48.85 + 0.005 * torch.randn(4096, 1, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.ones(1, 4))
    noise = figures(aten.mm.default, x, weight)["noise_of_self_fp16"]
    error = (x.half().float() - x).square().mean().sqrt()
    assert noise == pytest.approx(float(error / x.std(correction=0)), rel=1e-3)
    assert figures(aten.mm.default, x - 48.85, weight)["noise_of_self_fp16"] < 1e-3
    assert "noise_of_self_fp16" not in figures(aten.mm.default, x.requires_grad_(), weight)


def test_a_constant_feature_has_no_noise():
    x = torch.full((64, 2), 48.85)
    assert figures(aten.mm.default, x, torch.ones(2, 2))["noise_of_self_fp16"] == 0


def test_random_operations_are_left_alone():
    state = torch.get_rng_state()
    assert figures(aten.native_dropout.default, torch.ones(8), 0.5, True) == {}
    assert torch.equal(state, torch.get_rng_state())


def test_a_normalisation_shows_what_its_mean_hides():
    x = 100 + 0.1 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    found = figures(aten.native_layer_norm.default, x, [64], None, None, 1e-5)
    assert math.isclose(found["error_of_input_fp16"], 0.18, rel_tol=0.2)
