"""Matrix work from plain sizes: M, N, K, FLOP and bytes of what networks are made of.

Everything is an (implicit) matrix product C[M, N] = A[M, K] · B[K, N], ``batch`` times:

=============  =======================  ====================  =======================  =============
kind           M                        N                     K                        batch
=============  =======================  ====================  =======================  =============
matmul         rows                     columns               inner                    batch
convolution    images × output pixels   output channels/g     input channels/g × taps  groups
… its dgrad    images × output pixels   inp. channels/g × t.  output channels/g        groups
… its wgrad    output channels/g        inp. channels/g × t.  images × output pixels   groups
rnn            batch                    gates × hidden        hidden                   steps × layers
attention      queries                  keys                  head                     all heads
=============  =======================  ====================  =======================  =============

FLOP are those the operation calls for, whatever algorithm the kernel uses. Bytes are the least that
must be moved: each operand once.
"""

from dataclasses import dataclass
from typing import Literal

from mpdiag.hardware.alignment import BYTES

Shape = tuple[int, ...]
WorkKind = Literal["matmul", "convolution", "rnn", "attention"]
Direction = Literal["forward", "dgrad", "wgrad", "backward"]


@dataclass(frozen=True)
class MatrixWork:
    """The matrix work of one call.

    Attributes:
        kind: The kind of operation.
        m, n, k: See the table above. 0 means not known, as for a convolution whose stride or kernel
            the trace lacks; then ``flops`` is 0, too.
        batch: Independent products of that size.
        groups: Groups of a convolution.
        dtype: Dtype of the operands by mpdiag's name (``"fp16"``); None where it is not known.
        flops: Multiplications and additions; 0 where not known. Where the trace leaves open how
            many (a mask, sequences of lengths it does not tell), the most it can be.
        fewest: The least it can be; None where ``flops`` is exact.
        bytes: The least to be moved, at the size of ``dtype`` (FP32 if None); 0 where not known.
        leading: Values from one row (or column) to the next of A, B and C, where strides are known.
        sizes: The dimensions that should be aligned, by name.
        depthwise: A convolution with one input channel to a group.
        channels_last: Whether a convolution's input lies so; None where strides are not known.
    """

    kind: WorkKind
    m: int
    n: int
    k: int
    batch: int = 1
    groups: int = 1
    dtype: str | None = None
    flops: int = 0
    bytes: int = 0
    leading: tuple[int, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    depthwise: bool = False
    channels_last: bool | None = None
    fewest: int | None = None

    @property
    def least_flops(self) -> int:
        """The least FLOP: ``flops`` where that is exact."""
        return self.flops if self.fewest is None else self.fewest


def matmul(
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    *,
    dtype: str | None = None,
    leading: tuple[int, ...] = (),
) -> MatrixWork:
    """C[m, n] = A[m, k] · B[k, n], ``batch`` times."""
    return MatrixWork(
        "matmul",
        m,
        n,
        k,
        batch,
        dtype=dtype,
        flops=2 * m * n * k * batch,
        bytes=batch * (m * k + k * n + m * n) * _size(dtype),
        leading=leading,
        sizes=(("M", m), ("N", n), ("K", k)),
    )


def convolution(
    images: int,
    channels: tuple[int, int],
    taps: int,
    pixels: tuple[int, int],
    *,
    groups: int = 1,
    dtype: str | None = None,
    direction: Direction = "forward",
    transposed: bool = False,
    channels_last: bool | None = None,
) -> MatrixWork:
    """A convolution of any rank, or one of its two gradients.

    Args:
        images: How many.
        channels: Input and output channels, all groups together.
        taps: Positions of the kernel: 9 for 3 × 3.
        pixels: Input and output positions; 0 where not known.
        groups: As in torch.
        dtype: Of the operands.
        direction: Which of the three products; ``backward`` is both gradients, M, N and K being
            those of the input's.
        transposed: A transposed convolution, whose forward is the dgrad of an ordinary one with
            input and output exchanged.
        channels_last: Whether the input lies so in memory.
    """
    channels_in, channels_out = channels
    narrow, wide = channels_in // groups, channels_out // groups
    if transposed:
        m, n, k = images * pixels[0], wide * taps, narrow
        products = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (k, n, m)}
    else:
        m, n, k = images * pixels[1], wide, narrow * taps
        products = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    chosen = products["dgrad" if direction == "backward" else direction]
    passes = 2 if direction == "backward" else 1
    values = images * (channels_in * pixels[0] + channels_out * pixels[1])
    weights = channels_in * wide * taps
    return MatrixWork(
        "convolution",
        *chosen,
        batch=groups,
        groups=groups,
        dtype=dtype,
        flops=2 * m * n * k * groups * passes,
        bytes=(values + weights) * _size(dtype) * passes if all(pixels) and taps else 0,
        sizes=(("input channels", channels_in), ("output channels", channels_out)),
        depthwise=groups > 1 and narrow == 1,
        channels_last=channels_last,
    )


def recurrent(
    batch: int,
    steps: int,
    sizes: tuple[int, int],
    gates: int,
    *,
    layers: int = 1,
    directions: int = 1,
    projection: int = 0,
    dtype: str | None = None,
    direction: Direction = "forward",
) -> MatrixWork:
    """All products of an RNN (1 gate), GRU (3) or LSTM (4).

    Args:
        batch: Sequences.
        steps: Time steps.
        sizes: Input and hidden size.
        gates: Of a cell.
        layers: Stacked.
        directions: 2 where bidirectional.
        projection: ``proj_size`` of an LSTM, 0 for none.
        dtype: Of the operands.
        direction: ``backward`` is both gradients.
    """
    entering, hidden = sizes
    leaving = projection or hidden
    rows = batch * steps
    per_cell = 0  # multiplications for one sequence and step
    for layer in range(layers):
        source = entering if layer == 0 else leaving * directions
        per_cell += directions * (gates * hidden * (source + leaving) + hidden * projection)
    passes = 1 if direction == "forward" else 2
    values = rows * (entering + directions * leaving * layers)
    named_sizes = [("batch", batch), ("input size", entering), ("hidden size", hidden)]
    if projection:
        named_sizes.append(("projection size", projection))
    return MatrixWork(
        "rnn",
        batch,
        gates * hidden,
        leaving,
        batch=steps * layers * directions,
        dtype=dtype,
        flops=2 * rows * per_cell * passes,
        bytes=(values + per_cell) * _size(dtype) * passes,
        sizes=tuple(named_sizes),
    )


def attention(
    heads: int,
    lengths: tuple[int, int],
    widths: tuple[int, int],
    *,
    stored_heads: int | None = None,
    dtype: str | None = None,
    direction: Direction = "forward",
) -> MatrixWork:
    """Scaled dot-product attention: the scores, and the sum of values they weigh.

    Args:
        heads: Heads of all sequences together.
        lengths: Queries and keys.
        widths: Of a head: of queries and keys, of values.
        stored_heads: Heads of keys and values, where queries share them; default: ``heads``.
        dtype: Of the operands.
        direction: ``backward`` computes the scores again, then four gradients.
    """
    queries, keys = lengths
    width, value_width = widths
    per_pair = width + value_width if direction == "forward" else 3 * width + 2 * value_width
    stored = heads if stored_heads is None else stored_heads
    values = (heads * queries + stored * keys) * (width + value_width)
    return MatrixWork(
        "attention",
        queries,
        keys,
        width,
        batch=heads,
        dtype=dtype,
        flops=2 * heads * queries * keys * per_pair,
        bytes=values * _size(dtype) * (1 if direction == "forward" else 2),
        sizes=(("head", width), ("value head", value_width)),
    )


def _size(dtype: str | None) -> int:
    return BYTES[dtype or "fp32"]
