"""Rounding errors told from histograms, against rounding the values themselves."""

import numpy as np
import pytest

import mpdiag
from mpdiag.analysis.operations.rounding_error import operation_errors, rounding_error
from mpdiag.numerics.formats import BF16, FP8_E4M3, FP16
from mpdiag.numerics.histograms import ExponentHistogram, stack


def true_error(values, fmt, exponent=0):
    scaled = values.astype(np.float64) * 2.0**exponent
    return np.linalg.norm(fmt.round(scaled) - scaled) / np.linalg.norm(scaled)


@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E4M3], ids=lambda f: f.name)
@pytest.mark.parametrize("centre", [0, -12, -20, -26])
def test_the_error_of_real_values(fmt, centre):
    generator = np.random.default_rng(0)
    values = (generator.normal(size=20_000) * 2.0**centre).astype(np.float32)
    found = rounding_error(stack([ExponentHistogram.of(values)]), fmt)[0]
    assert found == pytest.approx(true_error(values, fmt), rel=0.15)


def test_a_loss_scale_saves_what_is_small():
    values = (np.random.default_rng(1).normal(size=5_000) * 2.0**-24).astype(np.float32)
    h = stack([ExponentHistogram.of(values)])
    plain, scaled = rounding_error(h, FP16)[0], rounding_error(h, FP16, 10)[0]
    assert plain > 100 * scaled
    assert scaled == pytest.approx(true_error(values, FP16, 10), rel=0.15)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([65519.0], pytest.approx(2.0**-12, rel=0.5)),
        ([65520.0], np.inf),
        ([0.0], 0.0),
        ([2.0**-26, 2.0**-30], pytest.approx(1.0)),
    ],
)
def test_the_error_at_both_ends_of_the_range(values, error):
    found = rounding_error(stack([ExponentHistogram.of(np.float32(values))]), FP16)[0]
    assert found == error


def test_recorded_operations_are_ranked_with_their_lines(root):
    run = mpdiag.open_run(root / "tests" / "data" / "schema-1" / "run")
    found = operation_errors(run.operations(), FP16, 0)
    assert [e.worst for e in found] == sorted((e.worst for e in found), reverse=True)
    assert {"addmm", "native_layer_norm"} <= {e.op for e in found}
    assert all(e.calls > 0 for e in found)
    assert any(e.where.endswith(":" + e.where.rsplit(":")[-1]) and e.where for e in found)
    addmm = next(e for e in found if e.op == "addmm")
    assert 0 < addmm.forward < 2.0**-11
    assert addmm.backward > 0
    assert operation_errors([], FP16, 0) == ()
