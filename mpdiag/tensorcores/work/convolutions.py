"""Convolutions as a trace records them: the positions of each operation's arguments."""

import math
from typing import Any

from mpdiag.tensorcores.work.products import Direction, MatrixWork, Shape, convolution
from mpdiag.tensorcores.work.traced_call import TracedCall, UnclearArguments


def _output_pixels(
    size: Shape, kernel: Shape, stride: Shape | None, padding: Shape | None, dilation: Shape | None
) -> int:
    """Number of output pixels of a convolution; 0 if the trace does not say enough."""
    if stride is None or padding is None or dilation is None:
        return 0
    if not len(size) == len(kernel) == len(stride) == len(padding) == len(dilation):
        return 0
    if not all(stride):
        return 0
    return math.prod(
        max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1)
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )


def _channels_last(call: TracedCall, index: int) -> bool | None:
    strides = call.stride(index)
    return strides[1] == 1 if len(strides) >= 3 else None


def convolution_forward(
    call: TracedCall,
    *,
    stride: int = 3,
    padding: int = 4,
    dilation: int | None = 5,
    transposed: int | None = None,
    groups: int | None = None,
) -> MatrixWork:
    """A forward convolution with its arguments at these positions.

    Args:
        call: The call.
        stride: Position of the stride.
        padding: Position of the padding.
        dilation: Position of the dilation; None for an operation without one.
        transposed: Position of the ``transposed`` flag; None for an operation without one.
        groups: Position of the groups, which the shapes of a transposed convolution do not show;
            if ``transposed`` is None, the operation is always transposed.
    """
    x, weight = call.shape(0), call.shape(1)
    rank = len(weight) - 2
    if rank < 1 or len(x) not in (rank + 1, rank + 2):
        raise UnclearArguments
    if len(x) == rank + 1:  # one image without its batch dimension
        x = (1, *x)
    flipped = groups is not None and (transposed is None or call.value(transposed) is True)
    if flipped:  # weight [input channels, output channels / groups, …]
        assert groups is not None
        count = call.number(groups) or 1
        ends, fits = (x[1], weight[1] * count), x[1] == weight[0] and not x[1] % count
        out = 0  # FLOP follow from the input's pixels; only the bytes would need the output's
    else:
        count = x[1] // weight[1]
        ends, fits = (x[1], weight[0]), x[1] == weight[1] * count and not weight[0] % count
        steps = (1,) * rank if dilation is None else call.numbers(dilation, rank)
        out = _output_pixels(
            x[2:], weight[2:], call.numbers(stride, rank), call.numbers(padding, rank), steps
        )
    if count < 1 or not fits:
        raise UnclearArguments
    return convolution(
        x[0],
        ends,
        math.prod(weight[2:]),
        (math.prod(x[2:]), out),
        groups=count,
        dtype=call.dtype(0),
        transposed=flipped,
        channels_last=_channels_last(call, 0),
    )


def convolution_backward(
    call: TracedCall,
    *,
    gradient: int = 0,
    x: int = 1,
    weight: int = 2,
    flag: int | None = 7,
    mask: int = 10,
) -> MatrixWork:
    """Both gradients, or those in the mask; ``flag`` is the position of ``transposed``."""
    dy, source, kernel = call.shape(gradient), call.shape(x), call.shape(weight)
    if not len(dy) == len(source) == len(kernel) >= 3 or dy[0] != source[0]:
        raise UnclearArguments
    flipped = flag is not None and call.value(flag) is True
    ends, groups = _ends(kernel, source[1], dy[1], flipped)
    return convolution(
        source[0],
        ends,
        math.prod(kernel[2:]),
        (math.prod(source[2:]), math.prod(dy[2:])),
        groups=groups,
        dtype=call.dtype(gradient),
        direction=_asked(call.value(mask)),
        transposed=flipped,
        channels_last=_channels_last(call, x),
    )


def input_gradient(call: TracedCall) -> MatrixWork:
    """``cudnn_convolution_backward_input``: (input size, gradient, weight, …), before torch 1.11.

    The input's size is not a tensor, and old traces lack it: the bytes stay unknown, the FLOP do not.
    """
    dy, kernel = call.shape(1), call.shape(2)
    groups = call.number(6) or 1
    if len(dy) != len(kernel) or len(dy) < 3 or dy[1] != kernel[0] or kernel[0] % groups:
        raise UnclearArguments
    return convolution(
        dy[0],
        (kernel[1] * groups, kernel[0]),
        math.prod(kernel[2:]),
        (0, math.prod(dy[2:])),
        groups=groups,
        dtype=call.dtype(1),
        direction="dgrad",
    )


def weight_gradient(call: TracedCall) -> MatrixWork:
    """``cudnn_convolution_backward_weight``: (weight size, gradient, input, …), before torch 1.11.

    Without the weight's size the taps and N are unknown; only the channels can be judged.
    """
    dy, x = call.shape(1), call.shape(2)
    groups = call.number(6) or 1
    if len(dy) != len(x) or len(dy) < 3 or dy[0] != x[0] or dy[1] % groups or x[1] % groups:
        raise UnclearArguments
    size = call.numbers(0, len(x))
    return convolution(
        x[0],
        (x[1], dy[1]),
        math.prod(size[2:]) if size is not None and len(size) == len(x) else 0,
        (math.prod(x[2:]), math.prod(dy[2:])),
        groups=groups,
        dtype=call.dtype(1),
        direction="wgrad",
        channels_last=_channels_last(call, 2),
    )


def _ends(kernel: Shape, entering: int, leaving: int, flipped: bool) -> tuple[tuple[int, int], int]:
    """Input and output channels, by the weight's shape, and groups."""
    groups = (leaving if flipped else entering) // kernel[1]
    ends = (kernel[0], kernel[1] * groups) if flipped else (kernel[1] * groups, kernel[0])
    if groups < 1 or ends != (entering, leaving):
        raise UnclearArguments
    return ends, groups


def _asked(mask: Any) -> Direction:
    """The gradients that an ``output_mask`` asks for; both if the trace does not say."""
    if not isinstance(mask, (list, tuple)) or len(mask) < 2 or all(mask[:2]):
        return "backward"
    return "dgrad" if mask[0] else "wgrad"
