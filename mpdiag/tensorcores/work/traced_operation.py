"""The matrix work of an operation in a trace: from the shapes it was called with.

``operations.tsv`` lists PyTorch's matrix products, convolutions, RNNs and attentions by name, and the
positions of their arguments. The input of ``matrix_work`` comes from a file and is checked: an
implausible shape gives None, never an exception.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.work import convolutions
from mpdiag.tensorcores.work.attention_calls import AttentionArguments, attention_call
from mpdiag.tensorcores.work.products import MatrixWork, Shape, matmul, recurrent
from mpdiag.tensorcores.work.traced_call import TracedCall, UnclearArguments

__all__ = ["MatrixWork", "OperationTime", "TracePhase", "matrix_work"]

TracePhase = Literal["forward", "backward", ""]

_LARGEST = 1 << 80
"""FLOP or bytes of one call beyond which its sizes are damage."""


@dataclass(frozen=True)
class OperationTime:
    """What one operation of one module took, all calls together, in microseconds.

    On a GPU it is its kernels' time, by verdict; on a CPU its own.

    Attributes:
        op: The operation, such as ``"aten::addmm"``.
        module: The module that called it, "" where unknown.
        work: Its matrix work in one call; None for what is no matrix work.
        dtype: Of the kernels, our name; None where unknown.
        calls: How many.
        time_us: Of all its kernels, the sum of those below.
        tensor_core_us, cuda_core_us, helper_us, layout_us, other_us, unknown_us: By verdict.
        kernel_alignment: The smallest alignment in its matrix kernels' names, in values.
        phase: Whether it ran forward or backward, "" where unknown.
        kernel: Name of the matrix kernel that took longest, None where there is none.
    """

    op: str
    module: str
    work: MatrixWork | None
    dtype: str | None
    calls: int
    time_us: float
    tensor_core_us: float = 0.0
    cuda_core_us: float = 0.0
    helper_us: float = 0.0
    layout_us: float = 0.0
    other_us: float = 0.0
    unknown_us: float = 0.0
    kernel_alignment: int | None = None
    phase: TracePhase = ""
    kernel: str | None = None

    @property
    def verdict(self) -> str:
        """Where most of it ran: of its matrix kernels if it has any, of all its kernels if not."""
        matrix = {
            "tensor_core": self.tensor_core_us,
            "cuda_core": self.cuda_core_us,
            "unknown": self.unknown_us,
        }
        rest = {"helper": self.helper_us, "layout": self.layout_us, "other": self.other_us}
        times = matrix if any(matrix.values()) else rest
        return max(times, key=lambda verdict: times[verdict])


def matrix_work(
    op_name: str,
    dims: Sequence[Any],
    dtypes: Sequence[Any] = (),
    strides: Sequence[Any] = (),
    concrete_inputs: Sequence[Any] = (),
) -> MatrixWork | None:
    """The matrix work of an operation as a trace records it; None if it is none, or unclear.

    Args:
        op_name: ``"aten::addmm"``.
        dims: ``Input Dims``: a list of sizes for each argument, [] for what is no tensor.
        dtypes: ``Input type``.
        strides: ``Input Strides``.
        concrete_inputs: ``Concrete Inputs``: arguments that are no tensors, as text.
    """
    name = op_name.rpartition("::")[2]
    read = readers().get(name)
    if read is None:
        return None
    call = TracedCall(dims, dtypes, strides, concrete_inputs)
    try:
        work = read(call)
    except (IndexError, ZeroDivisionError, UnclearArguments):
        return None
    return work if max(work.flops, work.bytes) <= _LARGEST else None


def _leading(call: TracedCall, a: int, b: int, n: int) -> Shape:
    """Leading dimensions of A, B and a contiguous C; () where strides are not known."""
    leading = []
    for index in (a, b):
        strides = call.stride(index)[-2:]
        if len(strides) < 2:
            return ()
        leading.append(strides[0] if strides[1] == 1 else strides[1])
    return (*leading, n)


def _product(call: TracedCall, *, first: int = 0) -> MatrixWork:
    """``mm`` and ``bmm``: two matrices at positions ``first`` and ``first + 1``."""
    left, right = call.shape(first), call.shape(first + 1)
    if len(left) < 2 or len(left) != len(right) or left[-1] != right[-2]:
        raise UnclearArguments
    n = right[-1]
    return matmul(
        left[-2],
        n,
        left[-1],
        math.prod(left[:-2]),
        dtype=call.dtype(first),
        leading=_leading(call, first, first + 1, n),
    )


def _matmul(call: TracedCall) -> MatrixWork:
    """``matmul``: any ranks, batch dimensions broadcast."""
    left, right = call.shape(0), call.shape(1)
    if len(left) == 1:
        left = (1, *left)
    if len(right) == 1:
        right = (*right, 1)
    if left[-1] != right[-2]:
        raise UnclearArguments
    if len(right) == 2:  # the batch is folded into the rows
        return matmul(math.prod(left[:-1]), right[-1], left[-1], dtype=call.dtype(0))
    batch = max(math.prod(left[:-2]), math.prod(right[:-2]))
    return matmul(left[-2], right[-1], left[-1], batch, dtype=call.dtype(0))


def _linear(call: TracedCall) -> MatrixWork:
    """``linear``: input […, K], weight [N, K]."""
    x, weight = call.shape(0), call.shape(1, rank=2)
    if x[-1] != weight[1]:
        raise UnclearArguments
    leading = (x[-1], call.stride(1)[0], weight[0]) if len(call.stride(1)) == 2 else ()
    return matmul(math.prod(x[:-1]), weight[0], weight[1], dtype=call.dtype(0), leading=leading)


def _vector(call: TracedCall, *, first: int = 0) -> MatrixWork:
    """``mv``: a matrix at ``first`` and a vector."""
    matrix, vector = call.shape(first, rank=2), call.shape(first + 1, rank=1)
    if matrix[1] != vector[0]:
        raise UnclearArguments
    return matmul(matrix[0], 1, matrix[1], dtype=call.dtype(first))


# -- products of groups of rows, and of operands with scales: FP8, MXFP8, MXFP4, NVFP4, INT4 -------
#
# Four-bit values are stored two to a byte along K, so a trace holds half of K.


def _scaled(call: TracedCall) -> MatrixWork:
    """``_scaled_mm``: [M, K] · [K, N], with scales beside."""
    left, right = call.shape(0, rank=2), call.shape(1, rank=2)
    if left[1] != right[0]:
        raise UnclearArguments
    return matmul(left[0], right[1], left[1] * _values_in_element(call), dtype=call.dtype(0))


def _grouped(call: TracedCall) -> MatrixWork:
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
    k = left[-1] * _values_in_element(call)
    work = matmul(left[-2], right[-1], k, groups, dtype=call.dtype(0))
    offset = bool(call.optional(2) or call.optional(4)) and not len(left) == len(right) == 3
    return replace(work, fewest=0) if offset else work


def _values_in_element(call: TracedCall) -> int:
    """How many values a stored element of the left matrix holds."""
    return 2 if "float4_e2m1fn_x2" in call.raw_dtype(0).lower() else 1


def _into(call: TracedCall, *, packed: int = 1, transposed: bool = False) -> MatrixWork:
    """vLLM's ``cutlass_scaled_mm`` and its like: (out, a, b, scales …).

    Args:
        call: The call.
        packed: Values in an element along K.
        transposed: Whether B is [N, K].
    """
    out, left, right = (call.shape(i, rank=2) for i in range(3))
    n, k = right if transposed else right[::-1]
    if left[1] != k or out != (left[0], n):
        raise UnclearArguments
    return matmul(left[0], n, k * packed, dtype=call.dtype(1))


def _marlin(call: TracedCall) -> MatrixWork:
    """``gptq_marlin_gemm`` and its like: weights in a layout of their own, M, N and K beside them."""
    rows = call.shape(0)
    m, k = math.prod(rows[:-1]), rows[-1]
    for index in range(1, len(call.concrete) - 2):
        sizes = [call.number(index + i) for i in range(3)]
        n = sizes[1]
        if (sizes[0], sizes[2]) == (m, k) and n:
            return matmul(m, n, k, dtype=call.dtype(0))
    raise UnclearArguments


# -- RNNs ------------------------------------------------------------------------------------------

_CUDNN_GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # rnn_relu, rnn_tanh, lstm, gru


def _cudnn_rnn(call: TracedCall, *, backward: bool = False) -> MatrixWork:
    """``_cudnn_rnn`` and its backward, which has ``output`` and three gradients in between.

    (input, weight[], weight_stride0, weight_buf, hx, cx, [output, 3 gradients,] mode, hidden_size,
    proj_size, num_layers, batch_first, dropout, train, bidirectional, …)
    """
    start = 10 if backward else 6
    x, hx = call.shape(0, rank=3), call.shape(4, rank=3)
    has_cell = bool(call.optional(5))
    mode = call.number(start)
    gates = _CUDNN_GATES.get(mode) if mode is not None else None
    gates = gates or (4 if has_cell else None)
    if gates is None:
        raise UnclearArguments
    first = call.value(start + 4) is True
    hidden = call.number(start + 1) or hx[2]
    layers = call.number(start + 3) or hx[0]
    batch, steps = (x[0], x[1]) if first else (x[1], x[0])
    return recurrent(
        batch,
        steps,
        (x[2], hidden),
        gates,
        layers=layers,
        directions=max(1, hx[0] // layers),
        projection=call.number(start + 2) or 0,
        dtype=call.dtype(0),
        direction="backward" if backward else "forward",
    )


def _miopen_rnn(call: TracedCall) -> MatrixWork:
    """As ``_cudnn_rnn``, without ``weight_buf`` and ``proj_size``."""

    def spread(given: Sequence[Any], blank: Any) -> list[Any]:
        return [*given[:3], blank, *given[3:7], blank, *given[7:]]

    spread_out = replace(
        call,
        dims=spread(call.dims, []),
        dtypes=spread(call.dtypes, ""),
        strides=spread(call.strides, []),
        concrete=spread(call.concrete, ""),
    )
    return _cudnn_rnn(spread_out)


def _torch_rnn(call: TracedCall, *, gates: int) -> MatrixWork:
    """``aten::lstm`` and its like: (input, hx, params[], biases, layers, dropout, train, …)."""
    x, weights = call.shape(0, rank=3), call.shapes(2)
    matrices = [w for w in weights if len(w) == 2]
    if len(matrices) < 2 or matrices[0][1] != x[2]:
        raise UnclearArguments
    # Positions of arguments after the list: bidirectional 7, batch_first 8.
    directions = 2 if call.value(7) is True else 1
    hidden = matrices[0][0] // gates
    projection = matrices[1][1] if matrices[1][1] != hidden else 0
    to_a_cell = 3 if projection else 2
    batch, steps = (x[0], x[1]) if call.value(8) is True else (x[1], x[0])
    return recurrent(
        batch,
        steps,
        (x[2], hidden),
        gates,
        layers=max(1, len(matrices) // (to_a_cell * directions)),
        directions=directions,
        projection=projection,
        dtype=call.dtype(0),
    )


def _onednn_rnn(call: TracedCall, *, backward: bool = False) -> MatrixWork:
    """``mkldnn_rnn_layer``: (input, w_ih, w_hh, b_ih, b_hh, hx, cx, …), one layer and direction."""
    x, entering, recurring = call.shape(0, rank=3), call.shape(1, rank=2), call.shape(2, rank=2)
    if entering[1] != x[2] or entering[0] != recurring[0]:
        raise UnclearArguments
    hidden = recurring[1]
    return recurrent(
        x[1],
        x[0],
        (x[2], hidden),
        entering[0] // hidden,
        dtype=call.dtype(0),
        direction="backward" if backward else "forward",
    )


_READERS: dict[str, Callable[..., MatrixWork]] = {
    "convolution": convolutions.convolution_forward,
    "convolution_backward": convolutions.convolution_backward,
    "convolution_dgrad": convolutions.input_gradient,
    "convolution_wgrad": convolutions.weight_gradient,
    "scaled": _scaled,
    "grouped": _grouped,
    "into": _into,
    "marlin": _marlin,
    "product": _product,
    "vector": _vector,
    "matmul": _matmul,
    "linear": _linear,
    "cudnn_rnn": _cudnn_rnn,
    "miopen_rnn": _miopen_rnn,
    "torch_rnn": _torch_rnn,
    "onednn_rnn": _onednn_rnn,
}


@cache
def readers() -> dict[str, Callable[[TracedCall], MatrixWork]]:
    """What reads a call, by the operation's name after ``aten::`` (or another namespace)."""
    rows = read_table(Path(__file__).with_name("operations.tsv"))
    return {row["operation"]: _reader(row["reader"], row["arguments"]) for row in rows}


def _reader(kind: str, arguments: str) -> Callable[[TracedCall], MatrixWork]:
    words = {"yes": True, "none": None}
    pairs = (argument.split("=") for argument in arguments.split())
    keywords: dict[str, Any] = {
        name: words[value] if value in words else int(value) for name, value in pairs
    }
    if kind == "attention":
        return partial(attention_call, AttentionArguments(**keywords))
    return partial(_READERS[kind], **keywords)
