"""What a demangled name's arguments rule out: two matrices and their product, and shorter types."""

from __future__ import annotations

import pytest

from mpdiag.hardware.kernel_names.arguments import multiplies_only, takes_no_two_matrices
from mpdiag.hardware.kernels import classify


@pytest.mark.parametrize(
    ("arguments", "ruled_out"),
    [
        ("(float const*, float*, int, int)", True),
        ("(const T1 *, int)", False),
        ("(unsigned int const* __restrict__, __half*, unsigned long)", True),
        ("(float const*, float const*, float*, int)", False),
        ("(float**, float*, int)", False),
        ("(Params)", False),
        ("(float*, Params)", False),
        ("(float const*, float*, in...", False),
        ("(int, int)", False),
        ("()", False),
    ],
)
def test_two_arrays_are_no_two_factors_and_a_product(arguments, ruled_out):
    assert takes_no_two_matrices(arguments) is ruled_out


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("matmul(float const*, float const*, float*, int)", "fp32"),
        ("matmul(double*, double*, double*, int, int const*)", "fp64"),
        ("matmul(float*, double*, float*)", ""),
        ("matmul(__half*, __half*, float*)", ""),
        ("matmul_tf32(float*, float*, float*)", ""),
        ("wmma_matmul(float*, float*, float*)", ""),
        ("matmul(float*, float*)", ""),
        ("matmul(Params, float*, float*, float*)", ""),
    ],
)
def test_arrays_of_float_are_multiplied_on_cuda_cores_unless_the_name_says_a_shorter_type(
    name, dtype
):
    assert multiplies_only(name, name[name.index("(") :]) == dtype


def test_the_arguments_decide_only_where_the_words_do_not():
    """A name that says something, a product of a program's own, and one that could be anything."""
    assert classify("zap_rays(float const*, float*, int)").verdict == "other"
    assert classify("my_kernel(float const*, float*, int)").verdict == "unknown"
    product = classify("gemmTiled(float const*, float const*, float*, int)")
    assert (product.verdict, product.dtype, product.instruction) == ("cuda_core", "fp32", "FFMA")
    assert classify("gemmTiled(__half const*, __half const*, float*, int)").verdict == "unknown"
