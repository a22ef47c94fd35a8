"""Formats of layers are advised for what happens when all of them are applied at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from row_buffer import RowBuffer

from mpdiag.analysis.format_advice import TOGETHER, advise_layers
from mpdiag.analysis.layers import merge_layers
from mpdiag.numerics.formats import format_named
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs.records import Records


def layers_of(outputs):
    """Activations by name, as a recording of one step holds them."""
    buffer = RowBuffer()
    for name, values in outputs.items():
        buffer.append(
            ExponentHistogram.of(np.asarray(values, np.float32)),
            step=0,
            micro=0,
            kind="activation",
            name=name,
            scale=1.0,
            rank=0,
            tensors=1,
            dtype="float32",
            placement="local",
            stage="local",
            skipped=False,
        )
    return merge_layers(Records.from_table(buffer.to_table()))


def usual(seed):
    return np.random.default_rng(seed).standard_normal(2000)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_the_rounding_of_all_layers_together_stays_small(count):
    advice = advise_layers(layers_of({f"layer{i}": usual(i) for i in range(count)}), 0)
    errors = [2.0 ** -(format_named(a.format).mantissa_bits + 1) for a in advice]
    assert math.sqrt(sum(e**2 for e in errors)) <= TOGETHER
    assert len(advice) == count
    assert all(a.evidence["rounding_together"] <= TOGETHER for a in advice)


def test_a_few_layers_may_be_in_fp8():
    (advice,) = advise_layers(layers_of({"layer": usual(0)}), 0)
    assert advice.format.startswith("fp8")


def test_values_that_differ_little_beside_their_size_keep_more_digits():
    kelvin = 288 + 5 * np.random.default_rng(0).random(2000)
    (advice,) = advise_layers(layers_of({"layer": kelvin}), 0)
    assert advice.format in ("fp16", "fp32")  # BF16 holds 288 and 290, and nothing between
    assert 2.0 ** -(format_named(advice.format).mantissa_bits + 1) * 293 / 5 <= TOGETHER


def test_what_leaves_the_range_is_wide():
    (advice,) = advise_layers(layers_of({"layer": usual(0) * 1e5}), 0)
    assert advice.format.startswith("fp8")  # under a scale of its own
    advised = advise_layers(layers_of({f"layer{i}": usual(i) * 1e5 for i in range(40)}), 0)
    assert "fp16" not in {a.format for a in advised}
