"""Every row of the table is consistent with its own processors and clock, and known by name."""

from __future__ import annotations

import pytest

from mpdiag.hardware.peaks import _TABLE, has_tensor_cores, peaks_of

ROWS = [p for _, p in _TABLE]
# What a multiprocessor does in a clock, FP16 with FP32 accumulation; from the makers' architecture
# papers, so a second way to the same figure. GeForce cards run at half the rate, and so does the
# L40 by its own data sheet.
HALF_RATE = {"RTX 2080 Ti", "RTX 2080", "RTX 2070", "L40"}
PER_CLOCK = {"volta": 1024, "turing": 1024, "ada": 1024, "hopper": 4096}
ORDINARY = {"volta": 128, "turing": 128, "ada": 256}


def per_clock(p):
    if p.generation == "cdna":
        return 2048 if p.name.startswith("MI3") else 1024
    if p.generation == "ampere":
        full = 2048 if p.name.startswith(("A100", "A30")) else 1024
    else:
        full = PER_CLOCK.get(p.generation, 8192 if p.name == "B200" else 1024)
    geforce = p.name in HALF_RATE or p.name.startswith(("RTX 30", "RTX 40", "RTX 50"))
    return full // 2 if geforce else full


@pytest.mark.parametrize("p", ROWS, ids=lambda p: p.name)
def test_rates_follow_from_processors_and_clock(p):
    clocks = p.processors * p.clock_mhz * 1e6
    assert p.tensor_rate("fp16") == pytest.approx(clocks * per_clock(p), rel=0.02)
    if p.generation in ORDINARY:
        assert p.cuda_rate("fp32") == pytest.approx(clocks * ORDINARY[p.generation], rel=0.02)
    assert p.source


@pytest.mark.parametrize("p", ROWS, ids=lambda p: p.name)
def test_rates_halve_from_format_to_format(p):
    tensor = p.tensor
    if "bf16" in tensor:
        assert tensor["bf16"] == tensor["fp16"]
    if "tf32" in tensor:
        assert tensor["tf32"] == pytest.approx(tensor["fp16"] / 2, rel=0.03)
    if "fp8" in tensor:
        assert tensor["fp8"] == pytest.approx(tensor["fp16"] * 2, rel=0.03)
    if p.generation in {"volta", "turing"}:
        assert {"bf16", "tf32", "fp8"} & set(tensor) == set()


def test_the_ridges_people_know():
    assert peaks_of("Tesla V100-SXM2-16GB").ridge("fp16") == pytest.approx(138.9, abs=0.1)
    assert peaks_of("NVIDIA A100-SXM4-40GB").ridge("bf16") == pytest.approx(200.6, abs=0.1)
    assert peaks_of("NVIDIA H100 80GB HBM3").ridge("fp8_e4m3") == pytest.approx(590.7, abs=0.1)
    assert peaks_of("Tesla V100-SXM2-16GB").ridge("bf16") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tesla V100-SXM2-32GB", "V100 SXM"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI250X/MI250", "MI250X, one die"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_as_drivers_give_them(name, expected):
    assert peaks_of(name).name == expected


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA H20",
        "NVIDIA Graphics Device",
        "",
    ],
)
def test_what_merely_resembles_a_known_device_is_refused(name):
    assert peaks_of(name) is None


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), False),
        ("NVIDIA T1000", (7, 5), False),
        ("Tesla T4", (7, 5), True),
        ("NVIDIA GeForce RTX 2060", (7, 5), True),
        ("NVIDIA GeForce GTX 1080 Ti", (6, 1), False),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6), True),
        ("AMD Instinct MI210", (9, 0), True),
        ("AMD Radeon RX 6600", (10, 3), None),
        ("NVIDIA H100 PCIe", None, True),
        ("something else", None, None),
        ("something newer", (13, 0), None),
    ],
)
def test_who_has_tensor_cores(name, capability, expected):
    assert has_tensor_cores(name, capability) is expected


def test_the_ordinary_cores_are_never_underestimated():
    """The rate witness would otherwise prove Tensor Cores that were not there."""
    assert peaks_of("NVIDIA A100-SXM4-40GB").cuda_rate("fp16") == 78e12
    assert peaks_of("NVIDIA H100 NVL").cuda_rate("fp16") == 4 * 60e12  # none published
    for p in ROWS:
        assert p.cuda_rate("fp16") >= p.cuda_rate("fp32")
        assert p.cuda_rate("tf32") == p.cuda_rate("fp32")
