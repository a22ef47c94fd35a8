"""Dense peak rates and memory bandwidth of one device.

Rates are dense (no structured sparsity), in 10^12 operations a second at the boost clock of the
source, and accumulate in FP32, as PyTorch does: GeForce cards do FP16 at half rate then. Vendors
print the sparse figure first; it is twice the dense one and not what a real program can reach.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_VECTOR_RATIO = {"fp64": 1, "fp32": 1, "tf32": 1}
_MOST = 4
"""The most that ordinary cores do in a 16-bit or integer dtype, as a multiple of FP32: four on A100
(FP16), and four with NVIDIA's and AMD's dot products of 8-bit integers (``dp4a``, ``v_dot4``)."""


@dataclass(frozen=True)
class Peaks:
    """Published peak rates of one device, or the most that any of several can do.

    Attributes:
        name: Its common name.
        generation: See ``alignment.generation``.
        capability: Compute capability, major and minor; AMD's as ROCm reports it.
        processors: Streaming multiprocessors or compute units.
        clock_mhz: Boost clock at which the Tensor Core rates are given; None where it is not
            published.
        bandwidth: GB/s of device memory.
        tensor: Tensor Core (AMD: matrix core) TFLOP/s by dtype; a missing dtype is not supported.
        cuda: TFLOP/s of the ordinary cores by dtype, where published.
        source: The document with these figures.
        bound: Whether these are upper bounds over several devices, and no device's own figures.
    """

    name: str
    generation: str
    capability: tuple[int, int]
    processors: int
    clock_mhz: int | None
    bandwidth: float
    tensor: Mapping[str, float] = field(default_factory=dict)
    cuda: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    bound: bool = False

    def tensor_rate(self, dtype: str) -> float | None:
        """Tensor Core FLOP/s for operands of a dtype; None where there is no such instruction."""
        rate = self.tensor.get(family(dtype))
        return None if rate is None else rate * 1e12

    def cuda_rate(self, dtype: str) -> float:
        """The peak FLOP/s of the ordinary cores: anything faster ran on Tensor Cores.

        Where no figure is published for a dtype of 16 or 8 bits, four times FP32, the largest
        ratio of any generation, so that nothing is proved by mistake.
        """
        name = family(dtype)
        if name in self.cuda:
            return self.cuda[name] * 1e12
        return self.cuda["fp32"] * _VECTOR_RATIO.get(name, _MOST) * 1e12

    def ridge(self, dtype: str) -> float | None:
        """FLOP per byte below which memory limits a Tensor Core kernel; None as for ``tensor_rate``."""
        rate = self.tensor_rate(dtype)
        return None if rate is None else rate / (self.bandwidth * 1e9)


def family(dtype: str) -> str:
    """The dtype that the hardware multiplies in: ``fp8_e4m3`` and ``mxfp8`` are ``fp8``."""
    found = re.match(r"(?:mx|nv)?(fp[468])(?!\d)", dtype)
    return found.group(1) if found else dtype


def ampere_like(
    tf32: float, half: float, int8: float, fp8: float | None = None
) -> dict[str, float]:
    """Tensor Core rates of Ampere and newer."""
    rates = {"tf32": tf32, "fp16": half, "bf16": half, "int8": int8}
    return rates | ({"fp8": fp8} if fp8 else {})


def clocked(processors: int, clock_mhz: int, per_clock: float) -> float:
    """TFLOP/s of so many FLOP a clock in each processor, as data sheets round them."""
    return round(processors * clock_mhz * per_clock / 1e6, 1)
