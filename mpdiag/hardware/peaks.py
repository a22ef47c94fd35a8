"""Peak rates and memory bandwidth of a GPU by its name, or bounds where only its kind is known.

Unknown devices get no rates, never a guess. A bound is no guess: nothing of a compute capability
multiplies faster on its ordinary cores than the fastest device of it, and that is enough to prove
from a kernel's rate that it ran on Tensor Cores.

Rates are dense (no structured sparsity), in 10^12 operations a second at the boost clock of the
source, and accumulate in FP32, as PyTorch does. They stand in ``peaks.tsv``, each device with its
source; ``processors`` and ``clock_mhz`` serve as a check: a rate is processors × clock × operations
per clock, and a test verifies that for every row.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mpdiag.hardware.alignment import CDNA, generation, is_amd
from mpdiag.hardware.tables import read_table

_DTYPES = ("fp64", "fp32", "fp16", "bf16", "int8")
_TABLE = Path(__file__).with_name("peaks.tsv")
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


def family(dtype: str) -> str:
    """The dtype that the hardware multiplies in: ``fp8_e4m3`` and ``mxfp8`` are ``fp8``."""
    match = re.match(r"(?:mx|nv)?(fp[468])(?!\d)", dtype)
    return match.group(1) if match else dtype


@cache
def devices() -> tuple[tuple[str, Peaks], ...]:
    """Every known device, with a pattern of its name, in the order in which they are tried."""
    return tuple((row["pattern"], _peaks(row)) for row in read_table(_TABLE))


def _peaks(row: Mapping[str, str]) -> Peaks:
    major, _, minor = row["capability"].partition(".")
    return Peaks(
        name=row["name"],
        generation=row["generation"],
        capability=(int(major), int(minor)),
        processors=int(row["processors"]),
        clock_mhz=int(row["clock_mhz"]) if row["clock_mhz"] else None,
        bandwidth=_number(row["bandwidth"]),
        tensor=_rates(row["tensor"]),
        cuda=_rates(row["cuda"]),
        source=row["source"],
    )


def _rates(text: str) -> dict[str, float]:
    """``"tf32=156 fp16=312"`` as a mapping."""
    pairs = (entry.split("=") for entry in text.split())
    return {dtype: _number(rate) for dtype, rate in pairs}


def _number(text: str) -> float:
    """As it is written: ``312`` stays a whole number in documents, too."""
    return float(text) if "." in text else int(text)


def peaks_of(name: str, processors: int | None = None) -> Peaks | None:
    """The figures of a device by its driver's name for it; None where it is not known.

    Laptop versions, slices (MIG) and cards that merely resemble a known one are not known.

    Args:
        name: As the driver reports it.
        processors: How many it has, where known. One with another number than is published has the
            name of another card (RTX 3080 with 12 GB), or is a part of it (a partition of MI300X).
    """
    model = re.sub(r"\b(nvidia|tesla|quadro|geforce|amd|instinct)\b", " ", name.lower())
    model = " ".join(re.sub(r"[-_/]", " ", model).split())
    matching = (p for pattern, p in devices() if re.fullmatch(pattern, model))
    return next((p for p in matching if _has(p, processors)), None)


def _has(peaks: Peaks, processors: int | None) -> bool:
    published = peaks.clock_mhz is not None  # else neither clock nor processors are
    return processors is None or not published or peaks.processors == processors


def peaks_at_most(
    name: str, capability: tuple[int, int] | None, processors: int | None = None
) -> Peaks | None:
    """A device's own figures, or upper bounds over all published devices of its capability.

    Args:
        name: As the driver reports it; may be blank.
        capability: Compute capability; AMD's gfx942 is 9.4, gfx950 is 9.5.
        processors: Streaming multiprocessors or compute units, where known: rates grow with them.

    Returns:
        None where neither the name nor the capability is known. ``bound`` says which of the two
        it is; a bound has no clock, and its bandwidth is the largest.
    """
    known = peaks_of(name, processors)
    if known is not None or capability is None:
        return known
    rows = [p for _, p in devices() if p.capability == capability]
    if is_amd(name):
        rows = [p for p in rows if p.generation == "cdna"]
    if not rows:
        return None
    count = processors or max(p.processors for p in rows)

    def most(rates: list[tuple[Peaks, float]]) -> float:
        each = ((rate / p.processors if processors else rate / count) for p, rate in rates)
        return round(max(each) * count, 1)

    tensor = {dtype for p in rows for dtype in p.tensor}
    kinds = sorted({p.generation for p in rows})
    return Peaks(
        name=f"any of compute capability {capability[0]}.{capability[1]}",
        generation=kinds[0] if len(kinds) == 1 else "",
        capability=capability,
        processors=count,
        clock_mhz=None,
        bandwidth=max(p.bandwidth for p in rows),
        tensor={d: most([(p, p.tensor[d]) for p in rows if d in p.tensor]) for d in sorted(tensor)},
        cuda={d: most([(p, p.cuda_rate(d) / 1e12) for p in rows]) for d in _DTYPES},
        source="the largest of " + ", ".join(p.name for p in rows),
        bound=True,
    )


def has_tensor_cores(name: str, capability: tuple[int, int] | None) -> bool | None:
    """Whether a GPU has Tensor Cores (AMD: matrix cores); None where that is not known.

    Compute capability alone does not tell: the GTX 16 series and the smallest professional Turing
    cards are 7.5 without them (pytorch#195716), and AMD's 9.0 may be a Vega.
    """
    known = peaks_of(name)
    if known is not None:
        return bool(known.tensor)
    if capability is None:
        return None
    if is_amd(name):
        return True if capability in CDNA else None
    if capability < (7, 0):
        return False
    if capability == (7, 5) and re.search(_TURING_WITHOUT, name, re.IGNORECASE):
        return False
    return True if generation(capability, name) is not None else None


_TURING_WITHOUT = (
    r"\bGTX 16\d\d\b|\bMX[45]50\b|\b(?:Quadro )?T(?:400|500|550|600|1000|1200|2000)\b|\bCMP 30HX\b"
)
