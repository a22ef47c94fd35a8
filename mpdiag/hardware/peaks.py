"""Dense peak rates and bandwidth of GPUs, each with its source. Unknown devices are refused.

Rates are dense (no structured sparsity), in 10^12 operations a second at the boost clock of the
source, and accumulate in FP32, as PyTorch does: GeForce cards do FP16 at half rate then. Vendors
print the sparse figure first; it is twice the dense one and not what a real program can reach.

``processors`` and ``clock_mhz`` serve as a check: a rate is processors × clock × operations per clock,
and a test verifies that for every row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpdiag.hardware.alignment import generation, is_amd

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Peaks:
    """Published peak rates of one device.

    Attributes:
        name: Its common name.
        generation: See ``alignment.generation``.
        processors: Streaming multiprocessors or compute units.
        clock_mhz: Boost clock at which the Tensor Core rates are given.
        bandwidth: GB/s of device memory.
        tensor: Tensor Core (AMD: matrix core) TFLOP/s by dtype; a missing dtype is not supported.
        cuda: TFLOP/s of the ordinary cores by dtype, where published.
        source: The document with these figures.
    """

    name: str
    generation: str
    processors: int
    clock_mhz: int
    bandwidth: float
    tensor: Mapping[str, float] = field(default_factory=dict)
    cuda: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def tensor_rate(self, dtype: str) -> float | None:
        """Tensor Core FLOP/s for operands of a dtype; None where there is no such instruction."""
        rate = self.tensor.get(_family(dtype))
        return None if rate is None else rate * 1e12

    def cuda_rate(self, dtype: str) -> float:
        """The peak FLOP/s of the ordinary cores: anything faster ran on Tensor Cores.

        Where no figure is published for a 16-bit dtype, four times FP32, the largest ratio of any
        generation (A100), so that nothing is proved by mistake.
        """
        name = _family(dtype)
        if name in self.cuda:
            return self.cuda[name] * 1e12
        factor = {"fp64": 1, "fp32": 1, "tf32": 1}.get(name, 4)
        return self.cuda["fp32"] * factor * 1e12

    def ridge(self, dtype: str) -> float | None:
        """FLOP per byte below which memory limits a Tensor Core kernel; None as for ``tensor_rate``."""
        rate = self.tensor_rate(dtype)
        return None if rate is None else rate / (self.bandwidth * 1e9)


def peaks_of(name: str) -> Peaks | None:
    """The figures of a device by its driver's name for it; None where it is not known.

    Laptop versions, slices (MIG) and cards that merely resemble a known one are not known.
    """
    plain = re.sub(r"\b(nvidia|tesla|quadro|geforce|amd|instinct)\b", " ", name.lower())
    plain = " ".join(re.sub(r"[-_/]", " ", plain).split())
    return next((p for pattern, p in _TABLE if re.fullmatch(pattern, plain)), None)


def has_tensor_cores(name: str, capability: tuple[int, int] | None) -> bool | None:
    """Whether a GPU has Tensor Cores (AMD: matrix cores); None where that is not known.

    Compute capability alone does not tell: the GTX 16 series and the smallest professional Turing
    cards are 7.5 without them (pytorch#195716).
    """
    if is_amd(name):
        known = peaks_of(name)
        return True if known is not None else None
    if capability is None:
        known = peaks_of(name)
        return bool(known.tensor) if known is not None else None
    if capability < (7, 0):
        return False
    if capability == (7, 5) and re.search(_TURING_WITHOUT, name, re.IGNORECASE):
        return False
    return True if generation(capability, name) is not None else None


_TURING_WITHOUT = (
    r"\bGTX 16\d\d\b|\bMX[45]50\b|\b(?:Quadro )?T(?:400|500|550|600|1000|1200|2000)\b|\bCMP 30HX\b"
)


def _family(dtype: str) -> str:
    return "fp8" if dtype.startswith("fp8") else dtype


def _volta_like(fp16: float, int8: float | None = None) -> dict[str, float]:
    return {"fp16": fp16} | ({"int8": int8} if int8 else {})


def _ampere_like(
    tf32: float, half: float, int8: float, fp8: float | None = None
) -> dict[str, float]:
    rates = {"tf32": tf32, "fp16": half, "bf16": half, "int8": int8}
    return rates | ({"fp8": fp8} if fp8 else {})


def _amd(half: float, fp32: float, **more: float) -> dict[str, float]:
    return {"fp32": fp32, "fp16": half, "bf16": half} | more


_V100 = "NVIDIA V100 and DGX Station datasheets; Tesla V100 GPU Architecture, table 1"
_TURING = "NVIDIA Turing GPU Architecture, appendix A to C; founders' edition clocks"
_A100 = "NVIDIA A100 datasheet; A100 GPU Architecture, table 1"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture, appendix A"
_ADA = "NVIDIA Ada GPU Architecture, appendix A"
_H100 = "NVIDIA H100 datasheet; H100 GPU Architecture, table 2; sparse figures halved"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture, appendix A"
_CDNA2 = "AMD Instinct MI200 series datasheet"
_CDNA3 = "AMD Instinct MI300 series datasheet"
_GCD = "; one of the two dies, which is what torch sees as a device"

_HOPPER_CUDA = {"fp64": 33.5, "fp32": 66.9, "fp16": 133.8, "bf16": 133.8}
_HOPPER = _ampere_like(494.7, 989.4, 1978.9, 1978.9) | {"fp64": 66.9}
_NVL = _ampere_like(417.5, 835.5, 1670.5, 1670.5) | {"fp64": 60.0}
_NVL_CUDA = {"fp64": 30.0, "fp32": 60.0}
_A100_TENSOR = _ampere_like(156, 312, 624) | {"fp64": 19.5}
_A100_CUDA = {"fp64": 9.7, "fp32": 19.5, "fp16": 78.0, "bf16": 39.0}


def _a100(name: str, bandwidth: float) -> Peaks:
    return Peaks(name, "ampere", 108, 1410, bandwidth, _A100_TENSOR, _A100_CUDA, _A100)


def _v100(name: str, clock: int, fp16: float, fp32: float, bandwidth: float = 900) -> Peaks:
    cuda = {"fp64": fp32 / 2, "fp32": fp32, "fp16": fp32 * 2}
    return Peaks(name, "volta", 80, clock, bandwidth, _volta_like(fp16), cuda, _V100)


def _card(
    row: tuple[str, str, int, int, float], tensor: dict[str, float], fp32: float, source: str
) -> Peaks:
    """A card whose ordinary cores do FP16 as fast as FP32, or on Turing twice as fast."""
    ratio = 2 if row[1] == "turing" else 1
    cuda = {"fp32": fp32, "fp16": fp32 * ratio} | ({"bf16": fp32} if ratio == 1 else {})
    return Peaks(*row, tensor, cuda, source)


_TABLE: tuple[tuple[str, Peaks], ...] = (
    # Volta and Turing
    (r"v100 sxm[23].*", _v100("V100 SXM", 1530, 125, 15.7)),
    (r"v100 dgxs.*", _v100("V100 DGX Station", 1530, 125, 15.7)),
    (r"v100 pcie.*", _v100("V100 PCIe", 1380, 112, 14)),
    (r"v100s pcie.*", _v100("V100S PCIe", 1597, 130, 16.4, 1134)),
    (
        r"t4g?",
        _card(("T4", "turing", 40, 1590, 320), _volta_like(65, 130), 8.1, "NVIDIA T4 datasheet"),
    ),
    (
        r"titan rtx",
        _card(("TITAN RTX", "turing", 72, 1770, 672), _volta_like(130.5, 261), 16.3, _TURING),
    ),
    (
        r"rtx [68]000",
        _card(("Quadro RTX 6000", "turing", 72, 1770, 672), _volta_like(130.5, 261), 16.3, _TURING),
    ),
    (
        r"rtx 2080 ti",
        _card(("RTX 2080 Ti", "turing", 68, 1635, 616), _volta_like(56.9, 227.7), 14.2, _TURING),
    ),
    (
        r"rtx 2080",
        _card(("RTX 2080", "turing", 46, 1800, 448), _volta_like(42.4, 169.6), 10.6, _TURING),
    ),
    (
        r"rtx 2070",
        _card(("RTX 2070", "turing", 36, 1710, 448), _volta_like(31.5, 126), 7.9, _TURING),
    ),
    # Ampere
    (r"a100 sxm4? 40gb", _a100("A100 SXM 40 GB", 1555)),
    (r"a100 (sxm4? 80gb)", _a100("A100 SXM 80 GB", 2039)),
    (r"a100 pcie 40gb", _a100("A100 PCIe 40 GB", 1555)),
    (r"a100 (pcie 80gb|80gb pcie)", _a100("A100 PCIe 80 GB", 1935)),
    (
        r"a30",
        Peaks(
            "A30",
            "ampere",
            56,
            1440,
            933,
            _ampere_like(82, 165, 330) | {"fp64": 10.3},
            {"fp64": 5.2, "fp32": 10.3},
            "NVIDIA A30 datasheet",
        ),
    ),
    (
        r"a10",
        _card(
            ("A10", "ampere", 72, 1695, 600),
            _ampere_like(62.5, 125, 250),
            31.2,
            "NVIDIA A10 datasheet",
        ),
    ),
    (
        r"a40",
        _card(
            ("A40", "ampere", 84, 1740, 696),
            _ampere_like(74.8, 149.7, 299.3),
            37.4,
            "NVIDIA A40 datasheet",
        ),
    ),
    (
        r"rtx a6000",
        _card(
            ("RTX A6000", "ampere", 84, 1800, 768), _ampere_like(77.4, 154.8, 309.7), 38.7, _GA102
        ),
    ),
    (
        r"rtx 3090 ti",
        _card(("RTX 3090 Ti", "ampere", 84, 1860, 1008), _ampere_like(40, 80, 320), 40.0, _ADA),
    ),
    (
        r"rtx 3090",
        _card(("RTX 3090", "ampere", 82, 1695, 936), _ampere_like(35.6, 71, 284), 35.6, _GA102),
    ),
    (
        r"rtx 3080",
        _card(("RTX 3080", "ampere", 68, 1710, 760), _ampere_like(29.8, 59.5, 238), 29.8, _GA102),
    ),
    (
        r"rtx 3070",
        _card(("RTX 3070", "ampere", 46, 1725, 448), _ampere_like(20.3, 40.6, 162.6), 20.3, _GA102),
    ),
    # Ada
    (
        r"l4",
        _card(
            ("L4", "ada", 58, 2040, 300),
            _ampere_like(60, 121, 242.5, 242.5),
            30.3,
            "NVIDIA L4 datasheet; sparse figures halved",
        ),
    ),
    (
        r"l40",
        _card(
            ("L40", "ada", 142, 2490, 864),
            _ampere_like(90.5, 181.05, 362, 362),
            90.5,
            "NVIDIA L40 datasheet",
        ),
    ),
    (
        r"l40s",
        _card(
            ("L40S", "ada", 142, 2520, 864),
            _ampere_like(183, 362.05, 733, 733),
            91.6,
            "NVIDIA L40S datasheet",
        ),
    ),
    (
        r"rtx 4090",
        _card(
            ("RTX 4090", "ada", 128, 2520, 1008),
            _ampere_like(82.6, 165.2, 660.6, 330.3),
            82.6,
            _ADA,
        ),
    ),
    (
        r"rtx 4080",
        _card(
            ("RTX 4080", "ada", 76, 2505, 716.8),
            _ampere_like(48.7, 97.5, 389.9, 194.9),
            48.7,
            _ADA,
        ),
    ),
    (
        r"rtx 4070 ti",
        _card(
            ("RTX 4070 Ti", "ada", 60, 2610, 504.2),
            _ampere_like(40.1, 80.2, 320.7, 160.4),
            40.1,
            _ADA,
        ),
    ),
    # Hopper
    (
        r"h100 (80gb hbm3|sxm5?( 80gb)?)",
        Peaks("H100 SXM", "hopper", 132, 1830, 3350, _HOPPER, _HOPPER_CUDA, _H100),
    ),
    (
        r"h100 (pcie|80gb pcie)",
        Peaks(
            "H100 PCIe",
            "hopper",
            114,
            1620,
            2000,
            _ampere_like(378, 756, 1513, 1513) | {"fp64": 51.2},
            {"fp64": 25.6, "fp32": 51.2, "fp16": 102.4, "bf16": 102.4},
            _H100,
        ),
    ),
    (r"h100 nvl", Peaks("H100 NVL", "hopper", 132, 1545, 3900, _NVL, _NVL_CUDA, _H100)),
    (
        r"h200",
        Peaks(
            "H200 SXM",
            "hopper",
            132,
            1830,
            4800,
            _HOPPER,
            _HOPPER_CUDA,
            "NVIDIA H200 datasheet; sparse figures halved",
        ),
    ),
    (
        r"h200 nvl",
        Peaks(
            "H200 NVL",
            "hopper",
            132,
            1545,
            4800,
            _NVL,
            _NVL_CUDA,
            "NVIDIA H200 datasheet; sparse figures halved",
        ),
    ),
    # Blackwell
    (
        r"b200",
        Peaks(
            "B200",
            "blackwell",
            148,
            1850,
            7700,
            _ampere_like(1100, 2250, 4500, 4500) | {"fp64": 37.0},
            {"fp64": 37.0, "fp32": 75.0},
            "NVIDIA HGX B200 datasheet; sparse figures halved",
        ),
    ),
    (
        r"rtx 5090",
        _card(
            ("RTX 5090", "blackwell", 170, 2407, 1792),
            _ampere_like(104.8, 209.5, 838, 419),
            104.8,
            _BLACKWELL,
        ),
    ),
    (
        r"rtx 5080",
        _card(
            ("RTX 5080", "blackwell", 84, 2617, 960),
            _ampere_like(56.3, 112.6, 450.2, 225.1),
            56.3,
            _BLACKWELL,
        ),
    ),
    # AMD
    (
        r"mi210",
        Peaks(
            "MI210",
            "cdna",
            104,
            1700,
            1638,
            _amd(181, 45.3, int8=181, fp64=45.3),
            {"fp64": 22.6, "fp32": 22.6},
            _CDNA2,
        ),
    ),
    (
        r"mi250",
        Peaks(
            "MI250, one die",
            "cdna",
            104,
            1700,
            1638,
            _amd(181, 45.3, int8=181, fp64=45.3),
            {"fp64": 22.6, "fp32": 22.6},
            _CDNA2 + _GCD,
        ),
    ),
    (
        r"mi250x( mi250)?",  # the driver uses one name for both; the larger is the safer denominator
        Peaks(
            "MI250X, one die",
            "cdna",
            110,
            1700,
            1638,
            _amd(191.5, 47.9, int8=191.5, fp64=47.9),
            {"fp64": 23.9, "fp32": 23.9},
            _CDNA2 + _GCD,
        ),
    ),
    (
        r"mi300x.*",
        Peaks(
            "MI300X",
            "cdna",
            304,
            2100,
            5300,
            _amd(1307.4, 163.4, tf32=653.7, fp8=2614.9, int8=2614.9, fp64=163.4),
            {"fp64": 81.7, "fp32": 163.4},
            _CDNA3,
        ),
    ),
    (
        r"mi300a",
        Peaks(
            "MI300A",
            "cdna",
            228,
            2100,
            5300,
            _amd(980.6, 122.6, tf32=490.3, fp8=1961.2, int8=1961.2, fp64=122.6),
            {"fp64": 61.3, "fp32": 122.6},
            _CDNA3,
        ),
    ),
    (
        r"mi325x.*",
        Peaks(
            "MI325X",
            "cdna",
            304,
            2100,
            6000,
            _amd(1307.4, 163.4, tf32=653.7, fp8=2614.9, int8=2614.9, fp64=163.4),
            {"fp64": 81.7, "fp32": 163.4},
            _CDNA3,
        ),
    ),
)
"""Names as drivers give them, without maker and brand; the whole name must match."""
