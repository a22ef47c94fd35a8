"""Matrix products of groups of rows, and of operands with scales: FP8, MXFP8, MXFP4, NVFP4, INT4.

Four-bit values are stored two to a byte along K, so a trace holds half of K.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from mpdiag.hardware.matrix_work import matmul
from mpdiag.tensorcores.work.traced_call import UnclearArguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpdiag.hardware.matrix_work import MatrixWork
    from mpdiag.tensorcores.work.traced_call import TracedCall


def scaled(call: TracedCall) -> MatrixWork:
    """``_scaled_mm``: [M, K] · [K, N], with scales beside."""
    left, right = call.shape(0, rank=2), call.shape(1, rank=2)
    if left[1] != right[0]:
        raise UnclearArguments
    return matmul(left[0], right[1], left[1] * _packed(call, 0), dtype=call.dtype(0))


def grouped(call: TracedCall) -> MatrixWork:
    """``_grouped_mm`` and ``_scaled_grouped_mm``: products of several experts in one call.

    ===========================  ==========================================================
    [rows, K] · [G, K, N]        each row with the matrix of its group
    [G, M, K] · [K, columns]     each column with the matrix of its group
    [G, M, K] · [G, K, N]        one product a group
    [M, sum K] · [sum K, N]      one product a group, over its part of the inner dimension
    ===========================  ==========================================================

    Rows behind the last group's end are not computed, so the work is the most it can be: offsets
    are data, which a trace does not hold.
    """
    left, right = call.shape(0), call.shape(1)
    if not {len(left), len(right)} <= {2, 3} or left[-1] != right[-2]:
        raise UnclearArguments
    groups = 1
    if len(left) == len(right) == 3:
        if left[0] != right[0]:
            raise UnclearArguments
        groups = left[0]
    k = left[-1] * _packed(call, 0)
    work = matmul(left[-2], right[-1], k, groups, dtype=call.dtype(0))
    offset = bool(call.optional(2) or call.optional(4)) and not len(left) == len(right) == 3
    return replace(work, fewest=0) if offset else work


def _packed(call: TracedCall, index: int) -> int:
    """How many values a stored element holds."""
    return 2 if "float4_e2m1fn_x2" in call.raw_dtype(index).lower() else 1


# -- vLLM ------------------------------------------------------------------------------------------


def into(packed: int = 1, *, transposed: bool = False) -> Callable[[TracedCall], MatrixWork]:
    """``cutlass_scaled_mm`` and its like: (out, a, b, scales …).

    Args:
        packed: Values in an element along K.
        transposed: Whether B is [N, K].
    """

    def read(call: TracedCall) -> MatrixWork:
        out, left, right = (call.shape(i, rank=2) for i in range(3))
        n, k = right if transposed else right[::-1]
        if left[1] != k or out != (left[0], n):
            raise UnclearArguments
        return matmul(left[0], n, k * packed, dtype=call.dtype(1))

    return read


def marlin(call: TracedCall) -> MatrixWork:
    """``gptq_marlin_gemm`` and its like: weights in a layout of their own, M, N and K beside them."""
    rows = call.shape(0)
    m, k = math.prod(rows[:-1]), rows[-1]
    for index in range(1, len(call.concrete) - 2):
        sizes = [call.number(index + i) for i in range(3)]
        n = sizes[1]
        if (sizes[0], sizes[2]) == (m, k) and n:
            return matmul(m, n, k, dtype=call.dtype(0))
    raise UnclearArguments


READERS: dict[str, Callable[[TracedCall], MatrixWork]] = {
    "_scaled_mm": scaled,
    "_scaled_mm_v2": scaled,
    "_grouped_mm": grouped,
    "_scaled_grouped_mm": grouped,
    "_scaled_grouped_mm_v2": grouped,
    "cutlass_scaled_mm": into(),
    "cutlass_scaled_mm_azp": into(),
    "cutlass_scaled_fp4_mm": into(2, transposed=True),
    "gptq_marlin_gemm": marlin,
    "marlin_gemm": marlin,
    "fp8_marlin_gemm": marlin,
    "awq_marlin_gemm": marlin,
}
