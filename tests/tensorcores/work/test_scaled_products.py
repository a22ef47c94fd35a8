"""Products with scales and of groups: PyTorch's own count where it has one, by hand elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import flop_registry

from mpdiag.tensorcores.work.traced_operation import matrix_work

size = st.integers(1, 40)
FP8, FP4 = "c10::Float8_e4m3fn", "c10::Float4_e2m1fn_x2"


@given(size, size, size)
def test_fp8_is_counted_as_pytorch_does(m, n, k):
    work = matrix_work("aten::_scaled_mm", [[m, k], [k, n], [1], [1]], [FP8, FP8])
    expected = flop_registry[torch.ops.aten._scaled_mm](
        torch.empty(m, k), torch.empty(k, n), None, None, out_val=None
    )
    assert (work.flops, work.fewest, work.dtype) == (expected, None, "fp8_e4m3")


@pytest.mark.parametrize("name", ["_scaled_mm", "_scaled_mm_v2"])
def test_four_bit_values_lie_two_to_a_byte(name):
    work = matrix_work(f"aten::{name}", [[256, 64], [64, 512]], [FP4, FP4])
    assert (work.m, work.n, work.k, work.flops) == (256, 512, 128, 2 * 256 * 512 * 128)


@pytest.mark.parametrize("name", ["_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"])
def test_groups(name):
    rows = {"_grouped_mm": [[100, 16], [4, 16, 32], [4]]}.get(
        name, [[100, 16], [4, 16, 32], [1], [1], [4]]
    )
    work = matrix_work(f"aten::{name}", rows)
    assert (work.m, work.n, work.k) == (100, 32, 16)
    assert (work.least_flops, work.flops) == (0, 2 * 100 * 32 * 16)  # offsets are data
    columns = matrix_work(f"aten::{name}", [[4, 100, 16], [16, 320], *rows[2:]])
    assert columns.flops == 2 * 100 * 320 * 16
    inner = matrix_work(f"aten::{name}", [[100, 64], [64, 32], *rows[2:]])
    assert inner.flops == 2 * 100 * 64 * 32
    each = matrix_work(f"aten::{name}", [[4, 100, 16], [4, 16, 32]])
    assert (each.flops, each.fewest) == (4 * 2 * 100 * 16 * 32, None)
    assert matrix_work(f"aten::{name}", [[4, 100, 16], [3, 16, 32]]) is None


def test_grouped_products_do_what_is_counted():
    a, b = torch.ones(6, 16, dtype=torch.bfloat16), torch.ones(2, 16, 32, dtype=torch.bfloat16)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    shape = torch.ops.aten._grouped_mm(a, b, offsets).shape
    work = matrix_work("aten::_grouped_mm", [[6, 16], [2, 16, 32], [2]])
    assert (work.m, work.n) == tuple(shape)


def test_vllm():
    scaled = matrix_work("_C::cutlass_scaled_mm", [[8, 32], [8, 16], [16, 32]], ["", FP8, FP8])
    assert (scaled.m, scaled.n, scaled.k, scaled.dtype) == (8, 32, 16, "fp8_e4m3")
    four = matrix_work("_C::cutlass_scaled_fp4_mm", [[8, 32], [8, 64], [32, 64]])
    assert (four.m, four.n, four.k) == (8, 32, 128)
    concrete = ["", "", "", "1024", "8", "4096", "512", "True"]
    marlin = matrix_work(
        "_C::gptq_marlin_gemm", [[8, 512], [32, 8192]], ["c10::Half"], [], concrete
    )
    assert (marlin.m, marlin.n, marlin.k, marlin.dtype) == (8, 4096, 512, "fp16")
    assert matrix_work("_C::gptq_marlin_gemm", [[8, 512]], [], [], ["", "8", "4096"]) is None
