"""An operand in a format: its SQNR and interval, and what explains it, on planted values."""

import math

import numpy as np
import pytest
import torch
from block_rows import operand_row

from mpdiag.analysis.blocks.operands import operand_error, operand_errors, sqnr_interval
from mpdiag.emulation.block_rounding import fake_quantize
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, OperandFormat
from mpdiag.numerics.block_statistics import BlockError


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers():
    x = gaussian(128, 128)
    x[:, ::16] *= 30
    return x


def with_small_blocks():
    x = gaussian(128, 128)
    x[::2] *= 2.0**-16
    return x


@pytest.mark.parametrize(
    ("values", "format", "finding"),
    [
        (gaussian(128, 128), "mxfp4", "at par"),
        (gaussian(128, 128), "nvfp4", "at par"),
        (with_outliers(), "mxfp4", "outliers: rotation helps"),
        (with_outliers(), "nvfp4", "at par"),  # the outliers are all of the signal
        (with_small_blocks(), "nvfp4", "scale underflows"),
        (with_small_blocks() * gaussian(128, 1) ** 8, "fp8_tensor", "scale underflows"),
        (with_small_blocks(), "mxfp8_e4m3", "at par"),
        (1.27 + 0.003 * gaussian(128, 128), "mxfp4", "clusters in the top bucket"),  # all 4 to 6
        (torch.zeros(128, 128), "mxfp4", "no values"),
    ],
)
def test_a_finding_says_what_the_values_are_like(values, format, finding):  # noqa: A002
    assert operand_error([operand_row(values)], OperandFormat(format)).finding == finding


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4", "nvfp4"])
def test_zeros_and_sqnr_of_a_whole_operand_are_those_of_quantising_it(format):  # noqa: A002
    x = with_outliers()
    q = fake_quantize(x, format)
    found = operand_error([operand_row(x)], OperandFormat(format))
    assert found.low_db == found.sqnr_db == found.high_db
    assert found.sqnr_db == pytest.approx(
        10 * math.log10((x**2).sum() / ((q - x) ** 2).sum()), 1e-4
    )
    assert found.zeros == pytest.approx(float(((q == 0) & (x != 0)).sum() / x.count_nonzero()))
    assert found.clipped == (None if format == "nvfp4" else 0.0)


def test_an_interval_is_that_of_a_ratio_of_sums():
    errors, signals = np.array([1.0, 1.2, 0.9, 1.1]), np.full(4, 100.0)
    tiles = [BlockError(1, 0, s, e, 0.0, 0.0) for s, e in zip(signals, errors, strict=True)]
    low, middle, high = sqnr_interval([tuple(tiles)], share=0.0)
    reach = 2.3534 * errors.std(ddof=1) / 2 / errors.mean() * 10 / math.log(10)  # t of 3 degrees
    assert middle == pytest.approx(10 * math.log10(400 / errors.sum()))
    assert (middle - low, high - middle) == pytest.approx((reach, reach), rel=1e-4)
    assert sqnr_interval([tuple(tiles)] * 3, share=0.0) == pytest.approx((low, middle, high))
    narrow = sqnr_interval([tuple(tiles)], share=0.75)  # of places drawn without replacement
    assert narrow[2] - middle == pytest.approx(reach / 2, rel=1e-4)
    alone = sqnr_interval([tuple(tiles[:1])], share=0.0)
    assert math.isnan(alone[0])
    assert math.isnan(alone[2])
    assert len({*sqnr_interval([tuple(tiles)], share=1.0)}) == 1


def test_a_large_operand_is_sampled_and_one_that_was_not_measured_so_is_estimated():
    x = gaussian(1024, 512)
    found = operand_error([operand_row(x)], OperandFormat("nvfp4"))
    assert found.low_db < found.sqnr_db < found.high_db
    assert found.to_json("nvfp4", "why")["sampled"]
    like = operand_error(
        [operand_row(x, "wgrad", "grad_output")],
        OperandFormat("mxfp4", "", "stochastic", rotated=True),
    )
    assert not like.measured
    assert like.sqnr_db == pytest.approx(like.format.par_db, abs=0.2)


def test_operands_keep_their_order_and_add_their_steps():
    rows = [operand_row(gaussian(64, 64, seed=s), module=m, step=s) for s in (0, 1) for m in "ab"]
    found = operand_errors(rows, BLOCK_RECIPES["mxfp8"])
    assert [(one.operand.module, one.operand.steps) for one in found] == [
        ("a", (0, 1)),
        ("b", (0, 1)),
    ]
