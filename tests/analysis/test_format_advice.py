"""Formats of layers are advised for what happens when all of them are applied at once."""

import math

import numpy as np
import pytest
from row_buffer import table_of

from mpdiag.analysis.format_advice import TOGETHER, advise_layers, summarise_formats
from mpdiag.analysis.layers import merge_layers
from mpdiag.analysis.operations.layer_effects import LayerEvidence, Rounded
from mpdiag.analysis.operations.loss_change import LossCurve
from mpdiag.numerics.formats import BF16, FP16, format_named
from mpdiag.runs.records import Records


def layers_of(outputs):
    """Activations by name, as a recording of one step holds them."""
    rows = [(0, "activation", name, values) for name, values in outputs.items()]
    return merge_layers(Records.from_table(table_of(rows)))


CURVE = LossCurve({k: 1.0 - 0.01 * k for k in range(50)})  # moves by 0.01, ends at 0.55


class Measured(LayerEvidence):
    """What rounding a layer to FP8 changed of a step's loss, by the layer's name."""

    def __init__(self, losses=None, kept=()):
        super().__init__(curve=CURVE)
        object.__setattr__(self, "losses", losses)
        object.__setattr__(self, "kept_layers", kept)

    def of(self, name, target):
        if not target.needs_tensor_scale:
            return None
        change = 1e-4 if self.losses is None else self.losses.get(name)
        return None if change is None else frozenset({Rounded(0.01, change)})

    def keeper(self, name):
        return "the plan keeps addmm in FP32 there" if name in self.kept_layers else ""

    def step(self):
        return 10


def usual(seed):
    return np.random.default_rng(seed).standard_normal(2000)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_the_rounding_of_all_layers_together_stays_small(count):
    layers = layers_of({f"layer{i}": usual(i) for i in range(count)})
    advice = advise_layers(layers, 0, Measured())
    errors = [2.0 ** -(format_named(a.format).mantissa_bits + 1) for a in advice]
    assert math.sqrt(sum(e**2 for e in errors)) <= TOGETHER
    assert len(advice) == count
    assert all(a.evidence["rounding_together"] <= TOGETHER for a in advice)
    if count == 1:
        assert advice[0].format.startswith("fp8")
        assert "step 10, run again, tolerates it" in advice[0].reason
        assert advice[0].evidence["loss_change"] == 1e-4


def test_fp8_is_not_advised_where_its_effect_was_not_measured():
    words = "FP8 E4M3 holds the range, but its effect on a late step was not measured"
    for evidence in (None, Measured({})):
        (advice,) = advise_layers(layers_of({"layer": usual(0)}), 0, evidence)
        assert (advice.format, advice.reason.startswith(words)) == ("fp16", True)


TOO_COARSE = "FP8 E4M3 holds the range, but is too coarse"


@pytest.mark.parametrize(
    ("measured", "one", "other", "words"),
    [
        (Measured({"one": 0.2, "other": 0.01}), "fp16", "fp8_e4m3", TOO_COARSE),  # harmful alone
        (Measured({"one": 0.1, "other": 0.08}), "fp16", "fp8_e4m3", TOO_COARSE),  # only together
        (Measured(kept=("one",)), "fp32", "fp8_e4m3", "the plan keeps addmm in FP32 there"),
    ],
)
def test_what_does_harm_or_is_kept_in_fp32_is_wider_with_a_reason(measured, one, other, words):
    advice = advise_layers(layers_of({"one": usual(0), "other": usual(1)}), 0, measured)
    assert [(a.name, a.format) for a in advice] == [("one", one), ("other", other)]
    assert advice[0].reason.startswith(words)


def test_of_layers_with_like_values_those_that_change_the_loss_least_stay_narrow():
    layers = layers_of({f"layer{i}": usual(0) for i in range(6)})
    advice = advise_layers(layers, 0, Measured({f"layer{i}": 1e-4 * (6 - i) for i in range(6)}))
    narrow = [a.name for a in advice if a.format.startswith("fp8")]
    assert narrow == ["layer4", "layer5"]


def test_values_that_differ_little_beside_their_size_keep_more_digits():
    kelvin = 288 + 5 * np.random.default_rng(0).random(2000)
    (advice,) = advise_layers(layers_of({"layer": kelvin}), 0)
    assert advice.format in ("fp16", "fp32")  # BF16 holds 288 and 290, and nothing between
    assert 2.0 ** -(format_named(advice.format).mantissa_bits + 1) * 293 / 5 <= TOGETHER


def test_what_leaves_the_range_is_wide():
    (advice,) = advise_layers(layers_of({"layer": usual(0) * 1e5}), 0, Measured())
    assert advice.format.startswith("fp8")  # under a scale of its own
    advised = advise_layers(layers_of({f"layer{i}": usual(i) * 1e5 for i in range(40)}), 0)
    assert "fp16" not in {a.format for a in advised}


@pytest.mark.parametrize(("largest", "advised"), [(30_000.0, "fp16"), (40_000.0, "bf16")])
def test_what_was_recorded_may_double_in_steps_that_were_not(largest, advised):
    values = np.linspace(-largest, largest, 2001)
    (advice,) = advise_layers(layers_of({"layer": values}), 0)
    assert advice.format == advised
    assert "holds twice the largest value" in advice.reason


@pytest.mark.parametrize(
    ("name", "scale"), [("fp16", 0), ("fp16", 10), ("bf16", 0), ("fp8_e4m3", 0), ("fp8_e5m2", 0)]
)
def test_rounding_of_a_format_is_that_of_the_worst_layer(name, scale):
    """Against the values themselves; each layer in FP8 has a scale of its own."""
    random, fmt, worst, rows = np.random.default_rng(0), format_named(name), 0.0, []
    for i, octave in enumerate((-20, -14, -4)):
        values = np.ldexp(random.uniform(1, 2, 40_000), octave + random.integers(-4, 1, 40_000))
        rows.append((0, "activation_grad", f"layer{i}", values.astype(np.float32)))
        own = 2.0**scale
        if fmt not in (FP16, BF16):
            own = 2.0 ** (np.floor(np.log2(fmt.max) - np.log2(values.max())) - 1)
        error = np.linalg.norm(fmt.round(values * own) - values * own)
        worst = max(worst, error / np.linalg.norm(values * own))
    layers = merge_layers(Records.from_table(table_of(rows)))
    found = summarise_formats(layers, scale)[name]["kinds"]["activation_grad"]["rounding"]
    assert found == pytest.approx(worst, rel=0.02)


def test_a_format_that_overflows_has_no_rounding():
    rows = [(0, "activation_grad", "a", np.array([1.0, 70_000.0], np.float32))]
    layers = merge_layers(Records.from_table(table_of(rows)))
    assert summarise_formats(layers, 0)["fp16"]["kinds"]["activation_grad"]["rounding"] is None
