"""Which formats a machine computes in, and the hardware and versions each one needs.

Sources: NVIDIA, *CUDA Toolkit Release Notes*, table of minimum drivers (Linux), and *cuDNN Support
Matrix*, for the first versions with a format's instructions; *CUDA C Programming Guide*,
table of compute capabilities; Transformer Engine's requirements for FP8 on Ada.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from mpdiag.hardware.alignment import is_amd
from mpdiag.hardware.cpu_instructions import CpuInstructions
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.hardware.tables import read_table

How = Literal["tensor cores", "matrix unit", "vector unit", "emulated", "unknown", "no"]

Version = tuple[int, ...]


@dataclass(frozen=True)
class FormatRequirement:
    """Minimum requirements of a format on Tensor Cores.

    Attributes:
        capability: Minimum compute capability.
        cuda, cudnn, driver: First versions with the instructions.
    """

    capability: tuple[int, int]
    cuda: Version
    cudnn: Version
    driver: Version

    @property
    def text(self) -> str:
        """The requirements as one line of text."""
        major, minor = self.capability
        return (
            f"compute capability {major}.{minor}, CUDA {_dotted(self.cuda)}, "
            f"cuDNN {_dotted(self.cudnn)}, driver {_dotted(self.driver)}"
        )


NEEDS = {
    "fp16": FormatRequirement((7, 0), (9, 0), (7, 0), (384, 81)),
    "int8": FormatRequirement((7, 5), (10, 0), (7, 3), (410, 48)),
    "tf32": FormatRequirement((8, 0), (11, 0), (8, 0), (450, 36)),
    "bf16": FormatRequirement((8, 0), (11, 0), (8, 0), (450, 36)),
    "fp8": FormatRequirement((8, 9), (11, 8), (8, 6), (520, 61)),
    "fp4": FormatRequirement((10, 0), (12, 8), (9, 7), (570, 26)),
}
"""By format, oldest first; for NVIDIA's GPUs."""
_FP8_ON_ADA = (12, 1)
_ON_CPU = Path(__file__).with_name("cpu_formats.tsv")


@dataclass(frozen=True)
class Software:
    """Installed versions; None for what is absent or not known."""

    cuda: Version | None = None
    cudnn: Version | None = None
    driver: Version | None = None


@dataclass(frozen=True)
class FormatSupport:
    """How one device supports one format.

    Attributes:
        device: Its name.
        format: ``fp16``, ``bf16``, ``tf32``, ``fp8``, ``int8``, ``fp4``.
        how: Where matrix products in it are computed.
        reason: Why, or why not, in one sentence.
        needs: Its requirements on Tensor Cores.
    """

    device: str
    format: str
    how: How
    reason: str
    needs: str

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def gpu_format_support(device: DeviceFacts, software: Software) -> tuple[FormatSupport, ...]:
    """How a GPU supports each format."""
    return tuple(
        FormatSupport(device.name, name, *_on_gpu(device, software, name, need), need.text)
        for name, need in NEEDS.items()
    )


def _on_gpu(
    device: DeviceFacts, software: Software, name: str, need: FormatRequirement
) -> tuple[How, str]:
    if device.generation == "cdna" or is_amd(device.name):
        known = device.peaks_at_most
        rates = known.tensor if known is not None and device.has_tensor_cores else {}
        if name in rates:
            return "tensor cores", "supported by its matrix cores (MFMA)"
        return "no", "not known for this GPU" if not rates else "not supported by its matrix cores"
    if device.has_tensor_cores is False:
        return "no", "this GPU has no Tensor Cores: the format saves memory, not time"
    if device.capability is None or device.has_tensor_cores is None:
        return "no", "not known for this GPU"
    if device.capability < need.capability:
        return "no", f"its Tensor Cores (compute capability {_dotted(device.capability)}) are older"
    missing = _missing(device, software, name, need)
    if missing:
        return "no", f"too old: {', '.join(missing)}"
    return "tensor cores", "supported by its Tensor Cores"


def _missing(
    device: DeviceFacts, software: Software, name: str, need: FormatRequirement
) -> list[str]:
    """Installed versions that are too old for the format; unknown versions pass."""
    cuda = need.cuda
    if name == "fp8" and device.capability == (8, 9):
        cuda = _FP8_ON_ADA
    wanted = {"CUDA": cuda, "cuDNN": need.cudnn, "driver": need.driver}
    there = {"CUDA": software.cuda, "cuDNN": software.cudnn, "driver": software.driver}
    return [
        f"{what} {_dotted(have)} < {_dotted(wanted[what])}"
        for what, have in there.items()
        if have is not None and have < wanted[what]
    ]


def cpu_format_support(name: str, cpu: CpuInstructions) -> tuple[FormatSupport, ...]:
    """How a CPU of this name and these instructions supports each format."""
    table = read_table(_ON_CPU)
    return tuple(
        FormatSupport(name, fmt, *_on_cpu(cpu, [r for r in table if r["format"] == fmt]), need.text)
        for fmt, need in NEEDS.items()
    )


def _on_cpu(cpu: CpuInstructions, rows: list[dict[str, str]]) -> tuple[How, str]:
    """The first row that applies, and what is not known of another matrix unit."""
    row = next(row for row in rows if _applies(row["instruction"], cpu))
    how, reason = cast("How", row["how"]), row["reason"]
    if row["format"] in ("bf16", "int8") and cpu.names is not None and how != "matrix unit":
        if cpu.apple:
            reason += "; whether Apple's own matrix unit helps is not known"
        elif "sme" in cpu.names:
            reason += "; whether torch uses this CPU's matrix unit (SME) is not known"
    return how, reason


def _applies(instruction: str, cpu: CpuInstructions) -> bool:
    if instruction == "?":
        return cpu.names is None
    return not instruction or bool(cpu.has(instruction))


def version(text: str | int | None) -> Version | None:
    """``"12.4"``, ``"550.54.15"`` or cuDNN's number (8902, 91002) as a tuple; None if neither."""
    if isinstance(text, int):
        if text >= 10_000:  # from cuDNN 9 on
            return text // 10_000, text // 100 % 100, text % 100
        return text // 1000, text // 100 % 10, text % 100
    numbers = re.findall(r"\d+", text or "")
    return tuple(int(n) for n in numbers[:3]) or None


def _dotted(numbers: Version) -> str:
    return ".".join(map(str, numbers))
