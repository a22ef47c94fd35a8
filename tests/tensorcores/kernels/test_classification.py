"""What a kernel's name says, mangled or not, and what its arguments rule out."""

from pathlib import Path

import pytest

from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.kernels.classification import (
    VERDICTS,
    classify,
    demangled,
    identifiers,
    takes_no_two_matrices,
)
from mpdiag.tensorcores.kernels.rules import rules

ROWS = read_table(Path(__file__).with_name("said.tsv"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"][:60] or "no name")
def test_what_a_name_and_its_arguments_say(row):
    facts = classify(row["name"])
    assert {field: getattr(facts, field) for field in row if field != "name"} == {
        field: said for field, said in row.items() if field != "name"
    }


def test_the_order_is_part_of_the_table():
    """A reduction that serves a GEMM is a helper before it is a GEMM."""
    names = [rule.name for rule in rules()]
    assert len(names) == len(set(names))
    assert {rule.verdict for rule in rules()} == set(VERDICTS)
    assert names.index("split-k reduction") < names.index("CUTLASS tensorop")
    assert names.index("xmma FFMA") < names.index("xmma tensor tile")


@pytest.mark.parametrize("name", ["<" * 50_000, "(" * 50_000, "a" * 1_000_000, "cutlass_" * 9_000])
def test_hostile_names_are_survived(name):
    assert classify(name).verdict in VERDICTS


def test_two_arrays_are_no_two_factors_and_a_product():
    ruled_out = [
        "(float const*, float*, int, int)",
        "(unsigned int const* __restrict__, __half*, unsigned long)",
    ]
    possible = [
        "(const T1 *, int)", "(float const*, float const*, float*, int)", "(float**, float*, int)",
        "(Params)", "(float*, Params)", "(float const*, float*, in...", "(int, int)", "()",
    ]  # fmt: skip
    assert list(filter(takes_no_two_matrices, ruled_out + possible)) == ruled_out


# cuDNN's convolution on Tensor Cores, TF32, as a profiler of TensorFlow writes it.
CUDNN = (
    "_ZN13cutlass_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock"
    "22ImplicitGemmMultistageINS_4gemm9GemmShapeILi64ELi128ELi32EEENS6_11threadblock9MmaPolicyINS6_"
    "4warp11MmaTensorOpINS7_ILi32ELi64ELi32EEENS_10tfloat32_tENSO_8RowMajorES8_fNSO_8RowMajorE"
)
SIMT = "_ZN7cutlass7Kernel2I42cutlass_80_simt_sgemm_128x32_8x5_nn_align1EEvNT_6ParamsE"
CK = "_ZN2ck16kernel_gemm_xdlopsINS_4GemmIttftEEEEvPKtS4_Pt"


def bomb(levels: int) -> str:
    """A short name that spells out twice as long with each level."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"

    def base36(n: int) -> str:
        return (base36(n // 36) if n >= 36 else "") + digits[n % 36]

    twice = (f"S_IS{base36(i)}_S{base36(i)}_E" for i in range(1, levels))
    return "_Z1f1pI1aS0_E" + "".join(twice)


def test_a_library_reads_whole_names():
    pytest.importorskip("demangle")
    assert demangled(SIMT).startswith("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn")
    assert "unsigned short" in demangled(CK)


@pytest.mark.parametrize("length", [len(CUDNN), len(CUDNN) - 7, 330, 300])
def test_a_name_that_was_cut_off_is_read_as_far_as_it_goes(length):
    facts = classify(CUDNN[:length])
    assert facts.verdict == "tensor_core", facts.rule
    assert facts.dtype in ("tf32", "")


def test_what_identifiers_tell_alone():
    assert identifiers(SIMT).startswith(
        "cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1"
    )
    assert identifiers("_ZN2at6native18elementwise_kernelILi128ELi2EEEvi").startswith(
        "at::native::elementwise_kernel<128, 2"
    )


@pytest.mark.parametrize(
    "name", ["_Z", "_ZN", "_Z99999999999f", "_ZN5aiter", "_Zé", "_ZN1aI" * 999]
)
def test_broken_names_are_survived(name):
    assert isinstance(demangled(name), str)
    assert len(identifiers(name)) <= 3 * len(name)


@pytest.mark.parametrize("levels", [5, 40, 1000])
def test_a_short_name_cannot_become_a_long_one(levels):
    assert len(demangled(bomb(levels))) < 1_000_000
