"""Casts to FP8 in Triton; a module of its own, for Triton reads the source of its kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _e4m3(values, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Cast a block to E4M3."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    x = tl.load(values + offset, mask=inside, other=0.0)
    tl.store(out + offset, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def _e5m2(values, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Cast a block to E5M2."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    x = tl.load(values + offset, mask=inside, other=0.0)
    tl.store(out + offset, x.to(tl.float8e5).to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def _copy(values, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy a block."""
    offset = tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(values + offset))


def refusal(device: str) -> str:
    """Why Triton runs nothing here, such as a missing C compiler; empty where it runs."""
    values = torch.ones(16, device=device)
    try:
        _copy[(1,)](values, torch.empty_like(values), BLOCK=16)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the reason
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def cast(values: torch.Tensor, name: str) -> torch.Tensor:
    """The bits of float32 values (n,) in a format, ``e4m3`` or ``e5m2``; uint8 (n,)."""
    out = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    kernel = {"e4m3": _e4m3, "e5m2": _e5m2}[name]
    kernel[(triton.cdiv(values.numel(), _BLOCK),)](values, out, values.numel(), BLOCK=_BLOCK)
    return out
