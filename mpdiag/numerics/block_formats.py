"""Formats in which values share a scale: MXFP8, MXFP6, MXFP4, NVFP4, and FP8 by block, row or tensor.

``BLOCK_FORMATS`` has those with a name. A format is a value: ``block_format`` changes what it is asked
to, and ``dataclasses.replace`` everything. ``mpdiag.emulation.block_rounding`` rounds tensors to it.

Sources: *OCP Microscaling Formats (MX) Specification* v1.0 (blocks of 32, E8M0 scales, section 6.3);
NVIDIA, *Pretraining Large Language Models with NVFP4*, arXiv 2509.25149 (NVFP4, blocks of 16 × 16 for
weights); *Four Over Six*, arXiv 2512.02010; *DeepSeek-V3*, arXiv 2412.19437, section 3.3 (1 × 128 and
128 × 128). ``Chain`` says which library's arithmetic each format follows.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from mpdiag.numerics.formats import FP4_E2M1, FP6_E2M3, FP6_E3M2, FP8_E4M3, FP8_E5M2, FloatFormat

Scale = Literal["e8m0", "e4m3", "fp32", "fp32_power_of_two"]
"""What a block's scale is stored in. ``e8m0`` and ``fp32_power_of_two`` are powers of two."""

ScaleRounding = Literal["floor", "rceil", "ceil", "even"]
"""How an E8M0 scale follows from the largest magnitude of its block, m, and the element's largest
value, M = (2 - 2^-j)·2^E (OCP's rule is ``floor``, NVIDIA's ``rceil``; torchao has these four):

- ``floor``: 2^(⌊log2 m⌋ - E). Magnitudes above M times the scale are clipped.
- ``rceil``: the smallest power of two of at least m / M. Nothing is clipped.
- ``ceil``: 2^(⌈log2 m⌉ - E). Nothing is clipped.
- ``even``: ``floor`` of m after half a unit of the element's mantissa is added to it.
"""

Rounding = Literal["nearest", "stochastic"]
"""``nearest``: ties to even. ``stochastic``: up or down, with chances that keep the mean."""

Chain = Literal["torchao", "transformer_engine"]
"""The library that an E4M3 scale takes its order of operations from; the roundings in between differ.

- ``torchao``: ``nvfp4_quantize`` of torchao 0.18. A block's scale is at least 2^-6.
- ``transformer_engine``: TransformerEngine 2.x (August 2026). A block's scale may be a subnormal
  number or 0; of a block with scale 0 nothing is left.
"""

Shape = tuple[int, int] | Literal["row", "tensor"]
"""Rows and columns of a block. Columns lie along the axis that a product sums over. ``row``: as many
columns as there are; ``tensor``: all values."""


@dataclass(frozen=True)
class BlockFormat:
    """A format of values that share a scale.

    Attributes:
        name: The name used in Python and on the command line, such as ``"mxfp8_e4m3"``.
        label: The name printed for people.
        element: The format of a value after division by its scale. Values beyond its range become
            its largest one.
        block: Which values share a scale.
        scale: What a scale is stored in.
        scale_rounding: How E8M0 scales are rounded; None for other scales.
        tensor_scale: Whether an FP32 scale of the whole tensor multiplies the E4M3 scales of blocks.
        chain: The library that E4M3 scales take their arithmetic from.
        four_over_six: Whether each block's largest magnitude becomes 6 or 4, whichever leaves the
            smaller sum of absolute errors; 6 if both leave the same (TransformerEngine's default).
        rounding: How values are rounded to the element.

    Raises:
        ValueError: If the parts do not fit together.
    """

    name: str
    label: str
    element: FloatFormat
    block: Shape
    scale: Scale
    scale_rounding: ScaleRounding | None = None
    tensor_scale: bool = False
    chain: Chain = "torchao"
    four_over_six: bool = False
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        for what, value, known in (
            ("scale_rounding", self.scale_rounding, (*get_args(ScaleRounding), None)),
            ("rounding", self.rounding, get_args(Rounding)),
            ("scale", self.scale, get_args(Scale)),
            ("chain", self.chain, get_args(Chain)),
        ):
            if value not in known:
                words = ", ".join(str(name) for name in known)
                raise ValueError(f"{what} is {value!r}: choose one of {words}")
        if isinstance(self.block, tuple) and min(self.block) < 1:
            raise ValueError(f"a block has at least one row and one column, not {self.block}")
        if (self.scale == "e8m0") != (self.scale_rounding is not None):
            raise ValueError(f"{self.name}: scale_rounding is for E8M0 scales, which need one")
        if self.scale != "e4m3" and (self.tensor_scale or self.four_over_six):
            raise ValueError(f"{self.name}: tensor_scale and four_over_six are for E4M3 scales")
        if self.chain == "transformer_engine" and not self.tensor_scale:
            raise ValueError("TransformerEngine's chain has a scale of the tensor")
        if self.four_over_six and (self.element, self.chain) != (FP4_E2M1, "transformer_engine"):
            raise ValueError("four_over_six is for E2M1 and for TransformerEngine's chain")


def _mx(name: str, label: str, element: FloatFormat) -> BlockFormat:
    return BlockFormat(name, label, element, (1, 32), "e8m0", "rceil")


def _fp8(name: str, label: str, block: Shape, element: FloatFormat = FP8_E4M3) -> BlockFormat:
    return BlockFormat(name, label, element, block, "fp32")


_NVFP4 = BlockFormat("nvfp4", "NVFP4", FP4_E2M1, (1, 16), "e4m3", tensor_scale=True)
_NVFP4_TE = replace(
    _NVFP4, name="nvfp4_te", label="NVFP4 (TransformerEngine)", chain="transformer_engine"
)

BLOCK_FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (
        _fp8("fp8_e4m3", "FP8 E4M3, one scale a tensor", "tensor"),
        _fp8("fp8_e5m2", "FP8 E5M2, one scale a tensor", "tensor", FP8_E5M2),
        _fp8("fp8_tensor", "FP8 E4M3, one scale a tensor", "tensor"),
        _fp8("fp8_row", "FP8 E4M3, one scale a row", "row"),
        _fp8("fp8_1x128", "FP8 E4M3, blocks of 1 × 128", (1, 128)),
        _fp8("fp8_128x128", "FP8 E4M3, blocks of 128 × 128", (128, 128)),
        _mx("mxfp8_e4m3", "MXFP8 E4M3", FP8_E4M3),
        _mx("mxfp8_e5m2", "MXFP8 E5M2", FP8_E5M2),
        _mx("mxfp6_e3m2", "MXFP6 E3M2", FP6_E3M2),
        _mx("mxfp6_e2m3", "MXFP6 E2M3", FP6_E2M3),
        _mx("mxfp4", "MXFP4", FP4_E2M1),
        _NVFP4,
        _NVFP4_TE,
    )
}


def block_format(
    name: str,
    *,
    block: str | None = None,
    scale_rounding: ScaleRounding | None = None,
    power_of_two: bool = False,
    four_over_six: bool = False,
    rounding: Rounding = "nearest",
) -> BlockFormat:
    """A format by its name, in any case, with what is changed in it.

    Args:
        name: One of ``BLOCK_FORMATS``.
        block: Another shape of blocks: rows × columns as ``"16x16"``, ``"row"`` or ``"tensor"``.
        scale_rounding: For E8M0 scales; ``"rceil"`` if not given.
        power_of_two: Whether FP32 scales are rounded to powers of two, so that no value overflows.
        four_over_six: For NVFP4; its scales then follow TransformerEngine's chain.
        rounding: Of values.

    Raises:
        ValueError: If there is no such format, or it has no such part.
    """
    try:
        fmt = BLOCK_FORMATS[name.lower()]
    except KeyError:
        known = ", ".join(BLOCK_FORMATS)
        raise ValueError(f"there is no block format {name!r}: choose one of {known}") from None
    fmt = replace(fmt, rounding=rounding)
    if block is not None:
        fmt = replace(fmt, block=_shape(block))
    if scale_rounding is not None:
        fmt = replace(fmt, scale_rounding=scale_rounding)
    if power_of_two:
        if fmt.scale != "fp32":
            raise ValueError(f"{fmt.name}: power_of_two is for FP32 scales")
        fmt = replace(fmt, scale="fp32_power_of_two")
    if four_over_six:
        fmt = replace(fmt, four_over_six=True, chain="transformer_engine")
    return fmt


def _shape(text: str) -> Shape:
    if text == "row":
        return "row"
    if text == "tensor":
        return "tensor"
    rows, x, columns = text.partition("x")
    if not (x and rows.isdecimal() and columns.isdecimal()):
        raise ValueError(f"there is no block {text!r}: give rows x columns, row or tensor")
    return int(rows), int(columns)
