"""Which instructions a CPU has for products of small formats, from torch or the operating system.

Names are those of ``torch.cpu.get_capabilities`` (torch 2.10), to which Linux's own are translated.

Sources: Intel, *64 and IA-32 Architectures Software Developer's Manual*, chapters on AMX and AVX-512;
Arm, *Architecture Reference Manual for A-profile*, features FEAT_BF16, FEAT_I8MM, FEAT_DotProd and
FEAT_SME; Linux, ``arch/x86/include/asm/cpufeatures.h`` and *ARM64 ELF hwcaps*.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FROM_LINUX = {
    "avx512f": "avx512_f",
    "avxvnniint8": "avx_vnni_int8",
    "avxneconvert": "avx_ne_convert",
    "asimddp": "dot",
    "asimdhp": "fp16_arith",
}
"""Linux's names of what torch calls otherwise; those that agree are not listed."""
_KNOWN = frozenset(
    """
    amx_tile amx_bf16 amx_int8 amx_fp16 amx_tf32 avx2 avx512_f avx512_bf16 avx512_fp16 avx512_vnni
    avx_vnni avx_vnni_int8 avx_ne_convert neon bf16 i8mm dot fp16_arith sve sve_bf16 sme sme2
    """.split()
)


@dataclass(frozen=True)
class CpuInstructions:
    """What a CPU can multiply with.

    Attributes:
        names: The extensions it has; None where nobody says.
        apple: Whether it is one of Apple's, whose own matrix unit no software reports.
    """

    names: frozenset[str] | None = None
    apple: bool = False

    def has(self, name: str) -> bool | None:
        """Whether it has an extension; None where that is not known."""
        return None if self.names is None else name in self.names

    @property
    def unit_dtypes(self) -> frozenset[str] | None:
        """Dtypes that AMX multiplies; None where nobody says."""
        if self.names is None:
            return None
        dtypes = ("bf16", "fp16", "int8", "tf32")
        return frozenset(dtype for dtype in dtypes if f"amx_{dtype}" in self.names)


def read_instructions(torch: Any = None, cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuInstructions:
    """This machine's instructions.

    Args:
        torch: The torch module, which is asked first; versions before 2.10 do not tell.
        cpuinfo: Where Linux lists them.
    """
    arm = platform.machine().lower().startswith(("aarch64", "arm"))
    names = _from_torch(torch)
    listed = _from_linux(cpuinfo)
    if names is None:
        names = listed
    elif listed is not None and not arm:
        names |= listed & {"amx_tf32"}  # of which torch does not know
    return CpuInstructions(names, apple=arm and platform.system() == "Darwin")


def _from_torch(torch: Any) -> frozenset[str] | None:
    try:
        capabilities: Mapping[str, Any] = torch.cpu.get_capabilities()
    except (AttributeError, RuntimeError):
        return None
    names = frozenset(name for name, value in capabilities.items() if value is True) & _KNOWN
    return names or None


def _from_linux(cpuinfo: Path) -> frozenset[str] | None:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in {"flags", "features"}:
            return frozenset(_FROM_LINUX.get(n, n) for n in value.split()) & _KNOWN
    return None


def cpu_name() -> str:
    """The CPU's model name, as the operating system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
