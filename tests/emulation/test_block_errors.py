"""Errors of block formats on tiles: sums against NumPy, the rotation against its matrix."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from block_measure import measure_error

from mpdiag.emulation.block_errors import rotate, sample_positions
from mpdiag.emulation.block_rounding import fake_quantize
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import BLOCK_FORMATS, block_format
from mpdiag.numerics.block_statistics import BlockError

GENERATOR = CounterGenerator(3, tensor="fc1")
HADAMARD = np.array([[1.0]])
for _ in range(4):  # Sylvester's construction
    HADAMARD = np.block([[HADAMARD, HADAMARD], [HADAMARD, -HADAMARD]])


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_sums_are_those_of_the_rounded_tensor(name, axis):
    x = drawn(96, 160) * torch.exp2(-drawn(96, 160).abs() * 4)
    x[3, :40] = 0.0
    found = measure_error(x, BLOCK_FORMATS[name], axis)
    q, exact = (t.double().numpy() for t in (fake_quantize(x, name, axis), x))
    assert found.values == x.numel()
    assert found.zeros == np.count_nonzero((q == 0) & (exact != 0))
    sums = (
        (exact**2).sum(),
        ((q - exact) ** 2).sum(),
        (q - exact).sum(),
        ((q - exact) * exact).sum(),
    )
    assert (found.signal, found.error, found.shift, found.along) == pytest.approx(sums, rel=1e-9)
    assert found.sqnr_db == pytest.approx(10 * math.log10(sums[0] / sums[1]))
    assert found.along / found.signal == pytest.approx(sums[3] / sums[0])


def test_the_rotation_is_its_matrix_and_is_undone():
    x = drawn(32, 48)
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    expected = x.double().numpy().reshape(-1, 16) @ (signs[:, None] * HADAMARD / 4)
    torch.testing.assert_close(
        rotate(x).double(), torch.from_numpy(expected).reshape(x.shape), atol=1e-6, rtol=0
    )
    with pytest.raises(ValueError, match="multiples of 16"):
        rotate(drawn(3, 40))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("mxfp4", 4, 6), ("nvfp4", -2, -0.5)],  # NVFP4's finer scales fit an outlier by themselves
)
def test_a_rotation_helps_where_an_outlier_takes_the_range(name, low, high):
    fmt, gaussian = BLOCK_FORMATS[name], drawn(128, 128)
    outliers = gaussian.clone()
    outliers[:, ::16] *= 10
    plain, turned = (measure_error(outliers, fmt, rotated=rotated) for rotated in (False, True))
    assert low < turned.sqnr_db - plain.sqnr_db < high
    assert plain.zeros > 3 * measure_error(gaussian, fmt).zeros
    turned_values = rotate(outliers)
    lost = (fake_quantize(turned_values, fmt) == 0) & (turned_values != 0)
    assert turned.zeros == int(lost.sum())
    same = [measure_error(gaussian, fmt, rotated=rotated).sqnr_db for rotated in (False, True)]
    assert same[0] == pytest.approx(same[1], abs=0.2)


def test_stochastic_rounding_has_more_error_and_no_bias():
    x = drawn(128, 128).abs() + 0.1
    nearest = measure_error(x, block_format("mxfp4", scale_rounding="floor"))
    assert nearest.along < -0.005 * nearest.signal  # clipped at the top
    for rotated in (False, True):
        fmt = block_format("mxfp4", rounding="stochastic")
        found = measure_error(x, fmt, rotated=rotated, generator=GENERATOR)
        assert found.error > measure_error(x, block_format("mxfp4"), rotated=rotated).error
        assert abs(found.shift) < 5 * found.error**0.5  # five standard deviations


def test_positions_are_fixed_by_seed_and_tensor_and_all_differ():
    found = sample_positions(64, GENERATOR, 16)
    assert len(set(found)) == 16
    assert found == sample_positions(64, replace(GENERATOR, step=9), 16)
    assert found != sample_positions(64, replace(GENERATOR, tensor="fc2"), 16)
    assert found[:4] == sample_positions(64, GENERATOR, 4)
    assert sorted(sample_positions(6, GENERATOR, 16)) == list(range(6))


def test_without_error_or_without_values():
    whole = measure_error(torch.ones(4, 32), BLOCK_FORMATS["mxfp4"])
    assert (whole.sqnr_db, whole.along, whole.error) == (math.inf, 0.0, 0.0)
    nothing = measure_error(torch.zeros(4, 32), BLOCK_FORMATS["mxfp4"])
    assert math.isnan(nothing.sqnr_db)
    broken = measure_error(torch.full((1, 32), math.nan), BLOCK_FORMATS["mxfp4"])
    assert math.isnan(broken.sqnr_db)
    assert BlockError(1, 1, 1.0, 0.5, 0.0, 0.0) + whole == BlockError(129, 1, 129.0, 0.5, 0, 0)
