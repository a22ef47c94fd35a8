"""Shape rules of Tensor Cores: which multiples dimensions should be, by dtype and GPU generation.

A kernel reads its operands in vectors of up to 16 bytes, so every row must start at a multiple of
16 bytes for the widest ones to be used: 8 values of FP16, 4 of TF32, 16 of INT8.

Sources: NVIDIA, *Matrix Multiplication Background User's Guide*, table 1 (the multiples, and A100's
128 bytes); *Training with Mixed Precision User Guide*, sections 2.2 and 6 (M, N, K, channels, batch and
vocabulary).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mpdiag.hardware.tables import read_table

_DTYPES = read_table(Path(__file__).with_name("dtypes.tsv"))
BYTES = {row["dtype"]: int(row["bytes"]) for row in _DTYPES}
"""Bytes of one value in memory."""
_PACKED = {"fp4": 0.5}
"""Formats of which two values share a byte; only kernels' names say so, no dtype of a tensor."""
_DTYPE_NAMES = {
    name: row["dtype"]
    for row in _DTYPES
    for name in (row["dtype"], *row["names"].split(", "))
    if name
}

_BY_CAPABILITY = {
    tuple(map(int, row["capability"].split("."))): row["generation"]
    for row in read_table(Path(__file__).with_name("generations.tsv"))
}
CDNA = frozenset({(9, 4), (9, 5)})  # gfx942 and gfx950, as ROCm reports them
GENERATIONS = ("volta", "turing", "ampere", "ada", "hopper", "blackwell")
"""NVIDIA's generations with Tensor Cores, oldest first."""

_VECTOR = 16  # bytes a thread reads at once
_LINE = 128  # bytes of a cache line, A100's best


@dataclass(frozen=True)
class Alignment:
    """The multiples that a dimension should have, in values.

    Attributes:
        good: The multiple to pad to: 16 bytes.
        best: 128 bytes on A100 and newer, worthwhile if it costs little; else ``good``.
    """

    good: int
    best: int


_MOST_GROWTH = 2.0
"""Padding that makes a size larger than that costs more than it is expected to save."""


@dataclass(frozen=True)
class Fault:
    """A dimension that is not a multiple of what Tensor Cores need.

    Attributes:
        dimension: Its name, such as ``"N"`` or ``"input channels"``.
        size: Its size.
        multiple: The multiple it should be of.
        padded: The next larger size that is.
    """

    dimension: str
    size: int
    multiple: int
    padded: int


def dtype_name(text: str | None) -> str | None:
    """mpdiag's name of a dtype as torch, its profiler or oneDNN write it; None for any other.

    ``"c10::BFloat16"``, ``"torch.bfloat16"``, ``"bfloat16"`` and ``"bf16"`` are all ``"bf16"``.
    """
    if not text:
        return None
    return _DTYPE_NAMES.get(text.removeprefix("c10::").removeprefix("torch.").lower())


def bytes_of(dtype: str) -> float:
    """Bytes of one value, of formats that are packed, too.

    Raises:
        KeyError: If there is no such dtype.
    """
    return BYTES[dtype] if dtype in BYTES else _PACKED[dtype]


def is_sized(dtype: str | None) -> bool:
    """Whether the bytes of a value of a dtype are known."""
    return dtype in BYTES or dtype in _PACKED


def generation(capability: tuple[int, int], name: str = "") -> str | None:
    """The generation of a GPU, None before Volta and where it is not known.

    Args:
        capability: Compute capability, major and minor.
        name: The device's name. ROCm reports gfx90a as 9.0, which is Hopper's: only the name
            tells them apart. No name is needed for gfx942 and gfx950: NVIDIA has no 9.4 and 9.5.
    """
    if capability in CDNA or (is_amd(name) and capability[0] == 9):
        return "cdna"
    if is_amd(name):  # RDNA: its matrix instructions are none of those known here
        return None
    if capability[0] >= 10:
        return "blackwell" if capability[0] <= 12 else None
    return _BY_CAPABILITY.get(capability)


def is_amd(name: str) -> bool:
    """Whether a device's name is one of AMD's."""
    words = name.upper().replace("-", " ").split()
    return any(w in {"AMD", "RADEON"} or w.startswith(("GFX", "MI1", "MI2", "MI3")) for w in words)


def alignment(dtype: str, gpu: str | None) -> Alignment:
    """The rule for a dtype on a generation.

    Args:
        dtype: Our name, see ``bytes_of``.
        gpu: A generation, or None.

    Raises:
        KeyError: If there is no such dtype.
    """
    size = bytes_of(dtype)
    good = max(1, int(_VECTOR // size))
    wide = gpu in GENERATIONS[2:] or gpu is None
    return Alignment(good, max(1, int(_LINE // size)) if wide else good)


_BLOCKS = (
    ("mxfp", 32),
    ("nvfp4", 16),
    ("fp8_1x128", 128),
    ("fp8_128x128", 128),
    ("fp8-block", 128),
)
"""Values that share a scale, by the beginning of a format's name."""


def multiple_for(target: str, gpu: str | None) -> int:
    """The multiple that the sizes of matrix products should be of in a format.

    16 bytes, and whole blocks where values share a scale: 32 in MXFP8, MXFP6 and MXFP4 (OCP
    Microscaling Formats 1.0), 16 in NVFP4, 128 where FP8 has one scale for each 128 values.
    """
    for begins, block in _BLOCKS:
        if target.startswith(begins):
            return block
    return alignment(target, gpu).good


def padded(size: int, multiple: int) -> int:
    """The smallest multiple that is at least ``size``."""
    return -(-size // multiple) * multiple


def faults(sizes: Iterable[tuple[str, int]], dtype: str, gpu: str | None) -> tuple[Fault, ...]:
    """The dimensions that should be padded, those furthest from a vector first.

    Args:
        sizes: Names and sizes of dimensions of tensors of ``dtype``.
        dtype: See ``BYTES``.
        gpu: A generation, or None.
    """
    multiple = alignment(dtype, gpu).good
    misaligned = [
        Fault(name, size, multiple, padded(size, multiple))
        for name, size in sizes
        if size > 0 and size % multiple
    ]
    return tuple(sorted(misaligned, key=lambda f: f.size & -f.size))


def common_multiples(each: Iterable[Fault]) -> dict[int, int]:
    """For each size the multiple that all its faults want, so that none contradicts another."""
    multiples: dict[int, int] = {}
    for fault in each:
        multiples[fault.size] = math.lcm(multiples.get(fault.size, 1), fault.multiple)
    return multiples


def worth_padding(each: Iterable[Fault], multiples: Mapping[int, int]) -> tuple[Fault, ...]:
    """The faults with the multiples of ``common_multiples``, but not where padding costs too much.

    As in a recording: the 3 channels of images to 8 would be more work than it saves.
    """
    multiplied = (
        replace(f, multiple=m, padded=padded(f.size, m))
        for f, m in ((f, multiples.get(f.size, f.multiple)) for f in each)
    )
    return tuple(f for f in multiplied if f.padded <= _MOST_GROWTH * f.size)


def values_in_step(size: int, dtype: str) -> int:
    """How many values a vector may hold when rows are ``size`` values apart.

    This is the number in a kernel's name, ``…_align8``: the largest power of two that divides the
    size, up to 16 bytes.
    """
    return min(size & -size, max(1, int(_VECTOR // bytes_of(dtype)))) if size > 0 else 0
