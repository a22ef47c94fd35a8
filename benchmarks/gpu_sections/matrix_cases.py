"""The cases of section (e): matrix products, convolutions, LSTMs and attention, with their FLOP.

As a program it runs them for ncu: ``python -m gpu_sections.matrix_cases once``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}


@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        name: What it is.
        dtype: Of its operands, as peak rates are named: ``fp32`` also for TF32.
        flops: What it computes.
        make: Prepares it and returns what runs it.
        never: Whether it cannot run on Tensor Cores (FP32 with TF32 off).
        dense: Whether its FLOP are really computed: Winograd and FFT convolutions do less.
    """

    name: str
    dtype: str
    flops: float
    make: Callable[[], Callable[[], Any]]
    never: bool = False
    dense: bool = True


def _tf32(*, on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


def _product(device: str, dtype: torch.dtype, m: int, n: int, k: int, *, tf32: bool) -> Any:
    def make() -> Callable[[], Any]:
        _tf32(on=tf32)
        a, b = (
            torch.randn(m, k, device=device).to(dtype),
            torch.randn(k, n, device=device).to(dtype),
        )
        return lambda: a @ b

    return make


def _fp8(device: str, side: int) -> Any:
    def make() -> Callable[[], Any]:
        a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )

    return make


def _convolution(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int], *, tf32: bool, last: bool
) -> Any:
    count, channels, side = shape

    def make() -> Callable[[], Any]:
        _tf32(on=tf32)
        layout = torch.channels_last if last else torch.contiguous_format
        layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False, device=device, dtype=dtype)
        layer = layer.to(memory_format=layout)
        x = torch.randn(count, channels, side, side, device=device).to(dtype)
        x = x.contiguous(memory_format=layout)

        @torch.no_grad()
        def run() -> Any:
            return layer(x)

        return run

    return make


def _lstm(
    device: str, dtype: torch.dtype, batch: int, steps: int, hidden: int, *, tf32: bool
) -> Any:
    def make() -> Callable[[], Any]:
        _tf32(on=tf32)
        layer = nn.LSTM(hidden, hidden, device=device, dtype=dtype)
        x = torch.randn(steps, batch, hidden, device=device).to(dtype)

        @torch.no_grad()
        def run() -> Any:
            return layer(x)

        return run

    return make


def _attention(
    device: str, dtype: torch.dtype, batch: int, heads: int, length: int, *, tf32: bool
) -> Any:
    def make() -> Callable[[], Any]:
        _tf32(on=tf32)
        q, k, v = (torch.randn(batch, heads, length, 64, device=device).to(dtype) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v)

    return make


def cases(device: str, size: str) -> Iterator[Case]:
    """Every case, the most telling first.

    Args:
        device: Where it runs.
        size: ``full``, ``tiny``, or ``once`` (for ncu, which repeats each kernel: a few steps of an
            LSTM).
    """
    side, count, channels, image = (64, 2, 16, 8) if size == "tiny" else (4096, 32, 256, 56)
    half = [(FP16, "FP16"), (BF16, "BF16")]
    kinds = [(FP32, "FP32", False), (FP32, "TF32", True), *((d, t, True) for d, t in half)]
    for dtype, title, tf32 in kinds:
        never = title == "FP32"
        for n, said in ((side, ""), (side - 1, ", odd")):
            if never and said:
                continue
            make = _product(device, dtype, side, n, n, tf32=tf32)
            yield Case(f"product {title}{said}", _NAMES[dtype], 2.0 * side * n * n, make, never)
    yield Case("product FP8", "fp8_e4m3", 2.0 * side**3, _fp8(device, side))
    for dtype, title, tf32 in kinds:
        never = title == "FP32"
        for width, last, said in (
            (channels, False, ""),
            (channels, True, ", channels last"),
            (channels - 1, True, ", odd"),
        ):
            if never and said:
                continue
            flops = 2.0 * count * image * image * width * width * 9
            shape = (count, width, image)
            make = _convolution(device, dtype, shape, tf32=tf32, last=last)
            name = f"convolution {title}{said}"
            yield Case(name, _NAMES[dtype], flops, make, never, dense=False)
    batch, steps, hidden = (2, 3, 16) if size == "tiny" else (256, 32, 1024)
    steps = min(steps, 4) if size == "once" else steps
    for dtype, title, tf32 in kinds:
        flops = 2.0 * batch * steps * 8 * hidden * hidden
        make = _lstm(device, dtype, batch, steps, hidden, tf32=tf32)
        yield Case(f"LSTM {title}", _NAMES[dtype], flops, make, title == "FP32")
    heads, length = (2, 16) if size == "tiny" else (16, 2048)
    for dtype, title, tf32 in kinds[2:]:
        flops = 4.0 * 4 * heads * length * length * 64
        make = _attention(device, dtype, 4, heads, length, tf32=tf32)
        yield Case(f"attention {title}", _NAMES[dtype], flops, make)


def main(size: str) -> None:
    """Run each case once between the profiler's start and stop, after one run outside of it."""
    torch.manual_seed(0)
    for case in cases("cuda", size):
        try:
            run = case.make()
            run()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            run()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
        except (RuntimeError, NotImplementedError) as error:
            print(f"{case.name} does not run: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
