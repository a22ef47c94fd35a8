"""(h) FP8: our rounding against the device's casts, its instructions and its products."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

import mpdiag
from gpu_sections.runner import has
from mpdiag.emulation.rounding import round_to
from mpdiag.numerics.formats import FP8_E4M3, FP8_E5M2, FloatFormat

if TYPE_CHECKING:
    from gpu_sections.child import Context

FORMATS = {"e4m3": FP8_E4M3, "e5m2": FP8_E5M2}
BLOCKS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4", "nvfp4_te")
PRODUCT = 2.0**-10


def compare(ctx: Context) -> None:
    """Every promise of FP8."""
    if not ctx.cuda:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name, fmt in FORMATS.items():
        with ctx.settling(f"h-{name}"):
            compare_casts(ctx, f"h-{name}", fmt)
    with ctx.settling("h-hardware"):
        compare_instructions(ctx)
    with ctx.settling("h-product"):
        compare_product(ctx)
    with ctx.settling("h-blocks"):
        compare_blocks(ctx)


def patterns(fmt: FloatFormat, device: str, count: int) -> torch.Tensor:
    """Every FP16 value, every value of the format, every tie and its neighbours, random FP32 bits."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = every.view(getattr(torch, str(fmt.torch_name))).float()
    finite = values[values.isfinite()].unique()
    ties = (finite[1:].double() + finite[:-1].double()) / 2
    ties = ties.float()
    inf = torch.tensor(torch.inf)
    beside = [torch.nextafter(ties, inf), torch.nextafter(ties, -inf)]
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int64)
    random = bits.to(torch.int32).view(torch.float32)
    ordinary = torch.randn(count, generator=generator) * fmt.max / 4
    small = torch.randn(count, generator=generator) * fmt.smallest_normal
    everything = [halves.float(), values, ties, *beside, random, ordinary, small]
    return torch.cat(everything).to(device)


def within(values: torch.Tensor, ours: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Which values are finite before and after rounding; (n,) bool."""
    return values.isfinite() & ours.isfinite() & (ours.abs() <= fmt.max)


def compare_casts(ctx: Context, promise: str, fmt: FloatFormat) -> None:
    """Ours against ``Tensor.to``: to the bit in range, and what torch does out of range."""
    values = patterns(fmt, ctx.device, ctx.sized(1 << 22, 1 << 20, 1 << 14))
    ours = round_to(values, fmt)
    theirs = values.to(getattr(torch, str(fmt.torch_name))).float()
    inside = within(values, ours, fmt)
    bits = [t[inside].view(torch.int32) for t in (ours, theirs)]
    wrong = int((bits[0] != bits[1]).sum())
    beyond = values.isfinite() & ~inside
    outside = theirs[beyond]
    kinds = {
        "NaN": int(outside.isnan().sum()),
        "infinite": int(outside.isinf().sum()),
        "saturated": int((outside.abs() == fmt.max).sum()),
    }
    said = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    figure = (
        f"{wrong} of {int(inside.sum()):,} differ; out of range torch gives {said or 'nothing'}"
    )
    ctx.check(promise, wrong == 0, figure, out_of_range=kinds)


def compare_instructions(ctx: Context) -> None:
    """A Triton kernel's casts, which the card's conversion instructions do."""
    if not has("triton"):
        ctx.skip("Triton is not installed", "h-hardware")
        return
    if not ctx.cuda or torch.cuda.get_device_capability() < (8, 9):
        ctx.skip("there are no FP8 instructions here", "h-hardware")
        return
    from gpu_sections.fp8_kernel import cast, refusal

    reason = refusal(ctx.device)
    if reason:
        ctx.skip(f"Triton compiles nothing here: {reason}", "h-hardware")
        return
    wrong = {}
    for name, fmt in FORMATS.items():
        values = patterns(fmt, ctx.device, 1 << 14)
        ours = round_to(values, fmt)
        inside = within(values, ours, fmt)
        theirs = cast(values[inside].contiguous(), name)
        theirs = theirs.view(getattr(torch, str(fmt.torch_name))).float()
        wrong[name] = int((ours[inside].view(torch.int32) != theirs.view(torch.int32)).sum())
    figure = ", ".join(f"{name}: {count} differ" for name, count in wrong.items())
    ctx.check("h-hardware", not any(wrong.values()), figure)


def compare_blocks(ctx: Context) -> None:
    """``mpdiag.fake_quantize`` on the device and on the CPU, on values of ordinary and of any size."""
    generator = torch.Generator().manual_seed(11)
    shape = ctx.sized((2048, 1000), (512, 1000), (32, 100))
    ordinary = torch.randn(shape, generator=generator)
    octaves = torch.randint(-60, 60, shape, generator=generator)
    zeros = torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, ordinary)
    wrong = []
    for name in BLOCKS:
        for values in (ordinary, ordinary * torch.exp2(octaves), zeros):
            here = mpdiag.fake_quantize(values, name)
            there = mpdiag.fake_quantize(values.to(ctx.device), name).cpu()
            if not torch.equal(here.view(torch.int32), there.view(torch.int32)):
                wrong.append(name)
    figure = f"{len(BLOCKS)} formats, {3 * len(BLOCKS) * values.numel():,} values"
    held = not wrong
    ctx.check("h-blocks", held, figure, reason=f"differ: {', '.join(wrong)}" if wrong else "")


def compare_product(ctx: Context) -> None:
    """``torch._scaled_mm`` against the float64 product of what our rounding makes of its operands."""
    if ctx.cuda and torch.cuda.get_device_capability() < (8, 9):
        ctx.skip("this card has no FP8 products", "h-product")
        return
    side = ctx.sized(1024, 512, 64)
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(side, side, generator=generator).to(ctx.device) * 8 for _ in range(2))
    one = torch.ones((), device=ctx.device)
    a8, b8 = (t.to(torch.float8_e4m3fn) for t in (a, b))
    product = torch._scaled_mm(
        a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=False
    )
    ours = [round_to(t, FP8_E4M3).double() for t in (a, b)]
    expected = ours[0] @ ours[1].t()
    terms = ours[0].abs() @ ours[1].abs().t()
    # The result is stored in BF16, which rounds by up to 2^-9 of itself.
    error = ((product.double() - expected).abs() - 2.0**-8 * expected.abs()) / terms
    worst = float(error.max())
    figure = f"off by {max(worst, 0):.1e} of the sum of |a||b| at most, beyond BF16's own rounding"
    ctx.check("h-product", worst <= PRODUCT, figure, worst=worst)
