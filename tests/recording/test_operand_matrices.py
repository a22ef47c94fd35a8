"""Tiles of operands against slices of the matrix, and what is measured on them."""

import math
from functools import reduce
from operator import add

import pytest
import torch
from block_measure import measure_error

from mpdiag.emulation.block_errors import rotate
from mpdiag.numerics.block_formats import block_format
from mpdiag.numerics.block_statistics import BlockError
from mpdiag.recording.counting.block_depths import count_depths, depths_of
from mpdiag.recording.operand_matrices import Matrix, measure, variants


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
    tiles = [tile for some in matrix.tiles(range(matrix.tile_count)) for tile in some]
    expected = [
        lines[:, left : left + 128]
        for one in whole.reshape(-1, *whole.shape[-2:])
        for lines in one.split(128)
        for left in range(0, whole.shape[-1], 128)
    ]
    assert len(tiles) == len(expected) == matrix.tile_count
    assert all(any(torch.equal(one, tile) for tile in tiles) for one in expected)
    assert matrix.maxima.max() == whole.abs().max()


@pytest.mark.parametrize("tall", [1, 16])
@pytest.mark.parametrize("name", MATRICES)
def test_a_sample_is_of_pieces_of_the_matrix_with_the_maxima_of_their_lines(name, tall):
    matrix, plain = MATRICES[name]
    whole = plain(matrix.values)
    padded = torch.nn.functional.pad(whole, (0, -whole.shape[-1] % 128, 0, -whole.shape[-2] % tall))
    blocks = padded.unflatten(-2, (-1, tall)).unflatten(-1, (-1, 128)).transpose(-3, -2)
    known = {piece.numpy().tobytes() for piece in blocks.reshape(-1, tall, 128)}
    sample = matrix.sample(tall, "a")
    assert len(sample.values) == min(128 // tall, blocks.numel() // (tall * 128))
    largest = whole.abs().amax(-1).flatten().tolist()
    for piece, maxima, count in zip(sample.values, sample.maxima, sample.counts, strict=True):
        assert piece.contiguous().numpy().tobytes() in known
        assert count >= piece.count_nonzero()
        inside = piece.abs().amax(1) > 0
        assert set(maxima[inside].tolist()) <= set(largest)
        assert (maxima >= piece.abs().amax(1)).all()


POSITIONS = {
    "first": slice(0, 32),
    "last": slice(-32, None),
    "strided": slice(None, None, 8),
    "a few": slice(100, 102),
    "all": slice(None),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", POSITIONS)
def test_a_sample_has_the_mean_square_of_gradients_that_only_some_positions_have(name, transposed):
    x = torch.zeros(256, 512)
    x[POSITIONS[name]] = drawn(*x[POSITIONS[name]].shape)
    x[:, 7] *= 30  # an outlier
    x = x.T.contiguous() if transposed else x
    found = []
    for tensor in "abcdefgh":
        fields = measure(Matrix(x, (), (0,), (1,)), "grad_output", "dgrad", tensor, 0).fields()
        error = next(e for e in fields["errors"] if e.format == "mxfp8_e4m3")
        assert error.total.values == 128 * 128
        assert len(error.tiles) == 8
        found.append(error.total)
    signal, off = float((x**2).sum()), measure_error(x, block_format("mxfp8_e4m3")).error
    for name, known in (("signal", signal), ("error", off)):
        estimates = [getattr(total, name) * x.numel() / total.values / known for total in found]
        assert estimates == pytest.approx([1.0] * 8, abs=0.4)
        assert sum(estimates) / 8 == pytest.approx(1.0, abs=0.12)


def test_a_large_operand_is_sampled_the_same_way_each_time():
    x = drawn(128, 32).repeat(8, 20)
    matrix = Matrix(x, (), (0,), (1,))
    first, second = (measure(matrix, "input", "fprop", "a", step).fields() for step in (0, 7))
    assert first["sampled"]
    assert first["depths"].values == 16 * 128 * 128 == second["depths"].values
    assert first["errors"] == second["errors"]
    assert all(len(error.tiles) == 8 for error in first["errors"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_the_tiles_in_their_tensor(dtype):
    x = drawn(64, 256).to(dtype)  # 128 pieces of lines: all of them are measured
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
        cut = x.float()
        for variant, error in found.items():
            if error.rounding == "stochastic":
                continue  # below
            fmt = block_format(error.format, block=error.block or None, rounding=error.rounding)
            largest = rotate(cut).abs().amax() if error.rotated else x.abs().amax().float()
            parts = [cut] if error.format == "fp8_row" else cut.split(128, 1)
            expected = reduce(
                add,
                [measure_error(p, fmt, rotated=error.rotated, tensor_amax=largest) for p in parts],
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
