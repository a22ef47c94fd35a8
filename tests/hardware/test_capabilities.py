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


@pytest.mark.parametrize(
    ("amx", "avx", "how"),
    [(True, True, "matrix unit"), (False, True, "vector unit"), (None, None, "emulated")],
)
def test_bf16_on_a_cpu(amx, avx, how):
    found = {a.format: a.how for a in cpu_format_support("CPU", has_amx=amx, has_avx512_bf16=avx)}
    assert found["bf16"] == how
    assert found["fp16"] == "emulated"


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
