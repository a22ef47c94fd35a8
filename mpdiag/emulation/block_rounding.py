"""Rounding of tensors to formats in which values share a scale, on any device.

Every value x becomes q · decode, where q is x · encode rounded to the element and ``encode`` and
``decode`` belong to its block. How they follow from the block's largest magnitude is the arithmetic of
the engine that is named at the format, in FP32 and in its order of operations.

Sources: ``to_mx`` and ``nvfp4_quantize`` of torchao 0.18; TransformerEngine's (August 2026)
``core_nvfp4.cuh``, ``quantize_4over6_nvfp4.cuh``, ``dequantize_nvfp4.cuh`` and, for FP32 scales, its
tests' ``quantize_scale_calc.py``.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.emulation.rounding import round_to, times_power_of_two
from mpdiag.numerics.block_formats import BlockFormat, Rounding, ScaleRounding, Shape, block_format
from mpdiag.numerics.formats import FP4_E2M1, FP8_E4M3, FloatFormat

_FP32_MAX = torch.finfo(torch.float32).max
Scales = tuple[Tensor, Tensor]
"""What values are multiplied by before rounding to the element, and after it."""


def fake_quantize(
    x: Tensor,
    format: str | BlockFormat,  # noqa: A002  # the word people look for
    axis: int = -1,
    *,
    scale_rounding: ScaleRounding | None = None,
    rounding: Rounding = "nearest",
    generator: CounterGenerator | torch.Generator | None = None,
    four_over_six: bool = False,
    block: str | None = None,
    power_of_two: bool = False,
) -> Tensor:
    """Round a tensor to a block format and back, with the arithmetic of torchao or TransformerEngine.

    The last block of a row or column may be shorter than the others. A block with NaN becomes NaN
    whole, as does a tensor of NVFP4; a block with infinity has no finite largest value either, and
    only MX formats keep something of its other values.

    Args:
        x: Floating point, of at least two axes for blocks of several rows. FP16, BF16 and FP32 are
            read exactly; FP64 is rounded to FP32 first.
        format: A name: ``fp8_e4m3`` or ``fp8_tensor``, ``fp8_e5m2``, ``fp8_row``, ``fp8_1x128``,
            ``fp8_128x128``, ``mxfp8_e4m3``, ``mxfp8_e5m2``, ``mxfp6_e3m2``, ``mxfp6_e2m3``, ``mxfp4``,
            ``nvfp4`` (torchao's scales) or ``nvfp4_te`` (TransformerEngine's). Or a ``BlockFormat``,
            which has the options below in itself.
        axis: The axis along which blocks lie: the one that the product sums over. Blocks of several
            rows take their rows from the last of the other axes.
        scale_rounding: Of MX formats' scales: ``floor`` (torchao's default), ``rceil`` (NVIDIA's, and
            the default here), ``ceil`` or ``even``.
        rounding: ``nearest``, ties to even, or ``stochastic``.
        generator: Where the random bits of stochastic rounding come from. A ``torch.Generator`` gives
            one number, which is the seed of a ``CounterGenerator``.
        four_over_six: NVFP4: scale each block's largest magnitude to 4 instead of 6 where that
            leaves the smaller error. Scales are then TransformerEngine's.
        block: Another shape of blocks, such as ``16x16`` for NVFP4 weights.
        power_of_two: FP32 scales: round them to powers of two.

    Returns:
        A new tensor of the same shape and dtype, without gradient.

    Raises:
        ValueError: If the format is not known, an option does not fit it, a block of several rows
            meets a vector, or stochastic rounding has no generator.
        TypeError: If ``x`` is not floating point.
    """
    if not x.is_floating_point():
        raise TypeError(f"fake_quantize rounds floating-point tensors, not {x.dtype}")
    if isinstance(format, str):
        fmt = block_format(
            format,
            block=block,
            scale_rounding=scale_rounding,
            power_of_two=power_of_two,
            four_over_six=four_over_six,
            rounding=rounding,
        )
    elif block or scale_rounding or power_of_two or four_over_six or rounding != "nearest":
        raise ValueError(
            "a BlockFormat has its options in itself: change it by dataclasses.replace"
        )
    else:
        fmt = format
    if fmt.rounding == "nearest":
        return quantize_blocks(x, fmt, axis)
    if generator is None:
        raise ValueError("stochastic rounding needs generator=mpdiag.CounterGenerator(seed, step)")
    if isinstance(generator, torch.Generator):
        drawn = torch.randint(2**62, (), generator=generator, device=generator.device)
        generator = CounterGenerator(int(drawn))
    return quantize_blocks(x, fmt, axis, generator.bits(x.shape, x.device))


@torch.no_grad()
def quantize_blocks(
    x: Tensor,
    fmt: BlockFormat,
    axis: int = -1,
    bits: Tensor | None = None,
    tensor_amax: Tensor | None = None,
) -> Tensor:
    """Round to a block format and back.

    Args:
        x: Floating point.
        fmt: The format.
        axis: Along which blocks lie.
        bits: For stochastic rounding: random integers in [0, 2^32) of x's shape.
        tensor_amax: The largest magnitude of the tensor that x is a part of, without axes and in FP32;
            None: of x.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: If a block of several rows meets a vector.
    """
    if x.numel() == 0:
        return x.clone()
    blocks, back = _blocks(x.float(), fmt.block, axis)
    noise = None if bits is None else _blocks(bits, fmt.block, axis)[0]
    amax = blocks.abs().amax((-3, -1), keepdim=True)
    if tensor_amax is not None and fmt.block == "tensor":
        amax = tensor_amax.expand_as(amax)

    def elements(encode: Tensor) -> Tensor:
        largest = fmt.element.max  # the clamp keeps NaN, and no value left of it is out of range
        return _to_element((blocks * encode).clamp_(-largest, largest), fmt.element, noise)

    if fmt.scale == "e4m3":
        whole = amax.amax() if tensor_amax is None else tensor_amax
        if fmt.four_over_six:
            return back(_four_over_six(blocks, amax, whole, elements)).to(x.dtype)
        chain = _torchao_scales if fmt.chain == "torchao" else _te_scales
        encode, decode = chain(amax, whole, fmt)
    elif fmt.scale == "e8m0":
        encode, decode = _mx_scales(amax, fmt)
    else:
        encode, decode = _fp32_scales(amax, fmt, min(torch.finfo(x.dtype).max, _FP32_MAX))
    return back(elements(encode).mul_(decode)).to(x.dtype)


def _to_element(values: Tensor, element: FloatFormat, bits: Tensor | None) -> Tensor:
    """FP32 values within an element's range rounded to it: as ``round_to``, but several times faster.

    Args:
        values: FP32; NaN stays NaN.
        element: What to round to.
        bits: None for nearest, ties to even; else random integers in [0, 2^32) of the values' shape: a
            value goes to one of its two neighbours, and to the nearer one more often, so that the mean
            is kept.
    """
    powers = (values.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^e ≤ |x| < 2^(e+1)
    units = powers.clamp_(min=element.smallest_normal).mul_(2.0**-element.mantissa_bits)
    if bits is None:  # in FP32, a sum with 1.5 · 2^23 units is a whole number of units
        far = units.mul_(1.5 * 2.0**23)
        return (values + far).sub_(far).copysign_(values)
    steps = values.abs() / units  # exact
    below = steps.floor()
    above = bits < steps.sub_(below).mul_(2.0**32).to(torch.int64)
    return below.add_(above).mul_(units).copysign_(values)


def _blocks(x: Tensor, block: Shape, axis: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A tensor as blocks, padded by zeros, and the way back.

    Returns:
        Of shape (matrices, rows of blocks, rows of one, columns of blocks, columns of one), and a
        function that takes such a tensor to x's shape.
    """
    moved = x.reshape(1, -1) if block == "tensor" else torch.atleast_1d(x).movedim(axis, -1)
    rows, columns = block if isinstance(block, tuple) else (1, moved.shape[-1])
    if rows > 1 and moved.ndim < 2:
        raise ValueError(f"blocks of {rows} rows need a tensor of two axes, not of shape {x.shape}")
    height, width = moved.shape[-2] if rows > 1 else 1, moved.shape[-1]
    matrices = moved.reshape(-1, height, width)
    pads = (0, -width % columns, 0, -height % rows)
    padded = F.pad(matrices, pads) if any(pads) else matrices
    count, tall, wide = padded.shape

    def back(blocks: Tensor) -> Tensor:
        whole = blocks.reshape(count, tall, wide)[:, :height, :width].reshape(moved.shape)
        return (whole if block == "tensor" else whole.movedim(-1, axis)).reshape(x.shape)

    return padded.reshape(count, tall // rows, rows, wide // columns, columns), back


def _mx_scales(amax: Tensor, fmt: BlockFormat) -> Scales:
    """Of E8M0: powers of two from 2^-127 to 2^127, read off the bits of FP32 numbers.

    Torchao's arithmetic at the lower end is kept: a block that needs 2^-127 is divided by 2^-126, or
    by 1 if rounded by ``rceil``, and is multiplied by 2^-127 afterwards.
    Torchao takes ``rceil`` from an FP32 logarithm where it does not run on Blackwell. If m / M exceeds
    a power of two by less than the logarithm resolves, that is one exponent lower than the exact rule
    of the hardware, which is taken here.
    """
    rule = fmt.scale_rounding
    of = _over(amax, fmt.element.max) if rule == "rceil" else amax
    bits = of.view(torch.int32)
    if rule == "even":
        bits = bits + (1 << (22 - fmt.element.mantissa_bits))
    exponent, mantissa = (bits >> 23) - 127, bits & 0x7FFFFF
    if rule == "rceil":
        # Below 2^-126 there is no leading 1: half of the mantissa's range is 2^-127.
        exponent = exponent + (mantissa > torch.where(exponent == -127, 1 << 22, 0)).int()
    else:
        exponent = exponent - fmt.element.max_exponent
        if rule == "ceil":
            exponent = exponent + (mantissa > 0).int()
    exponent = exponent.clamp(-127, 127)
    lowest = torch.where(exponent == -127, 0 if rule == "rceil" else -126, exponent)
    one = torch.where(amax.isnan(), amax, torch.ones_like(amax))
    return times_power_of_two(one, -lowest), times_power_of_two(one, exponent)


def _fp32_scales(amax: Tensor, fmt: BlockFormat, largest: float) -> Scales:
    """Of FP32: M / m, rounded down to a power of two if asked; 1 for a block of zeros."""
    encode = torch.full_like(amax, fmt.element.max) / amax
    encode = torch.where(encode.isinf(), torch.full_like(encode, largest), encode)
    if fmt.scale == "fp32_power_of_two":
        down = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
        encode = torch.where(encode.isnan(), encode, down)
    encode = torch.where(amax == 0, torch.ones_like(encode), encode)
    return encode, encode.reciprocal()


def _torchao_scales(amax: Tensor, whole: Tensor, fmt: BlockFormat) -> Scales:
    """Of NVFP4 by torchao. Of a tensor of zeros its reference makes NaN; here it stays zero."""
    product = FP8_E4M3.max * fmt.element.max
    whole = _over(whole, product) if fmt.tensor_scale else torch.ones_like(whole)
    whole = torch.where(whole == 0, torch.ones_like(whole), whole)
    scale = _over(amax, fmt.element.max) / whole
    scale = round_to(scale.clamp(FP8_E4M3.smallest_normal, FP8_E4M3.max), FP8_E4M3)
    return whole.reciprocal().clamp(max=_FP32_MAX) / scale, whole * scale


def _te_scales(amax: Tensor, whole: Tensor, fmt: BlockFormat) -> Scales:
    """Of NVFP4 by TransformerEngine."""
    product = FP8_E4M3.max * fmt.element.max
    whole_encode = _te_encode(whole, product)
    scale = amax * (whole_encode * (1 / fmt.element.max))
    scale = round_to(scale.clamp(max=FP8_E4M3.max), FP8_E4M3)
    return _te_inverse(scale, whole_encode), scale * whole * (1 / product)


def _te_encode(whole: Tensor, product: float) -> Tensor:
    """What values are multiplied by so that the tensor's largest magnitude becomes ``product``."""
    encode = (torch.full_like(whole, product) / whole).clamp(max=_FP32_MAX)
    return torch.where(encode == 0, torch.ones_like(encode), encode)


def _te_inverse(scale: Tensor, whole_encode: Tensor) -> Tensor:
    return (scale * whole_encode.reciprocal()).reciprocal().clamp(max=_FP32_MAX)


def _four_over_six(
    blocks: Tensor, amax: Tensor, whole: Tensor, elements: Callable[[Tensor], Tensor]
) -> Tensor:
    """Each block with its largest magnitude at 6, or at 4 if that leaves the smaller error.

    The tensor's scale is bounded by 256 instead of 448, so that a block's scale can grow by half. The
    errors that decide are of values divided by 6 · 256, and summed in the kernel's order; those that
    are returned were multiplied by its reciprocal.
    """
    product = 256.0 * FP4_E2M1.max
    whole_encode = _te_encode(whole, product)
    base = _over(amax, FP4_E2M1.max) * whole_encode
    found, errors = [], []
    for expand in (1.0, 1.5):
        scale = round_to((base * expand).clamp(max=FP8_E4M3.max), FP8_E4M3)
        values = elements(_te_inverse(scale, whole_encode))
        found.append(values * (scale * whole * (1 / product)))
        errors.append(_error(_over(values * scale * whole, product) - blocks))
    return torch.where(errors[1] < errors[0], found[1], found[0])


def _over(values: Tensor, divisor: float) -> Tensor:
    """A correctly rounded quotient: on a GPU, dividing by a number multiplies by its reciprocal."""
    return values / torch.full_like(values, divisor)


def _error(difference: Tensor) -> Tensor:
    """Σ|difference| of each block, columns first and then rows, in TransformerEngine's order."""
    total = torch.zeros_like(difference[..., :1])
    for column in difference.abs().split(1, dim=-1):
        total = total + column
    while total.shape[-3] > 1:  # rows: the first half and the second
        half = total.shape[-3] // 2
        rest = total[..., 2 * half :, :, :]
        total = total[..., :half, :, :] + total[..., half : 2 * half, :, :]
        total = torch.cat([total, rest], dim=-3)
    return total
