"""What a machine can do with each format, and the settings that decide."""

from __future__ import annotations

import json
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

NEW = Software(cuda=(12, 8), cudnn=(9, 7, 0), driver=(570, 86))


def able(name, capability, software=NEW):
    found = gpu_format_support(DeviceFacts(name, capability), software)
    assert {a.format for a in found} == set(NEEDS)
    return {a.format for a in found if a.how == "tensor cores"}


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("Tesla P100", (6, 0), set()),
        ("Tesla V100-SXM2-16GB", (7, 0), {"fp16"}),
        ("Tesla T4", (7, 5), {"fp16", "int8"}),
        ("NVIDIA GeForce GTX 1650", (7, 5), set()),
        ("NVIDIA A100-SXM4-40GB", (8, 0), {"fp16", "int8", "bf16", "tf32"}),
        ("NVIDIA GeForce RTX 4090", (8, 9), {"fp16", "int8", "bf16", "tf32", "fp8"}),
        ("NVIDIA H100 PCIe", (9, 0), {"fp16", "int8", "bf16", "tf32", "fp8"}),
        ("AMD Instinct MI210", (9, 0), {"fp16", "int8", "bf16"}),
        ("AMD Instinct MI300X", (9, 4), {"fp16", "int8", "bf16", "tf32", "fp8"}),
        ("AMD Radeon RX 6600", (10, 3), set()),
        ("NVIDIA GeForce RTX 5090", (12, 0), {"fp16", "int8", "bf16", "tf32", "fp8", "fp4"}),
        ("AMD Instinct MI355X", (9, 5), {"fp16", "int8", "bf16", "fp8", "fp4"}),
        ("AMD Radeon Graphics", (9, 4), {"fp16", "int8", "bf16", "tf32", "fp8"}),
    ],
)
def test_formats_of_a_gpu(name, capability, expected):
    assert able(name, capability) == expected


def test_software_that_is_too_old_is_named():
    old = Software(cuda=(11, 8), cudnn=(8, 5), driver=(440, 1))
    found = {
        a.format: a for a in gpu_format_support(DeviceFacts("NVIDIA GeForce RTX 4090", (8, 9)), old)
    }
    assert found["fp16"].how == "tensor cores"
    assert found["bf16"].reason == "too old: driver 440.1 < 450.36"
    # FP8 on Ada came with CUDA 12.1, on Hopper with 11.8.
    assert "CUDA 11.8 < 12.1, cuDNN 8.5 < 8.6, driver 440.1 < 520.61" in found["fp8"].reason
    assert able("NVIDIA H100 PCIe", (9, 0), Software(cuda=(11, 8))) >= {"fp8"}
    assert found["fp8"].needs == "compute capability 8.9, CUDA 11.8, cuDNN 8.6, driver 520.61"
    json.dumps(found["fp8"].to_json())


SAPPHIRE = "avx512_f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8"
GRANITE = f"{SAPPHIRE} amx_fp16"
ZEN4 = "avx512_f avx512_vnni avx512_bf16"


def cpu(names, architecture="x86", **more):
    found = None if names is None else frozenset(names.split())
    return CpuInstructions(architecture, found, **more)


@pytest.mark.parametrize(
    ("names", "bf16", "int8"),
    [
        (SAPPHIRE, "matrix unit", "matrix unit"),
        (GRANITE, "matrix unit", "matrix unit"),
        (ZEN4, "vector unit", "vector unit"),
        ("avx2 avx_vnni", "emulated", "vector unit"),
        ("avx2", "emulated", "vector unit"),
        ("neon bf16 i8mm dot", "vector unit", "vector unit"),
        (None, "unknown", "unknown"),
    ],
)
def test_formats_of_a_cpu_by_its_instructions(names, bf16, int8):
    found = {a.format: a for a in cpu_format_support("CPU", cpu(names))}
    assert set(found) == set(NEEDS)
    assert (found["bf16"].how, found["int8"].how) == (bf16, int8)
    assert found["fp16"].how == "emulated"  # as mpdiag trains in it


def test_what_is_said_of_a_cpus_instructions():
    def reason(names, fmt, **more):
        return next(a.reason for a in cpu_format_support("", cpu(names, **more)) if a.format == fmt)

    assert reason(SAPPHIRE, "int8").startswith("supported by AMX-INT8")
    assert "AVX512-VNNI" in reason(ZEN4, "int8")
    assert "AVX512-FP16" in reason(SAPPHIRE, "fp16")
    assert "AMX-FP16" in reason(GRANITE, "fp16")
    assert "FP16" not in reason("avx2", "fp16")
    assert "without dot product" in reason("avx2", "int8")
    arm = {"architecture": "arm"}
    assert "SME" in reason("neon bf16 i8mm sme", "bf16", **arm)
    assert "Apple" in reason("neon bf16 i8mm sme", "bf16", apple=True, **arm)


def test_instructions_from_the_operating_system(tmp_path):
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        "model name\t: Xeon\nflags\t\t: fpu avx512f amx_tile amx_bf16 amx_int8 avx_vnni\n"
    )
    found = read_instructions(None, listed)
    assert found.names == {"avx512_f", "amx_tile", "amx_bf16", "amx_int8", "avx_vnni"}
    assert found.unit_dtypes == {"bf16", "int8"}
    listed.write_text("Features\t: fp asimd asimddp bf16 i8mm\n")
    assert read_instructions(None, listed).names == {"dot", "bf16", "i8mm"}
    assert read_instructions(None, tmp_path / "none").names is None
    assert read_instructions(None, tmp_path / "none").unit_dtypes is None


def test_instructions_from_torch(tmp_path):
    told = {"architecture": "x86_64", "avx2": True, "amx_tile": False, "sve_max_length": 128}
    fake = SimpleNamespace(cpu=SimpleNamespace(get_capabilities=lambda: told))
    assert read_instructions(fake, tmp_path / "none").names == {"avx2"}
    real = read_instructions(torch)
    if real.names is not None:
        assert real.has("amx_tile") == bool(torch.cpu._is_amx_tile_supported())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12.4", (12, 4)), ("550.54.15", (550, 54, 15)),
        (8902, (8, 9, 2)), (91002, (9, 10, 2)), (None, None),
    ],
)  # fmt: skip
def test_versions(text, expected):
    assert version(text) == expected


def flags(module=torch):
    return {f.name: f for f in read_flags(module)}


def test_settings_are_read_as_they_stand(monkeypatch):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        strict = flags()["torch.get_float32_matmul_precision()"]
        torch.set_float32_matmul_precision("high")
        loose = flags()["torch.get_float32_matmul_precision()"]
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
    ("names", "precision", "meaning", "advised"),
    [
        (SAPPHIRE, "highest", "FP32 matrix products are computed in FP32", True),
        (
            SAPPHIRE,
            "high",
            "no effect on this CPU: FP32 matrix products are computed in FP32",
            True,
        ),
        (GRANITE, "high", "oneDNN may use TF32 for FP32 matrix products", True),
        (SAPPHIRE, "medium", "FP32 matrix products are computed in BF16 on AMX", False),
        (ZEN4, "highest", "FP32 matrix products are computed in FP32", False),
        (ZEN4, "medium", "no effect on this CPU: FP32 matrix products are computed in FP32", False),
        ("neon bf16", "medium", "oneDNN may use BF16 for FP32 matrix products", False),
        (None, "medium", "not known", False),
    ],
)
def test_matmul_precision_on_a_cpu(monkeypatch, names, precision, meaning, advised):
    """``"high"`` allows TF32, which no x86 CPU before AMX-FP16 has; ``"medium"`` is BF16 on AMX."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    found = {f.name: f for f in read_flags(torch, cpu(names))}
    flag = found["torch.get_float32_matmul_precision()"]
    assert flag.meaning == meaning
    words = 'torch.set_float32_matmul_precision("medium") multiplies in BF16 on AMX'
    assert flag.advice == (words if advised else "")
    convolutions = found.get("torch.backends.mkldnn.conv.fp32_precision")
    if convolutions is not None:
        assert ("bf16" in convolutions.advice) == ("amx_bf16" in (names or ""))


def test_a_gpu_keeps_its_own_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {f.name: f for f in read_flags(torch, cpu(SAPPHIRE))}
    assert "TF32" in found["torch.get_float32_matmul_precision()"].advice
    assert "torch.backends.mkldnn.conv.fp32_precision" not in found


def test_only_variables_that_matter_are_shown(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("MY_TOKEN", "secret")
    found = flags()
    assert found["NVIDIA_TF32_OVERRIDE"].value == "0"
    assert "secret" not in str(found)


def test_a_torch_that_does_not_tell():
    class Silent:
        def __getattr__(self, name):
            raise AttributeError(name)

    module = SimpleNamespace(
        backends=SimpleNamespace(
            cuda=SimpleNamespace(matmul=Silent()),
            cudnn=Silent(),
            mkldnn=SimpleNamespace(is_available=lambda: False),
        ),
        get_float32_matmul_precision=lambda: "odd",
    )
    found = flags(module)
    assert found["torch.backends.cudnn.allow_tf32"].value == "not known"
    assert found["torch.get_float32_matmul_precision()"].meaning == "not known"
