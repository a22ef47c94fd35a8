"""The matrix work of an operation in a trace: from the shapes it was called with.

``matrix_work`` knows PyTorch's matrix products, convolutions, RNNs and attentions by name, and the
positions of their arguments. Its input comes from a file and is checked: an implausible shape gives
None, never an exception.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from mpdiag.hardware.matrix_work import Direction, MatrixWork, matmul, recurrent
from mpdiag.tensorcores.work import attention_calls, convolutions, scaled_products
from mpdiag.tensorcores.work.traced_call import TracedCall, UnclearArguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpdiag.hardware.matrix_work import Shape

__all__ = ["MatrixWork", "OperationTime", "TracePhase", "matrix_work"]

TracePhase = Literal["forward", "backward", ""]

_LARGEST = 1 << 80
"""FLOP or bytes of one call beyond which its sizes are damage."""


@dataclass(frozen=True)
class OperationTime:
    """What the kernels of one operation of one module took, all calls together, in microseconds.

    Attributes:
        op: The operation, such as ``"aten::addmm"``.
        module: The module that called it, "" where unknown.
        work: Its matrix work in one call; None for what is no matrix work.
        dtype: Of the kernels, our name; None where unknown.
        calls: How many.
        time_us: Of all its kernels, the sum of those below.
        tensor_core_us, cuda_core_us, helper_us, layout_us, other_us, unknown_us: By verdict.
        kernel_alignment: The smallest alignment in its matrix kernels' names, in values.
        kernel_generation: The oldest generation its Tensor Core kernels were written for.
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
    kernel_generation: str | None = None
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
    read = _READERS.get(name)
    if read is None:
        return None
    call = TracedCall(dims, dtypes, strides, concrete_inputs)
    try:
        work = read(call)
    except (IndexError, ZeroDivisionError, UnclearArguments):
        return None
    return work if max(work.flops, work.bytes) <= _LARGEST else None


# -- matrix products -------------------------------------------------------------------------------


def _leading(call: TracedCall, a: int, b: int, n: int) -> Shape:
    """Leading dimensions of A, B and a contiguous C; () where strides are not known."""
    found = []
    for index in (a, b):
        strides = call.stride(index)[-2:]
        if len(strides) < 2:
            return ()
        found.append(strides[0] if strides[1] == 1 else strides[1])
    return (*found, n)


def _product(a: int) -> Callable[[TracedCall], MatrixWork]:
    """``mm`` and ``bmm``: two matrices at positions ``a`` and ``a + 1``."""

    def read(call: TracedCall) -> MatrixWork:
        left, right = call.shape(a), call.shape(a + 1)
        if len(left) < 2 or len(left) != len(right) or left[-1] != right[-2]:
            raise UnclearArguments
        n = right[-1]
        return matmul(
            left[-2],
            n,
            left[-1],
            math.prod(left[:-2]),
            dtype=call.dtype(a),
            leading=_leading(call, a, a + 1, n),
        )

    return read


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


def _vector(a: int) -> Callable[[TracedCall], MatrixWork]:
    """``mv``: a matrix at ``a`` and a vector."""

    def read(call: TracedCall) -> MatrixWork:
        matrix, vector = call.shape(a, rank=2), call.shape(a + 1, rank=1)
        if matrix[1] != vector[0]:
            raise UnclearArguments
        return matmul(matrix[0], 1, matrix[1], dtype=call.dtype(a))

    return read


# -- RNNs ------------------------------------------------------------------------------------------

_CUDNN_GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # rnn_relu, rnn_tanh, lstm, gru


def _cudnn_rnn(*, backward: bool) -> Callable[[TracedCall], MatrixWork]:
    """``_cudnn_rnn`` and its backward, which has ``output`` and three gradients in between.

    (input, weight[], weight_stride0, weight_buf, hx, cx, [output, 3 gradients,] mode, hidden_size,
    proj_size, num_layers, batch_first, dropout, train, bidirectional, …)
    """
    start = 10 if backward else 6

    def read(call: TracedCall) -> MatrixWork:
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

    return read


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
    return _cudnn_rnn(backward=False)(spread_out)


def _torch_rnn(gates: int) -> Callable[[TracedCall], MatrixWork]:
    """``aten::lstm`` and its like: (input, hx, params[], biases, layers, dropout, train, …)."""

    def read(call: TracedCall) -> MatrixWork:
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

    return read


def _onednn_rnn(direction: Direction) -> Callable[[TracedCall], MatrixWork]:
    """``mkldnn_rnn_layer``: (input, w_ih, w_hh, b_ih, b_hh, hx, cx, …), one layer and direction."""

    def read(call: TracedCall) -> MatrixWork:
        x, entering, recurring = call.shape(0, rank=3), call.shape(1, rank=2), call.shape(2, rank=2)
        if entering[1] != x[2] or entering[0] != recurring[0]:
            raise UnclearArguments
        hidden = recurring[1]
        gates = entering[0] // hidden
        sizes = (x[2], hidden)
        return recurrent(x[1], x[0], sizes, gates, dtype=call.dtype(0), direction=direction)

    return read


_READERS: dict[str, Callable[[TracedCall], MatrixWork]] = {
    **convolutions.READERS,
    **attention_calls.READERS,
    **scaled_products.READERS,
    "mm": _product(0),
    "bmm": _product(0),
    "_int_mm": _product(0),
    "addmm": _product(1),
    "addmm_": _product(1),
    "_addmm_activation": _product(1),
    "baddbmm": _product(1),
    "baddbmm_": _product(1),
    "addbmm": _product(1),
    "mv": _vector(0),
    "addmv": _vector(1),
    "addmv_": _vector(1),
    "matmul": _matmul,
    "linear": _linear,
    "mkldnn_linear": _linear,
    "_mkl_linear": _linear,
    "mkl_linear": _linear,
    "_cudnn_rnn": _cudnn_rnn(backward=False),
    "_cudnn_rnn_backward": _cudnn_rnn(backward=True),
    "miopen_rnn": _miopen_rnn,
    "lstm": _torch_rnn(4),
    "gru": _torch_rnn(3),
    "rnn_tanh": _torch_rnn(1),
    "rnn_relu": _torch_rnn(1),
    "mkldnn_rnn_layer": _onednn_rnn("forward"),
    "mkldnn_rnn_layer_backward": _onednn_rnn("backward"),
}
"""By the name after ``aten::`` (or another namespace)."""
