"""Tiles of operands against slices of the matrix, and what is measured on them."""

import math
from functools import reduce
from operator import add

import pytest
import torch
from block_measure import measure_error

from mpdiag.emulation.block_errors import rotate
from mpdiag.numerics.block_statistics import BlockError
from mpdiag.recording.counting.block_depths import count_depths, depths_of
from mpdiag.recording.operand_matrices import MEASURED_LINES, Matrix, measure, variants


def drawn(*shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return x * torch.exp2(-4 * x.abs())


MATRICES = {
    "rows": (Matrix(drawn(300, 200), (), (0,), (1,)), lambda x: x),
    "columns": (Matrix(drawn(300, 200), (), (1,), (0,)), lambda x: x.T),
    "batch": (Matrix(drawn(3, 40, 70).mT, (0,), (1,), (2,)), lambda x: x),
    "expanded": (Matrix(drawn(1, 200).expand(140, 200), (), (0,), (1,)), lambda x: x),
    "images": (
        Matrix(drawn(4, 6, 5, 5), (), (0, 2, 3), (1,)),
        lambda x: x.permute(0, 2, 3, 1).reshape(100, 6),
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_tiles_are_the_matrix(name):
    matrix, plain = MATRICES[name]
    whole = plain(matrix.values)
    found = [
        (tile, largest)
        for tiles, maxima, _ in matrix.tiles("a")
        for tile, largest in zip(tiles, maxima, strict=True)
    ]
    expected = [
        (lines[:, left : left + 128], lines.abs().amax(1))
        for one in whole.reshape(-1, *whole.shape[-2:])
        for lines in one.split(128)
        for left in range(0, whole.shape[-1], 128)
    ]
    assert len(found) == len(expected) == matrix.tile_count
    for tile, maxima in expected:
        assert any(torch.equal(tile, t) and torch.equal(maxima, m) for t, m in found)


def test_a_large_operand_is_sampled_the_same_way_each_time():
    x = drawn(128, 32).repeat(8, 20)
    matrix = Matrix(x, (), (0,), (1,))
    first, second = (measure(matrix, "input", "fprop", "a", step).fields() for step in (0, 7))
    assert first["sampled"]
    assert first["depths"].values == 16 * 128 * 128 == second["depths"].values
    assert first["errors"] == second["errors"]
    assert all(len(error.tiles) == 4 for error in first["errors"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_the_tiles_in_their_tensor(dtype):
    x = drawn(64, 256).to(dtype)  # two tiles: all of them are measured
    x[40] *= 8
    for role, gemm in (("input", "fprop"), ("weight", "dgrad"), ("grad_output", "wgrad")):
        fields = measure(Matrix(x, (), (0,), (1,)), role, gemm, "a", 3).fields()
        assert not fields["sampled"]
        assert fields["absmax"] == x.abs().max()
        counted = depths_of(count_depths(x).numpy())
        assert (fields["depths"].counts == counted[0].counts).all()
        assert (fields["maxima_first"], fields["maxima"]) == counted[1:]
        found = {error.variant: error for error in fields["errors"]}
        assert list(found) == list(variants(role, gemm, 256, plain=True))
        cut = x[:MEASURED_LINES].float()
        for variant, error in found.items():
            if error.rounding == "stochastic":
                continue  # below
            largest = rotate(cut).abs().amax() if error.rotated else x.abs().amax().float()
            lines = x.float() if error.format == "fp8_128x128" else cut
            parts = lines.split(128, 1)
            if error.format == "fp8_row":
                parts = [lines]
            expected = reduce(
                add,
                [
                    measure_error(p, error.block_format, rotated=error.rotated, tensor_amax=largest)
                    for p in parts
                ],
            )
            total = error.total
            assert (total.values, total.zeros) == (expected.values, expected.zeros), variant
            for name in ("signal", "error", "shift", "along"):
                value = pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-9)
                assert getattr(total, name) == value, (variant, name)
        if role == "grad_output":
            error = found["nvfp4", "", "stochastic", False]
            assert error.total.error > found["nvfp4", "", "nearest", False].total.error
            assert abs(error.total.shift) < 5 * error.total.error**0.5


def test_what_holds_infinities_has_no_largest_magnitude_and_short_lines_no_rotation():
    x = torch.ones(4, 8)
    x[1, 2] = math.inf
    fields = measure(Matrix(x, (), (0,), (1,)), "weight", "fprop", "a", 0).fields()
    assert fields["absmax"] == 0.0
    assert fields["depths"].nonfinite == 8
    assert not any(error.rotated for error in fields["errors"])
    mx = next(e for e in fields["errors"] if e.format == "mxfp8_e4m3")
    assert math.isnan(mx.total.sqnr_db)
    assert isinstance(mx.tiles[0], BlockError)
