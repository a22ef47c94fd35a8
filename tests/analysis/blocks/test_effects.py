"""The estimated effect of a layer, held against the errors of its products on tensors."""

import math

import pytest
import torch
from block_rows import layer_rows, operand_row

from mpdiag.analysis.blocks.effects import layer_effects, local_name
from mpdiag.analysis.operations.loss_change import LossCurve
from mpdiag.emulation.block_rounding import fake_quantize
from mpdiag.numerics.block_recipes import BLOCK_RECIPES

TOKENS, FEATURES, OUTPUTS = 256, 96, 64
CURVE = LossCurve({0: 2.0, 1: 2.0})


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (TOKENS, FEATURES), (OUTPUTS, FEATURES), (TOKENS, OUTPUTS)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(
    ("target", "losses"),
    [("mxfp8", TOKENS), ("mxfp6", TOKENS), ("fp8-row", TOKENS), ("mxfp8", 128), ("mxfp8", 64)],
)
def test_the_rise_and_the_errors_are_those_of_the_products(target, losses):
    """Positions without a loss have a gradient of zeros, and do not count among the averaged losses."""
    x, w, g = tensors()
    g[torch.arange(TOKENS) % (TOKENS // losses) != 0] = 0
    recipe = BLOCK_RECIPES[target]

    def rounded(values, axis=-1):
        return fake_quantize(values, recipe.input.format, axis)

    (found,) = layer_effects(layer_rows(x, w, g), recipe, CURVE, {"fc.weight": 7.0})
    exact, error = x @ w.T, rounded(x) @ rounded(w).T - x @ w.T
    squared = float((g * error).square().sum())
    assert found.rise == pytest.approx(losses / 2 * squared / 2.0, rel=0.1)
    assert found.output_error == pytest.approx(float(error.norm() / exact.norm()), rel=0.1)
    wgrad = rounded(g, 0).T @ rounded(x, 0) - g.T @ x
    assert found.wgrad_error == pytest.approx(float(wgrad.norm()) / math.sqrt(7.0), rel=0.1)
    assert (found.length, found.outputs, found.tokens) == (FEATURES, OUTPUTS, TOKENS)
    assert found.flops == 6 * TOKENS * FEATURES * OUTPUTS


def test_steps_are_averaged_and_kept_apart():
    x, w, g = tensors()
    rows = [*layer_rows(x, w, g), *layer_rows(x, w, 2 * g, step=1)]
    (found,) = layer_effects(rows, BLOCK_RECIPES["mxfp8"], CURVE, {})
    assert found.by_step[1] == pytest.approx(4 * found.by_step[0])
    assert found.rise == pytest.approx(2.5 * found.by_step[0])
    assert math.isnan(found.wgrad_error)


def test_gradients_under_a_loss_scale_are_unscaled():
    x, w, g = tensors()
    (plain,) = layer_effects(layer_rows(x, w, g), BLOCK_RECIPES["nvfp4"], CURVE, {"fc.weight": 7.0})
    scaled = LossCurve(CURVE.losses, {0: 1024.0})
    rows = layer_rows(x, w, 1024 * g)
    (found,) = layer_effects(rows, BLOCK_RECIPES["nvfp4"], scaled, {"fc.weight": 7.0})
    assert (found.rise, found.wgrad_error) == pytest.approx((plain.rise, plain.wgrad_error))


def test_experts_are_added_and_the_fewest_tokens_kept():
    x, w, g = tensors()
    (whole,) = layer_effects(layer_rows(x, w, g), BLOCK_RECIPES["mxfp8"], CURVE, {})
    fields = {"product": "grouped", "parameter": "fc.w1"}
    rows = [
        row
        for expert, some in enumerate((slice(0, 192), slice(192, TOKENS)))
        for row in layer_rows(x[some], w, g[some], expert=expert, **fields)
    ]
    last = operand_row(x, module="head")  # as many losses as before
    found = layer_effects([*rows, last], BLOCK_RECIPES["mxfp8"], CURVE, {})[0]
    assert (found.parameter, found.kind, found.tokens) == ("w1", "grouped", 64)
    assert found.rise == pytest.approx(whole.rise, rel=0.05)
    assert found.flops == whole.flops


def test_a_layer_without_a_gradient_has_no_known_effect():
    x, w, _ = tensors()
    rows = [operand_row(x), operand_row(w, operand="weight")]
    (found,) = layer_effects(rows, BLOCK_RECIPES["mxfp8"], CURVE, {})
    assert math.isnan(found.rise)
    assert found.output_error > 0


@pytest.mark.parametrize(
    ("module", "parameter", "kind", "name"),
    [
        ("layers.0.fc", "layers.0.fc.weight", "linear", "weight"),
        ("head", "embedding.weight", "linear", "weight"),
        ("", "weight", "linear", "weight"),
        ("moe", "moe.experts.w1", "grouped", "experts.w1"),
    ],
)
def test_a_parameter_is_named_in_its_module(module, parameter, kind, name):
    assert local_name(module, parameter, kind) == name
