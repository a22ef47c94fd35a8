"""What NVML says, through a stand-in for its module."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from goldens import assert_as_kept

from mpdiag.hardware import devices
from mpdiag.hardware.devices import DeviceFacts, read_nvml, throttling


class FakeError(Exception):
    pass


def fake(**changed):
    """A module like ``pynvml`` with one A100."""
    answers = {
        "nvmlSystemGetDriverVersion": lambda: "550.54.15",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda h: "NVIDIA A100-SXM4-40GB",
        "nvmlDeviceGetCudaComputeCapability": lambda h: (8, 0),
        "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(total=40 * 2**30),
        "nvmlDeviceGetClockInfo": lambda h, kind: {1: 1095, 2: 1215}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda h, kind: {1: 1410, 2: 1215}[kind],
        "nvmlDeviceGetPowerUsage": lambda h: 398_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda h: 400_000,
        "nvmlDeviceGetTemperature": lambda h, sensor: 71,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda h: 0x4,
        "nvmlDeviceGetMigMode": lambda h: [0, 0],
        **changed,
    }
    log = []
    module = SimpleNamespace(
        NVMLError=FakeError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=changed.pop("nvmlInit", lambda: log.append("init")),
        nvmlShutdown=lambda: log.append("shutdown"),
        log=log,
    )
    for name, answer in answers.items():
        if answer is not None and not hasattr(module, name):
            setattr(module, name, answer)
    return module


def refuse(*_):
    message = "Not Supported"
    raise FakeError(message)


def test_an_a100():
    nvml = fake()
    (device,) = read_nvml(nvml).devices
    document = json.dumps(device.to_json(), indent=1, allow_nan=False)
    assert_as_kept(Path(__file__).with_name("a100.json"), document)
    assert nvml.log == ["init", "shutdown"]


def test_what_a_device_does_not_tell_is_none():
    names = ("PowerUsage", "EnforcedPowerLimit", "MigMode", "CurrentClocksEventReasons")
    nvml = fake(**{f"nvmlDeviceGet{name}": refuse for name in names})
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda h: 0x40 | 0x2 | 0x1
    nvml.nvmlSystemGetDriverVersion = lambda: b"460.1"
    (device,) = read_nvml(nvml).devices
    assert (device.power_watts, device.power_limit_watts, device.mig) == (None, None, None)
    assert device.throttling == ("hardware thermal slowdown",)  # idle is none, set clocks neither
    assert device.clocks_fixed is True
    assert device.driver == "460.1"
    old = fake(nvmlDeviceGetCurrentClocksEventReasons=None)
    assert read_nvml(old).devices[0].clocks_fixed is None


def test_no_driver_is_one_sentence():
    seen = read_nvml(fake(nvmlInit=refuse))
    assert seen.devices == ()
    assert seen.problem == "NVML finds no NVIDIA driver here (Not Supported)"


def test_a_package_that_does_not_load(monkeypatch):
    def load(name):
        message = "no pynvml"
        raise ImportError(message)

    monkeypatch.setattr(devices, "import_module", load)
    assert read_nvml().problem == "nvidia-ml-py cannot be imported (no pynvml)"


def test_the_real_package_has_what_is_asked_for():
    pynvml = pytest.importorskip("pynvml")
    for name in vars(fake()):
        if name != "log":
            assert hasattr(pynvml, name), name
    for bit, _ in devices._THROTTLE:
        known = {v for k, v in vars(pynvml).items() if k.startswith("nvmlClocksEventReason")}
        assert bit in known
    assert throttling(pynvml.nvmlClocksEventReasonGpuIdle) == ()


def test_a_device_known_by_its_capability_alone():
    """Traces of MI300X carry a blank name: what it is cannot be told, what it is not can."""
    document = DeviceFacts("", (9, 4), processors=304).to_json()
    assert document["peaks"] is None
    assert document["peaks_at_most"]["cuda_tflops"]["bf16"] == 163.5
    assert DeviceFacts("AMD Instinct MI300X", (9, 4)).to_json()["peaks_at_most"] is None
    unknown = DeviceFacts("NVIDIA Graphics Device").to_json()
    fields = ("generation", "has_tensor_cores", "peaks", "peaks_at_most")
    assert [unknown[field] for field in fields] == [None] * 4
