"""Every row of the table is consistent with its own processors and clock, and known by name."""

from pathlib import Path

import pytest

from mpdiag.hardware.peaks import devices, peaks_at_most, peaks_of
from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.kernel_evidence import by_rate
from mpdiag.tensorcores.work.products import matmul
from mpdiag.tensorcores.work.traced_operation import OperationTime

DEVICES = [peaks for _, peaks in devices()]
HERE = Path(__file__).parent
# What a multiprocessor does in a clock, FP16 with FP32 accumulation; from the makers' architecture
# papers, so a second way to the same figure. GeForce cards run at half the rate, and so do L20, L40
# and A10G by their own data sheets.
HALF_RATE = {"L20", "L40", "A10G"}
GEFORCE = ("RTX 20", "RTX 30", "RTX 40", "RTX 50")
PROFESSIONAL = {"RTX 5000 Ada"}
PER_CLOCK = {"volta": 1024, "turing": 1024, "ada": 1024, "hopper": 4096}
ORDINARY = {"volta": 128, "turing": 128, "ada": 256}


def per_clock(p):
    if p.generation == "cdna":
        return {(9, 0): 1024, (9, 4): 2048, (9, 5): 4096}[p.capability]
    if p.generation == "ampere":
        full = 2048 if p.capability == (8, 0) else 1024
    else:
        full = PER_CLOCK.get(p.generation, 8192 if p.name == "B200" else 1024)
    geforce = p.name in HALF_RATE or p.name.startswith(GEFORCE)
    return full // 2 if geforce and p.name not in PROFESSIONAL else full


def close(expected, share):
    return pytest.approx(expected, rel=share)


def test_rates_follow_from_processors_and_clock():
    for p in DEVICES:
        assert p.source, p.name
        assert p.bandwidth > 250, p.name
        # The rate witness would otherwise prove Tensor Cores that were not there.
        assert p.cuda_rate("fp16") >= p.cuda_rate("fp32") == p.cuda_rate("tf32"), p.name
        if p.clock_mhz is None:  # not published
            continue
        clocks = p.processors * p.clock_mhz * 1e6
        assert p.tensor_rate("fp16") == close(clocks * per_clock(p), 0.02), p.name
        if p.generation in ORDINARY:
            assert p.cuda_rate("fp32") == close(clocks * ORDINARY[p.generation], 0.02), p.name
        if p.generation == "cdna":  # 163 TFLOP/s on MI300X, where 653 had been guessed
            packed = clocks * 256
            assert p.cuda_rate("fp16") == p.cuda_rate("bf16") == close(packed, 0.001), p.name
            assert p.cuda_rate("fp32") <= packed * 1.001, p.name


RATIOS = {"bf16": 1, "tf32": 1 / 2, "fp8": 2}
SINCE = {
    "bf16": {"ampere", "ada", "hopper", "blackwell"},
    "tf32": {"ampere", "ada", "hopper", "blackwell"},
    "fp8": {"ada", "hopper", "blackwell"},
    "fp4": {"blackwell"},
}


def test_rates_halve_from_format_to_format():
    for p in DEVICES:
        for dtype in RATIOS.keys() & p.tensor.keys():
            ratio = RATIOS[dtype] / (2 if (p.name, dtype) == ("MI100", "bf16") else 1)
            exact = 0 if dtype == "bf16" else 0.03
            assert p.tensor[dtype] == close(p.tensor["fp16"] * ratio, exact), (p.name, dtype)
        for dtype, generations in SINCE.items():
            if p.generation != "cdna":
                assert (dtype in p.tensor) == (p.generation in generations), (p.name, dtype)


def test_a_bound_is_never_below_a_device():
    for p in DEVICES:
        for processors in (None, p.processors):
            bound = peaks_at_most("", p.capability, processors)
            assert bound.bandwidth >= p.bandwidth, p.name
            for dtype in ("fp64", "fp32", "tf32", "fp16", "bf16", "int8"):
                assert bound.cuda_rate(dtype) >= p.cuda_rate(dtype) * 0.999, p.name
            for dtype, rate in p.tensor.items():
                assert bound.tensor[dtype] >= rate * 0.999, p.name


def test_names_as_drivers_give_them():
    expected = {row["driver"]: row["device"] for row in read_table(HERE / "device_names.tsv")} | {
        "": ""
    }
    assert len(expected) > 50
    known = {name: peaks_of(name) for name in expected}
    assert {name: p.name if p else "" for name, p in known.items()} == expected


def test_another_number_of_processors_is_another_device():
    """Names are shared: by two cards, by a whole GPU and a part of it."""
    assert peaks_of("AMD Instinct MI250X/MI250", 104).name == "MI250, one die"
    assert peaks_of("AMD Instinct MI250X/MI250", 110).name == "MI250X, one die"
    assert peaks_of("NVIDIA GeForce RTX 3080", 68).name == "RTX 3080"
    assert peaks_of("NVIDIA GeForce RTX 3080", 70) is None
    assert peaks_of("AMD Instinct MI300X", 38) is None  # one of eight partitions
    part = peaks_at_most("AMD Instinct MI300X", (9, 4), 38)
    assert part.bound
    assert part.cuda_rate("bf16") == pytest.approx(163.4e12 / 8, rel=0.01)
    assert peaks_of("NVIDIA GB200", 152).name == "GB200"  # how many it has is not published


@pytest.mark.parametrize(
    "row",
    read_table(HERE / "printed_rates.tsv"),
    ids=lambda row: " ".join(filter(None, (row["driver"], row["unit"], row["dtype"]))),
)
def test_figures_as_the_documents_print_them(row):
    peaks = peaks_of(row["driver"])
    figures = {"tensor": peaks.tensor_rate, "cuda": peaks.cuda_rate}
    figure = peaks.bandwidth * 1e12
    if row["unit"] in figures:
        figure = figures[row["unit"]](row["dtype"])
    assert figure == (close(float(row["rate"]) * 1e12, 0.002) if row["rate"] else None)


def test_a_device_without_a_name_has_bounds():
    bound = peaks_at_most("", (9, 4), 304)
    assert bound.bound
    assert bound.source == "the largest of MI300X, MI300A, MI325X"
    assert bound.cuda_rate("bf16") == pytest.approx(163.4e12, rel=0.001)
    assert peaks_at_most("", (9, 4), 228).cuda_rate("bf16") == pytest.approx(122.6e12, rel=0.001)
    assert peaks_at_most("", (9, 4)).cuda_rate("fp64") == pytest.approx(81.7e12)
    assert peaks_of("") is None


def test_a_bound_where_nothing_is_known():
    assert peaks_at_most("NVIDIA Graphics Device", None) is None
    assert peaks_at_most("NVIDIA GeForce GTX 1080", (6, 1)) is None
    laptop = peaks_at_most("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6), 48)
    assert laptop.bound
    assert laptop.cuda_rate("fp16") < peaks_of("NVIDIA GeForce RTX 3090").cuda_rate("fp16")
    assert not peaks_at_most("Tesla T4", (7, 5)).bound
    amd = peaks_at_most("AMD Instinct MI250X HPE", (9, 0))
    assert amd.generation == "cdna"


def proof(dtype, teraflops, peaks):
    """Whether a product of a thousand cubed that ran at a rate proves Tensor Cores."""
    work = matmul(1000, 1000, 1000, dtype=dtype)
    took = work.flops / (teraflops * 1e6)
    return by_rate(OperationTime("aten::mm", "", work, dtype, 1, took), peaks) is not None


def test_what_a_rate_proves():
    """Above what the ordinary cores can, whether the device is named or known by its kind alone."""
    named, nameless = peaks_of("AMD Instinct MI300X"), peaks_at_most("", (9, 4), 304)
    for peaks in (named, nameless):
        assert proof("bf16", 300, peaks)
        assert not proof("bf16", 160, peaks)
    assert not proof("bf16", 1000, None)
    # dp4a: 4 times FP32 on ordinary cores, and so twice FP16 on a T4.
    assert not proof("int8", 32, peaks_of("Tesla T4"))
    assert proof("int8", 60, peaks_of("Tesla T4"))
    assert proof("fp16", 32, peaks_of("Tesla T4"))
    assert proof("fp8_e4m3", 200, peaks_of("NVIDIA H100 PCIe"))
