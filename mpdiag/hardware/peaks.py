"""Peak rates of a GPU by its name; the most that any can do where only its kind is known.

Unknown devices get no rates, never a guess. A bound is no guess: nothing of a compute capability
multiplies faster on its ordinary cores than the fastest device of it, and that is enough to prove
from a kernel's rate that it ran on Tensor Cores.

``processors`` and ``clock_mhz`` of the tables serve as a check: a rate is processors × clock ×
operations per clock, and a test verifies that for every row.
"""

from __future__ import annotations

import re

from mpdiag.hardware.alignment import generation, is_amd
from mpdiag.hardware.amd_rates import AMD
from mpdiag.hardware.nvidia_rates import NVIDIA
from mpdiag.hardware.rates import Peaks

__all__ = ["Peaks", "has_tensor_cores", "peaks_at_most", "peaks_of"]

_TABLE = NVIDIA + AMD
_DTYPES = ("fp64", "fp32", "fp16", "bf16", "int8")


def peaks_of(name: str, processors: int | None = None) -> Peaks | None:
    """The figures of a device by its driver's name for it; None where it is not known.

    Laptop versions, slices (MIG) and cards that merely resemble a known one are not known.

    Args:
        name: As the driver reports it.
        processors: How many it has, where known. One with another number than is published has the
            name of another card (RTX 3080 with 12 GB), or is a part of it (a partition of MI300X).
    """
    plain = re.sub(r"\b(nvidia|tesla|quadro|geforce|amd|instinct)\b", " ", name.lower())
    plain = " ".join(re.sub(r"[-_/]", " ", plain).split())
    found = (p for pattern, p in _TABLE if re.fullmatch(pattern, plain))
    return next((p for p in found if _has(p, processors)), None)


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
    rows = [p for _, p in _TABLE if p.capability == capability]
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
        return True if capability in _AMD_MATRIX else None
    if capability < (7, 0):
        return False
    if capability == (7, 5) and re.search(_TURING_WITHOUT, name, re.IGNORECASE):
        return False
    return True if generation(capability, name) is not None else None


_AMD_MATRIX = frozenset({(9, 4), (9, 5)})
_TURING_WITHOUT = (
    r"\bGTX 16\d\d\b|\bMX[45]50\b|\b(?:Quadro )?T(?:400|500|550|600|1000|1200|2000)\b|\bCMP 30HX\b"
)
