"""What a machine can do with each format, and the settings that decide."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpdiag.hardware.capabilities import (
    NEEDS,
    Software,
    cpu_format_support,
    gpu_format_support,
    version,
)
from mpdiag.hardware.cpu_instructions import CpuInstructions, read_instructions
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.hardware.flags import read_flags
from mpdiag.hardware.tables import read_table

HERE = Path(__file__).parent
NEW = Software(cuda=(12, 8), cudnn=(9, 7, 0), driver=(570, 86))


def able(device, software=NEW):
    support = gpu_format_support(device, software)
    assert [s.format for s in support] == list(NEEDS)
    return [s.format for s in support if s.how == "tensor cores"]


@pytest.mark.parametrize("row", read_table(HERE / "gpus.tsv"), ids=lambda row: row["name"])
def test_what_a_gpu_is_and_can(row):
    known = None if row["capability"] == "?" else tuple(map(int, row["capability"].split(".")))
    device = DeviceFacts(row["name"].replace("(blank)", ""), known)
    assert (device.generation or "?") == row["generation"]
    assert {True: "yes", False: "no", None: "?"}[device.has_tensor_cores] == row["tensor_cores"]
    assert able(device) == row["formats"].split()


def test_software_that_is_too_old_is_named():
    old = Software(cuda=(11, 8), cudnn=(8, 5), driver=(440, 1))
    device = DeviceFacts("NVIDIA GeForce RTX 4090", (8, 9))
    support = {s.format: s for s in gpu_format_support(device, old)}
    assert support["fp16"].how == "tensor cores"
    assert support["bf16"].reason == "too old: driver 440.1 < 450.36"
    # FP8 on Ada came with CUDA 12.1, on Hopper with 11.8.
    assert "CUDA 11.8 < 12.1, cuDNN 8.5 < 8.6, driver 440.1 < 520.61" in support["fp8"].reason
    assert "fp8" in able(DeviceFacts("NVIDIA H100 PCIe", (9, 0)), Software(cuda=(11, 8)))
    assert support["fp8"].needs == "compute capability 8.9, CUDA 11.8, cuDNN 8.6, driver 520.61"
    json.dumps(support["fp8"].to_json())


CPUS = {row["name"]: row for row in read_table(HERE / "cpus.tsv")}


def cpu(name, **more):
    names = CPUS[name]["instructions"]
    return CpuInstructions(None if names == "?" else frozenset(names.split()), **more)


@pytest.mark.parametrize("row", CPUS.values(), ids=CPUS)
def test_formats_of_a_cpu_by_its_instructions(row):
    support = {s.format: s for s in cpu_format_support("CPU", cpu(row["name"]))}
    assert list(support) == list(NEEDS)
    assert (support["bf16"].how, support["int8"].how) == (row["bf16"], row["int8"])
    assert support["fp16"].how == "emulated"  # as mpdiag trains in it
    assert row["words"] in support[row["format"]].reason
    assert ("FP16" in support["fp16"].reason) == ("fp16" in row["instructions"])


def test_whether_apples_matrix_unit_helps_is_not_known():
    support = cpu_format_support("CPU", cpu("Arm with SME", apple=True))
    assert ["Apple" in s.reason for s in support if s.format in ("bf16", "int8")] == [True, True]


def test_instructions_from_the_operating_system(tmp_path):
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        "model name\t: Xeon\nflags\t\t: fpu avx512f amx_tile amx_bf16 amx_int8 avx_vnni\n"
    )
    read = read_instructions(None, listed)
    assert read.names == {"avx512_f", "amx_tile", "amx_bf16", "amx_int8", "avx_vnni"}
    assert read.unit_dtypes == {"bf16", "int8"}
    listed.write_text("Features\t: fp asimd asimddp bf16 i8mm\n")
    assert read_instructions(None, listed).names == {"dot", "bf16", "i8mm"}
    absent = read_instructions(None, tmp_path / "none")
    assert absent.names is absent.unit_dtypes is None


def test_instructions_from_torch(tmp_path):
    told = {"architecture": "x86_64", "avx2": True, "amx_tile": False, "sve_max_length": 128}
    fake = SimpleNamespace(cpu=SimpleNamespace(get_capabilities=lambda: told))
    assert read_instructions(fake, tmp_path / "none").names == {"avx2"}
    real = read_instructions(torch)
    if real.names is not None:
        assert real.has("amx_tile") == bool(torch.cpu._is_amx_tile_supported())


def test_versions():
    expected = {
        "12.4": (12, 4), "550.54.15": (550, 54, 15), 8902: (8, 9, 2), 91002: (9, 10, 2), None: None
    }  # fmt: skip
    assert {text: version(text) for text in expected} == expected


PRECISION = "torch.get_float32_matmul_precision()"
CONVOLUTIONS = "torch.backends.mkldnn.conv.fp32_precision"


def flags(module=torch, on=None):
    return {f.name: f for f in read_flags(module, on)}


def test_settings_are_read_as_they_stand(monkeypatch):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        strict = flags()[PRECISION]
        torch.set_float32_matmul_precision("high")
        loose = flags()[PRECISION]
    finally:
        torch.set_float32_matmul_precision(before)
    assert (strict.value, loose.value) == ("highest", "high")
    assert "set_float32_matmul_precision" in strict.advice
    assert loose.advice == ""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert flags()["torch.backends.cudnn.benchmark"].value == "True"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert "constant" in flags()["torch.backends.cudnn.benchmark"].advice
    assert "channels_last" in flags()
    assert all(f.meaning for f in flags().values())
    assert torch.get_float32_matmul_precision() == before  # read, never changed


@pytest.mark.parametrize(
    "row",
    read_table(HERE / "matmul_precision.tsv"),
    ids=lambda row: f"{row['cpu']} {row['precision']}",
)
def test_matmul_precision_on_a_cpu(monkeypatch, row):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: row["precision"])
    read = flags(on=cpu(row["cpu"]))
    assert [name for name in read if "cud" in name] == []
    assert read[PRECISION].meaning == row["meaning"]
    words = 'torch.set_float32_matmul_precision("medium") multiplies in BF16 on AMX'
    assert read[PRECISION].advice == (words if row["advised"] == "yes" else "")
    if CONVOLUTIONS in read:
        amx = "amx_bf16" in CPUS[row["cpu"]]["instructions"]
        assert ("bf16" in read[CONVOLUTIONS].advice) == amx


def test_a_gpu_keeps_its_own_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    read = flags(on=cpu("Sapphire Rapids"))
    assert "TF32" in read[PRECISION].advice
    assert CONVOLUTIONS not in read


def test_only_variables_that_matter_are_shown(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert flags()["NVIDIA_TF32_OVERRIDE"].value == "0"
    assert "secret" not in str(flags())


def test_a_torch_that_does_not_tell():
    backends = SimpleNamespace(mkldnn=SimpleNamespace(is_available=lambda: False))
    module = SimpleNamespace(backends=backends, get_float32_matmul_precision=lambda: "odd")
    read = flags(module)
    assert read["torch.backends.cudnn.allow_tf32"].value == "not known"
    assert read[PRECISION].meaning == "not known"
