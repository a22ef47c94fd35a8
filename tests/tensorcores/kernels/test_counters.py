"""Which hardware counters count what, and which zeros deny matrix instructions."""

from __future__ import annotations

import pytest

from mpdiag.tensorcores.kernels.counters import WHOLE, covers, generation, meaning, without_hfma2

CYCLES = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"


@pytest.mark.parametrize(
    ("metric", "capability", "paths", "shared"),
    [
        # Whole pipes. https://docs.nvidia.com/nsight-compute/ProfilingGuide/ (Pipelines)
        (CYCLES, (7, 0), WHOLE, False),
        (CYCLES, (9, 0), WHOLE, True),  # HFMA2.MMA
        (CYCLES, (10, 0), WHOLE, False),
        (CYCLES, None, WHOLE, True),
        ("sm__inst_executed_pipe_tensor.sum", (12, 0), WHOLE, False),
        ("smsp__inst_executed_pipe_tensor.sum", (8, 0), WHOLE, True),
        ("sm__pipe_tc_cycles_active.avg", (10, 0), {"tcgen05"}, False),
        ("sm__inst_executed_pipe_tc.sum", (10, 3), {"tcgen05"}, False),
        # One kind of instruction.
        ("sm__inst_executed_pipe_tensor_op_hmma.sum", (9, 0), {"hmma"}, True),
        ("sm__inst_executed_pipe_tensor_op_hmma.sum", (7, 5), {"hmma"}, False),
        ("sm__pipe_tensor_op_imma_cycles_active.avg", (8, 0), {"imma"}, False),
        ("sm__inst_executed_pipe_tensor_op_gmma.sum", (9, 0), {"gmma"}, False),
        ("sm__inst_executed_pipe_tensor_subpipe_hmma.sum", (12, 0), {"hmma", "qmma"}, False),
        ("sm__inst_executed_pipe_tensor_subpipe_hmma_op_hmma.sum", (12, 0), {"hmma"}, False),
        # Parts of a kind prove, but their zero denies nothing.
        (
            "sm__inst_executed_pipe_tensor_subpipe_hmma_op_utchmma_utcqmma_utcomma_scope_1cta.sum",
            (11, 0), set(), False,
        ),
        ("sm__ops_path_tensor_src_bf16_dst_fp32.sum", (9, 0), set(), False),
        ("sm__ops_path_tensor_src_fp16_dst_fp16.sum", (9, 0), set(), True),
        # https://rocm.docs.amd.com/en/latest/conceptual/gpu-arch/mi300-mi200-performance-counters.html
        ("SQ_INSTS_MFMA", None, WHOLE, False),
        ("SQ_VALU_MFMA_BUSY_CYCLES", (9, 4), WHOLE, False),
        ("MfmaUtil", None, WHOLE, False),
        ("SQ_INSTS_VALU_MFMA_MOPS_BF16", (9, 4), {"BF16"}, False),
        ("SQ_INSTS_VALU_MFMA_F6F4", (9, 5), {"F6F4"}, False),
    ],
)  # fmt: skip
def test_what_is_counted(metric, capability, paths, shared):
    found = meaning(metric, capability)
    assert (found.paths, found.shared) == (frozenset(paths), shared)


@pytest.mark.parametrize(
    "metric",
    [
        "sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum", "sm__cycles_active.avg",
        "SQ_INSTS_VALU", "SQ_INSTS_VALU_MUL_F16", "sm__mem_tensor_reads.sum", "Duration",
        "l1tex__data_pipe_tc_wavefronts.sum", "sm__inst_executed_pipe_fma.sum",
    ],
)  # fmt: skip
def test_what_counts_no_matrix_instruction(metric):
    assert meaning(metric, (9, 0)) is None


@pytest.mark.parametrize(
    ("metric", "capability", "dtype"),
    [
        ("sm__ops_path_tensor_src_bf16_dst_fp32.sum", (8, 0), "bf16"),
        ("sm__ops_path_tensor_op_utcqmma_src_fp8_dst_fp32.sum", (10, 0), "fp8"),
        ("sm__ops_path_tensor_op_utcqmma_src_fp4_fp6_fp8_dst_fp32.sum", (10, 0), ""),
        ("sm__inst_executed_pipe_tensor_op_dmma.sum", (8, 0), "fp64"),
        ("sm__inst_executed_pipe_tensor_op_hmma.sum", (7, 0), "fp16"),
        ("sm__inst_executed_pipe_tensor_op_hmma.sum", (8, 0), ""),
        ("SQ_INSTS_VALU_MFMA_MOPS_XF32", (9, 4), "tf32"),
        ("SQ_INSTS_VALU_MFMA_MOPS_F8", (9, 4), "fp8"),
        ("SQ_INSTS_VALU_MFMA_MOPS_F6F4", (9, 5), ""),
    ],
)
def test_dtypes(metric, capability, dtype):
    assert meaning(metric, capability).dtype == dtype


@pytest.mark.parametrize(
    ("paths", "capability", "vendor", "expected"),
    [
        (WHOLE, None, "nvidia", True),
        ({"hmma"}, (7, 0), "nvidia", True),
        ({"hmma"}, (7, 5), "nvidia", False),
        ({"hmma", "imma", "dmma"}, (8, 0), "nvidia", True),
        ({"hmma", "imma", "dmma"}, (9, 0), "nvidia", False),
        ({"hmma", "imma", "dmma"}, None, "nvidia", False),
        ({"tcgen05"}, (10, 0), "nvidia", False),
        ({"I8", "F16", "BF16", "F32", "F64"}, (9, 0), "amd", True),
        ({"I8", "F16", "BF16", "F32", "F64"}, (9, 4), "amd", False),
        ({"F16"}, None, "amd", False),
    ],
)
def test_zeros_that_cover(paths, capability, vendor, expected):
    assert covers(frozenset(paths), capability, vendor) is expected


def test_generations():
    assert generation((9, 0), "nvidia") == "sm90"
    assert generation((9, 4), "amd") == "gfx942"
    assert generation((6, 1), "nvidia") is generation(None, "amd") is None


def test_hfma2_is_subtracted_where_it_was_counted():
    pipe, hmma = (f"sm__inst_executed_pipe_tensor{x}.sum" for x in ("", "_op_hmma"))
    counted = {pipe: 9.0, hmma: 7.0, "sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum": 7.0}
    assert (without_hfma2(pipe, counted), without_hfma2(hmma, counted)) == (2.0, 0.0)
    assert without_hfma2(pipe, {pipe: 9.0}) is None
