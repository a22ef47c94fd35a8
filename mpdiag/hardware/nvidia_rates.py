"""Peak rates of NVIDIA's GPUs, each with its source.

Names are as drivers give them, in lower case and without maker and brand; the whole name must match.
"""

from __future__ import annotations

from dataclasses import replace

from mpdiag.hardware.rates import Peaks, ampere_like, clocked

_V100 = "NVIDIA V100 and DGX Station datasheets; Tesla V100 GPU Architecture, table 1"
_TURING = "NVIDIA Turing GPU Architecture, appendix A to C; founders' edition clocks"
_A100 = "NVIDIA A100 datasheet; A100 GPU Architecture, table 1"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture, appendix A"
_ADA = "NVIDIA Ada GPU Architecture, appendix A"
_H100 = "NVIDIA H100 datasheet; H100 GPU Architecture, table 2; sparse figures halved"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture, appendix A"
_PAGE = "; cores, boost clock and memory from the card's specification page"
_DGX = "NVIDIA Blackwell datasheet, {}, a GPU's share; sparse figures halved"

# -- by the ratios of a generation's architecture paper ---------------------------------------------

_TURING_CARD = {"fp16": 4, "int8": 16}
_AMPERE_CARD = {"tf32": 1, "fp16": 2, "bf16": 2, "int8": 8}
_ADA_CARD = _AMPERE_CARD | {"fp8": 4}
_BLACKWELL_CARD = _ADA_CARD | {"fp6": 4, "fp4": 16}
_RATIOS = {
    "turing": _TURING_CARD,
    "ampere": _AMPERE_CARD,
    "ada": _ADA_CARD,
    "blackwell": _BLACKWELL_CARD,
}
"""Tensor Core rates of GeForce cards as multiples of FP32, all with FP32 accumulation: FP16 and FP8
run at half of what they do with FP16 accumulation, FP4 and INT8 at full rate. FP6 is multiplied by
the instruction of FP8 (PTX, kind f8f6f4), and so at its rate."""
_CAPABILITY = {
    "volta": (7, 0), "turing": (7, 5), "ampere": (8, 6), "ada": (8, 9), "hopper": (9, 0),
    "blackwell": (12, 0),
}  # fmt: skip
_FP32_PER_CLOCK = {"turing": 128}  # FLOP of a multiprocessor; 256 on Ampere, Ada and Blackwell


def _card(
    row: tuple[str, str, int, int, float], tensor: dict[str, float], fp32: float, source: str
) -> Peaks:
    """A card whose ordinary cores do FP16 as fast as FP32, or on Turing twice as fast."""
    name, generation, *numbers = row
    ratio = 2 if generation == "turing" else 1
    cuda = {"fp32": fp32, "fp16": fp32 * ratio} | ({"bf16": fp32} if ratio == 1 else {})
    processors, clock, bandwidth = int(numbers[0]), int(numbers[1]), float(numbers[2])
    capability = _CAPABILITY[generation]
    return Peaks(name, generation, capability, processors, clock, bandwidth, tensor, cuda, source)


def _ratios(row: tuple[str, str, int, int, float], source: str, professional: bool) -> Peaks:
    """A card whose rates follow from cores and clock by the ratios of its architecture.

    Professional cards accumulate FP16 and FP8 in FP32 at the full rate.
    """
    per_clock = _FP32_PER_CLOCK.get(row[1], 256)
    tensor = {
        name: clocked(
            row[2], row[3], per_clock * factor * (2 if _halved(name, professional) else 1)
        )
        for name, factor in _RATIOS[row[1]].items()
    }
    return _card(row, tensor, clocked(row[2], row[3], per_clock), source)


def _halved(name: str, professional: bool) -> bool:
    return professional and name in ("tf32", "fp16", "bf16", "fp8", "fp6")


def _geforce(name: str, generation: str, numbers: tuple[int, int, float], source: str) -> Peaks:
    return _ratios((name, generation, *numbers), source, professional=False)


def _professional(
    name: str, generation: str, numbers: tuple[int, int, float], source: str
) -> Peaks:
    return _ratios((name, generation, *numbers), source, professional=True)


# -- data centre --------------------------------------------------------------------------------------

_A100_TENSOR = ampere_like(156, 312, 624) | {"fp64": 19.5}
_A100_CUDA = {"fp64": 9.7, "fp32": 19.5, "fp16": 78.0, "bf16": 39.0}
_HOPPER = ampere_like(494.7, 989.4, 1978.9, 1978.9) | {"fp64": 66.9}
_HOPPER_CUDA = {"fp64": 33.5, "fp32": 66.9, "fp16": 133.8, "bf16": 133.8}
_PCIE = ampere_like(378, 756, 1513, 1513) | {"fp64": 51.2}
_PCIE_CUDA = {"fp64": 25.6, "fp32": 51.2, "fp16": 102.4, "bf16": 102.4}
_NVL = ampere_like(417.5, 835.5, 1670.5, 1670.5) | {"fp64": 60.0}
_NVL_CUDA = {"fp64": 30.0, "fp32": 60.0}


def _v100(name: str, clock: int, fp16: float, fp32: float, bandwidth: float = 900) -> Peaks:
    cuda = {"fp64": fp32 / 2, "fp32": fp32, "fp16": fp32 * 2}
    return Peaks(name, "volta", (7, 0), 80, clock, bandwidth, {"fp16": fp16}, cuda, _V100)


def _a100(name: str, bandwidth: float, source: str = _A100) -> Peaks:
    return Peaks(name, "ampere", (8, 0), 108, 1410, bandwidth, _A100_TENSOR, _A100_CUDA, source)


_H100_SXM = Peaks("H100 SXM", "hopper", (9, 0), 132, 1830, 3350, _HOPPER, _HOPPER_CUDA, _H100)
_H100_PCIE = Peaks("H100 PCIe", "hopper", (9, 0), 114, 1620, 2000, _PCIE, _PCIE_CUDA, _H100)
_H100_NVL = Peaks("H100 NVL", "hopper", (9, 0), 132, 1545, 3900, _NVL, _NVL_CUDA, _H100)
_H200 = "NVIDIA H200 datasheet; sparse figures halved"
_GH200 = "NVIDIA GH200 Grace Hopper datasheet; sparse figures halved"
_A800 = "NVIDIA A800 datasheet: an A100 with slower links"
_BOARD = (
    "; NVIDIA's list of supported products gives this board the PCI device of the A100 SXM of {} GB"
)


def _h800(of: Peaks, name: str, fp64: float) -> Peaks:
    """An H100 with little FP64 and slower links."""
    return replace(
        of,
        name=name,
        tensor={**of.tensor, "fp64": fp64},
        cuda={**of.cuda, "fp64": fp64},
        source="NVIDIA H800 datasheet as Lenovo's product guide has it; sparse figures halved",
    )


def _blackwell(name: str, minor: int, rates: dict[str, float], fp32: float, source: str) -> Peaks:
    """A data centre's Blackwell; processors are those of B200, the others' are not published."""
    fp64 = rates["fp64"]
    return Peaks(
        name, "blackwell", (10, minor), 148, None, rates.pop("bandwidth"),
        rates, {"fp64": fp64, "fp32": fp32}, source,
    )  # fmt: skip


def _dense(tf32: float, half: float, int8: float, fp8: float, fp4: float) -> dict[str, float]:
    return ampere_like(tf32, half, int8, fp8) | {"fp6": fp8, "fp4": fp4}


NVIDIA: tuple[tuple[str, Peaks], ...] = (
    # Volta and Turing
    (r"v100 sxm[23].*", _v100("V100 SXM", 1530, 125, 15.7)),
    (r"v100 dgxs.*", _v100("V100 DGX Station", 1530, 125, 15.7)),
    (r"v100 pcie.*", _v100("V100 PCIe", 1380, 112, 14)),
    (r"v100s pcie.*", _v100("V100S PCIe", 1597, 130, 16.4, 1134)),
    (r"t4g?", _card(("T4", "turing", 40, 1590, 320), {"fp16": 65, "int8": 130}, 8.1,
                    "NVIDIA T4 datasheet")),
    (r"titan rtx", _card(("TITAN RTX", "turing", 72, 1770, 672), {"fp16": 130.5, "int8": 261},
                         16.3, _TURING)),
    (r"rtx [68]000", _card(("Quadro RTX 6000", "turing", 72, 1770, 672),
                           {"fp16": 130.5, "int8": 261}, 16.3, _TURING)),
    (r"rtx 2080 ti", _geforce("RTX 2080 Ti", "turing", (68, 1635, 616), _TURING)),
    (r"rtx 2080 super", _geforce("RTX 2080 Super", "turing", (48, 1815, 496), _TURING + _PAGE)),
    (r"rtx 2080", _geforce("RTX 2080", "turing", (46, 1800, 448), _TURING)),
    (r"rtx 2070 super", _geforce("RTX 2070 Super", "turing", (40, 1770, 448), _TURING + _PAGE)),
    (r"rtx 2070", _geforce("RTX 2070", "turing", (36, 1710, 448), _TURING)),
    (r"rtx 2060 super", _geforce("RTX 2060 Super", "turing", (34, 1650, 448), _TURING + _PAGE)),
    # Ampere
    (r"a100 sxm4? 40gb", _a100("A100 SXM 40 GB", 1555)),
    (r"a100 (sxm4? 80gb)", _a100("A100 SXM 80 GB", 2039)),
    (r"a100 pcie 40gb", _a100("A100 PCIe 40 GB", 1555)),
    (r"a100 (pcie 80gb|80gb pcie)", _a100("A100 PCIe 80 GB", 1935)),
    (r"a100 pg509 20\d", _a100("A100 SXM 40 GB, board PG509", 1555, _A100 + _BOARD.format(40))),
    (r"(a100 )?pg509 21\d", _a100("A100 SXM 80 GB, board PG509", 2039, _A100 + _BOARD.format(80))),
    (r"a800 sxm4? 80gb", _a100("A800 SXM 80 GB", 2039, _A800)),
    (r"a800 (pcie 80gb|80gb pcie)", _a100("A800 PCIe 80 GB", 1935, _A800)),
    (r"a800 40gb active", _a100("A800 40 GB Active", 1555, _A800)),
    (r"a30", Peaks("A30", "ampere", (8, 0), 56, 1440, 933,
                   ampere_like(82, 165, 330) | {"fp64": 10.3}, {"fp64": 5.2, "fp32": 10.3},
                   "NVIDIA A30 datasheet")),
    (r"a10", _card(("A10", "ampere", 72, 1695, 600), ampere_like(62.5, 125, 250), 31.2,
                   "NVIDIA A10 datasheet")),
    (r"a10g", _card(("A10G", "ampere", 80, 1710, 600), ampere_like(35, 70, 140), 35.0,
                    "NVIDIA A10G datasheet")),
    (r"a40", _card(("A40", "ampere", 84, 1740, 696), ampere_like(74.8, 149.7, 299.3), 37.4,
                   "NVIDIA A40 datasheet")),
    (r"rtx a6000", _card(("RTX A6000", "ampere", 84, 1800, 768),
                         ampere_like(77.4, 154.8, 309.7), 38.7, _GA102)),
    (r"rtx a5000", _professional("RTX A5000", "ampere", (64, 1695, 768),
                                 "NVIDIA RTX A5000 datasheet; ratios of the A6000")),
    (r"rtx a4000", _professional("RTX A4000", "ampere", (48, 1560, 448),
                                 "NVIDIA RTX A4000 datasheet; ratios of the A6000")),
    (r"rtx 3090 ti", _geforce("RTX 3090 Ti", "ampere", (84, 1860, 1008), _ADA)),
    (r"rtx 3090", _geforce("RTX 3090", "ampere", (82, 1695, 936), _GA102)),
    (r"rtx 3080 ti", _geforce("RTX 3080 Ti", "ampere", (80, 1665, 912), _GA102 + _PAGE)),
    (r"rtx 3080", _geforce("RTX 3080", "ampere", (68, 1710, 760), _GA102)),
    (r"rtx 3070 ti", _geforce("RTX 3070 Ti", "ampere", (48, 1770, 608), _GA102 + _PAGE)),
    (r"rtx 3070", _geforce("RTX 3070", "ampere", (46, 1725, 448), _GA102)),
    (r"rtx 3060 ti", _geforce("RTX 3060 Ti", "ampere", (38, 1665, 448), _GA102 + _PAGE)),
    (r"rtx 3060", _geforce("RTX 3060", "ampere", (28, 1777, 360), _GA102 + _PAGE)),
    # Ada
    (r"l4", _card(("L4", "ada", 58, 2040, 300), ampere_like(60, 121, 242.5, 242.5), 30.3,
                  "NVIDIA L4 datasheet; sparse figures halved")),
    (r"l20", _card(("L20", "ada", 92, 2520, 864), ampere_like(59.8, 119.5, 239, 239), 59.8,
                   "NVIDIA L20 datasheet as resellers quote it")),
    (r"l40", _card(("L40", "ada", 142, 2490, 864), ampere_like(90.5, 181.05, 362, 362), 90.5,
                   "NVIDIA L40 datasheet")),
    (r"l40s", _card(("L40S", "ada", 142, 2520, 864), ampere_like(183, 362.05, 733, 733), 91.6,
                    "NVIDIA L40S datasheet")),
    (r"rtx 6000 ada( generation)?", _professional(
        "RTX 6000 Ada", "ada", (142, 2505, 960), "NVIDIA RTX 6000 Ada Generation datasheet")),
    (r"rtx 5000 ada( generation)?", _professional(
        "RTX 5000 Ada", "ada", (100, 2550, 576), "NVIDIA RTX 5000 Ada Generation datasheet")),
    (r"rtx 4090", _geforce("RTX 4090", "ada", (128, 2520, 1008), _ADA)),
    (r"rtx 4090 d", _geforce("RTX 4090 D", "ada", (114, 2520, 1008), _ADA + _PAGE)),
    (r"rtx 4080 super", _geforce("RTX 4080 Super", "ada", (80, 2550, 736.3), _ADA + _PAGE)),
    (r"rtx 4080", _geforce("RTX 4080", "ada", (76, 2505, 716.8), _ADA)),
    (r"rtx 4070 ti super", _geforce("RTX 4070 Ti Super", "ada", (66, 2610, 672.3), _ADA + _PAGE)),
    (r"rtx 4070 ti", _geforce("RTX 4070 Ti", "ada", (60, 2610, 504.2), _ADA)),
    (r"rtx 4070 super", _geforce("RTX 4070 Super", "ada", (56, 2475, 504.2), _ADA + _PAGE)),
    (r"rtx 4070", _geforce("RTX 4070", "ada", (46, 2475, 504.2), _ADA + _PAGE)),
    (r"rtx 4060 ti", _geforce("RTX 4060 Ti", "ada", (34, 2535, 288), _ADA + _PAGE)),
    (r"rtx 4060", _geforce("RTX 4060", "ada", (24, 2460, 272), _ADA + _PAGE)),
    # Hopper
    (r"h100 (80gb hbm3|sxm5?( 80gb)?)", _H100_SXM),
    (r"h100 (pcie|80gb pcie)", _H100_PCIE),
    (r"h100 nvl", _H100_NVL),
    (r"h200", replace(_H100_SXM, name="H200 SXM", bandwidth=4800, source=_H200)),
    (r"h200 nvl", replace(_H100_NVL, name="H200 NVL", bandwidth=4800, source=_H200)),
    (r"gh200 (480gb|120gb)", replace(_H100_SXM, name="GH200, HBM3", bandwidth=4000, source=_GH200)),
    (r"gh200 144g hbm3e", replace(_H100_SXM, name="GH200, HBM3e", bandwidth=4900, source=_GH200)),
    (r"h800", _h800(_H100_SXM, "H800 SXM", 1.0)),
    (r"h800 pcie", _h800(_H100_PCIE, "H800 PCIe", 0.8)),
    (r"h20", Peaks("H20", "hopper", (9, 0), 78, None, 4000,
                   ampere_like(74, 148, 296, 296) | {"fp64": 1.0}, {"fp64": 1.0, "fp32": 44.0},
                   "NVIDIA H20 datasheet as the press quotes it; dense")),
    # Blackwell. Of FP4 the datasheets print both figures; those of INT8 on B300 are no misprint.
    (r"b200", replace(_blackwell("B200", 0, _dense(1100, 2250, 4500, 4500, 9000)
                                 | {"fp64": 37.0, "bandwidth": 7700}, 75.0,
                                 _DGX.format("HGX B200")), clock_mhz=1850)),
    (r"gb200", _blackwell("GB200", 0, _dense(1250, 2500, 5000, 5000, 10000)
                          | {"fp64": 40.0, "bandwidth": 8000}, 80.0, _DGX.format("GB200 NVL72"))),
    (r"b300( sxm\d.*)?", _blackwell("B300", 3, _dense(1125, 2250, 153.5, 4500, 14000)
                                    | {"fp64": 1.25, "bandwidth": 8000}, 75.0,
                                    _DGX.format("HGX B300"))),
    (r"gb300", _blackwell("GB300", 3, _dense(1250, 2500, 166.7, 5000, 15000)
                          | {"fp64": 1.4, "bandwidth": 8000}, 83.3, _DGX.format("GB300 NVL72"))),
    (r"rtx pro 6000 blackwell workstation edition", _professional(
        "RTX PRO 6000 Workstation", "blackwell", (188, 2617, 1792),
        "NVIDIA RTX PRO Blackwell GPU Architecture, appendix")),
    (r"rtx pro 6000 blackwell max q workstation edition", _professional(
        "RTX PRO 6000 Max-Q", "blackwell", (188, 2280, 1792),
        "NVIDIA RTX PRO 6000 Blackwell Max-Q datasheet (FP32, FP4, memory)")),
    (r"rtx pro 6000 blackwell server edition", replace(_professional(
        "RTX PRO 6000 Server", "blackwell", (188, 2493, 1597),
        "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet: FP32 and memory, the rest in the "
        "ratios of the workstation card"), clock_mhz=None)),
    (r"rtx 5090", _geforce("RTX 5090", "blackwell", (170, 2407, 1792), _BLACKWELL)),
    (r"rtx 5080", _geforce("RTX 5080", "blackwell", (84, 2617, 960), _BLACKWELL)),
    (r"rtx 5070 ti", _geforce("RTX 5070 Ti", "blackwell", (70, 2452, 896), _BLACKWELL)),
    (r"rtx 5070", _geforce("RTX 5070", "blackwell", (48, 2512, 672), _BLACKWELL)),
    (r"rtx 5060 ti", _geforce("RTX 5060 Ti", "blackwell", (36, 2572, 448), _BLACKWELL + _PAGE)),
    (r"rtx 5060", _geforce("RTX 5060", "blackwell", (30, 2497, 448), _BLACKWELL + _PAGE)),
)  # fmt: skip
