"""Ten million values rounded to block formats, by mpdiag and by torchao, bit for bit.

    python studies/block_formats.py --json studies/results/block-formats.json
    python studies/block_formats.py --blocks 1000                                    # some

Values are those of ``planted``: normal ones of many sizes, ties, FP32's and BF16's subnormals, zeros,
infinities, NaN, and any bits at all. Each row of the table is a format, a rule for its scales, a dtype
and an axis. A block counts as different if one of its values has other bits. NVFP4 is compared without
infinities and NaN: with them its tensors are NaN whole. For ``rceil`` on FP32, torchao takes a
logarithm in FP32; blocks whose exponent differs from the exact one for that reason are counted apart
(``logarithm``), and their exponents are checked against exact fractions.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from datetime import date
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mpdiag
from mpdiag.numerics.block_formats import BLOCK_FORMATS

ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp4": getattr(torch, "float4_e2m1fn_x2", None),
}
"""What torchao calls the elements."""
RULES = ("floor", "rceil", "ceil", "even")


def planted(count: int, seed: int, width: int = 32) -> Tensor:
    """Blocks of everything, of shape (count, width) and in FP32."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, columns: int = width) -> Tensor:
        return torch.randint(low, high, (count, columns), generator=generator)

    normal = torch.randn((count, width), generator=generator)
    values = normal * torch.exp2(drawn(-12, 1).float()) * torch.exp2(drawn(-60, 60, 1).float())
    # Every eighth block: few mantissa bits at one exponent, so that most values are ties.
    few = torch.exp2(drawn(-20, 20, 1).float()) * (drawn(-256, 256).float() / 32)
    values[::8] = few[::8]
    values[1::64] = normal[1::64] * 2.0**-125 * 2.0**-12  # FP32's subnormals
    values[2::64] *= (drawn(0, 8) == 0).float()[2::64]
    values[3::64] = 0.0
    values[4::64] = torch.copysign(values[3::64], normal[3::64])
    values[5::64, 3] = torch.inf
    values[6::64, 5] = torch.nan
    values[7::64, ::2] *= 2.0**-40
    values[9::64] = drawn(-(2**31), 2**31).int().view(torch.float32)[9::64]  # any bits at all
    return values


def same(found: Tensor, expected: Tensor) -> Tensor:
    """Which blocks (rows) have the same bits, but for the payload of NaN."""
    integer = {4: torch.int32, 2: torch.int16}[found.element_size()]
    equal = found.contiguous().view(integer) == expected.contiguous().view(integer)
    return (equal | (found.isnan() & expected.isnan())).all(-1)


def exact_exponent(largest: float, most: float) -> int:
    """⌈log2(m / M)⌉ in fractions, within E8M0's range."""
    ratio = Fraction(largest) / Fraction(most)
    exponent = ratio.numerator.bit_length() - ratio.denominator.bit_length() - 1
    while Fraction(2) ** exponent < ratio:
        exponent += 1
    return max(-127, min(127, exponent))


def torchao_mx(x: Tensor, name: str, rule: str) -> tuple[Tensor, Tensor]:
    """Torchao's values, and the exponents of its scales, with blocks along the last axis."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    scale, data = to_mx(x, ELEMENTS[name], 32, ScaleCalculationMode(rule))
    values = to_dtype(data, scale, ELEMENTS[name], 32, x.dtype)
    return values, scale.view(torch.uint8).int() - 127


def torchao_nvfp4(x: Tensor, tensor_scale: bool = True) -> Tensor:
    """Torchao's values, with blocks along the last axis."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(x.abs().max()) if tensor_scale else None
    return NVFP4Tensor.to_nvfp4(x, 16, per_tensor_scale=scale).dequantize()


def mx_rows(x: Tensor) -> Iterator[dict[str, Any]]:
    """Each MX format and rule beside torchao, along both axes of one tensor."""
    for name in ELEMENTS:
        for rule in RULES:
            expected, exponents = torchao_mx(x, name, rule)
            for axis in (-1, 0):
                found = mpdiag.fake_quantize(
                    x.T.contiguous() if axis == 0 else x, name, axis, scale_rounding=rule
                )
                different = ~same(found.T if axis == 0 else found, expected)
                logarithm = 0
                if rule == "rceil" and x.dtype == torch.float32:
                    for row in different.nonzero()[:, 0].tolist():
                        top = float(x[row].abs().max())
                        theirs = int(exponents[row])
                        most = BLOCK_FORMATS[name].element.max
                        logarithm += theirs == exact_exponent(top, most) - 1
                yield {
                    "format": name,
                    "scale_rounding": rule,
                    "dtype": str(x.dtype).removeprefix("torch."),
                    "axis": axis,
                    "values": x.numel(),
                    "blocks": len(x),
                    "different": int(different.sum()) - logarithm,
                    "logarithm": logarithm,
                }


def nvfp4_row(x: Tensor) -> dict[str, Any]:
    """NVFP4 beside torchao."""
    x = x[x.isfinite().all(1)]
    different = ~same(mpdiag.fake_quantize(x, "nvfp4"), torchao_nvfp4(x))
    return {
        "format": "nvfp4",
        "dtype": str(x.dtype).removeprefix("torch."),
        "axis": -1,
        "values": x.numel(),
        "blocks": len(x),
        "different": int(different.sum()),
    }


def main() -> None:
    """Compare, print a table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=312_500, help="of 32 values (10^7 values)")
    parser.add_argument("--json", type=Path, help="where to write the table")
    args = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        rows += list(mx_rows(planted(args.blocks, seed=1).to(dtype)))
        rows.append(nvfp4_row(planted(2 * args.blocks, seed=2, width=16).to(dtype)))
    for row in rows:
        print(*row.values(), sep="\t")
    head = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "torchao": version("torchao"),
        "machine": platform.machine(),
    }
    if args.json:
        lines = ",\n".join(json.dumps(row) for row in rows)  # a row a line
        args.json.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
