"""Facts of a device and its present state: from a trace, from torch, or from NVML.

NVML (the library behind nvidia-smi) knows what torch does not: a GPU's current and maximum clocks,
why it is throttled, its power and its driver. Nothing here changes a setting.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from mpdiag.hardware import alignment, peaks
from mpdiag.hardware.peaks import Peaks

_THROTTLE = (
    # (bit, its meaning in words); bits as in nvml.h, nvmlClocksEventReason*
    (0x0000000000000004, "the software power cap holds clocks down"),
    (0x0000000000000008, "hardware slowdown: temperature, power brake or supply"),
    (0x0000000000000010, "sync boost: another GPU of the group is slower"),
    (0x0000000000000020, "software thermal slowdown"),
    (0x0000000000000040, "hardware thermal slowdown"),
    (0x0000000000000080, "hardware power brake"),
)
"""Reasons that slow kernels down; being idle and clocks set on purpose are not among them."""
_CLOCKS_SET = 0x0000000000000002


@dataclass(frozen=True)
class DeviceFacts:
    """One device. Fields that the source does not provide are None.

    Attributes:
        name: As the driver reports it.
        capability: Compute capability, major and minor.
        processors: Streaming multiprocessors or compute units.
        memory_bytes: Total memory of the device.
        driver: Driver version.
        clock_mhz, max_clock_mhz: Clock of the multiprocessors, now and at most.
        memory_clock_mhz, max_memory_clock_mhz: Clock of the memory, now and at most.
        power_watts, power_limit_watts: Power drawn now, and the limit in force.
        temperature: Degrees Celsius.
        throttling: What holds the clocks down now, in words.
        clocks_fixed: Whether someone set application clocks.
        mig: Whether it is partitioned (MIG).
    """

    name: str
    capability: tuple[int, int] | None = None
    processors: int | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature: int | None = None
    throttling: tuple[str, ...] = ()
    clocks_fixed: bool | None = None
    mig: bool | None = None

    @property
    def generation(self) -> str | None:
        """``"ampere"``, ``"cdna"`` …; None where it is not known or has no Tensor Cores."""
        if self.capability is not None:
            return alignment.generation(self.capability, self.name)
        known = self.peaks
        return known.generation if known is not None else None

    @property
    def peaks(self) -> Peaks | None:
        """Its published peak rates; None if the device is not known, never a guess."""
        return peaks.peaks_of(self.name, self.processors)

    @property
    def peaks_at_most(self) -> Peaks | None:
        """Its own rates, or upper bounds over all published devices of its capability."""
        return peaks.peaks_at_most(self.name, self.capability, self.processors)

    @property
    def has_tensor_cores(self) -> bool | None:
        """Whether it has Tensor Cores; None where that is not known."""
        return peaks.has_tensor_cores(self.name, self.capability)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, with the published rates of its model."""
        known, most = self.peaks, self.peaks_at_most
        document = asdict(self)
        document["capability"] = None if self.capability is None else list(self.capability)
        document["throttling"] = list(self.throttling)
        return document | {
            "generation": self.generation,
            "has_tensor_cores": self.has_tensor_cores,
            "peaks": None if known is None else _rates(known),
            "peaks_at_most": None if known is not None or most is None else _rates(most),
        }


def _rates(known: Peaks) -> dict[str, Any]:
    return {
        "tensor_tflops": dict(known.tensor),
        "cuda_tflops": dict(known.cuda),
        "bandwidth_gbps": known.bandwidth,
        "source": known.source,
    }


@dataclass(frozen=True)
class NvmlReading:
    """NVML's answer.

    Attributes:
        devices: Every GPU that NVML sees, in its order, which may differ from torch's.
        problem: Why there is no answer, in one sentence; None if there is one.
    """

    devices: tuple[DeviceFacts, ...] = ()
    problem: str | None = None


def read_nvml(nvml: Any = None) -> NvmlReading:
    """Ask NVML about every GPU.

    Args:
        nvml: The module to ask; by default ``pynvml`` of the package nvidia-ml-py.
    """
    try:
        module = import_module("pynvml") if nvml is None else nvml
    except Exception as error:  # noqa: BLE001 - a broken package is a fact to report
        return NvmlReading(problem=f"nvidia-ml-py cannot be imported ({error})")
    try:
        with _open(module):
            driver = _ask(module.nvmlSystemGetDriverVersion)
            return NvmlReading(
                tuple(
                    _facts(module, module.nvmlDeviceGetHandleByIndex(i), driver)
                    for i in range(module.nvmlDeviceGetCount())
                )
            )
    except module.NVMLError as error:
        return NvmlReading(problem=f"NVML finds no NVIDIA driver here ({error})")


@contextmanager
def _open(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _facts(nvml: Any, handle: Any, driver: Any) -> DeviceFacts:
    """One GPU; what its model or our permissions do not allow stays None."""

    def ask(name: str, *arguments: Any) -> Any:
        return _ask(getattr(nvml, name, None), handle, *arguments, failure=nvml.NVMLError)

    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # its name in drivers before 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    memory, mig = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetMigMode")
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    return DeviceFacts(
        name=_text(ask("nvmlDeviceGetName")) or "(unnamed GPU)",
        capability=None if capability is None else (capability[0], capability[1]),
        processors=None,
        memory_bytes=None if memory is None else int(memory.total),
        driver=_text(driver),
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        max_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        max_memory_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        power_watts=_thousandth(ask("nvmlDeviceGetPowerUsage")),
        power_limit_watts=_thousandth(ask("nvmlDeviceGetEnforcedPowerLimit")),
        temperature=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        throttling=throttling(reasons or 0),
        clocks_fixed=None if reasons is None else bool(reasons & _CLOCKS_SET),
        mig=None if mig is None else bool(mig[0]),
    )


def throttling(reasons: int) -> tuple[str, ...]:
    """NVML's throttle bits in words, only those that slow kernels down."""
    return tuple(words for bit, words in _THROTTLE if reasons & bit)


def _ask(
    function: Callable[..., Any] | None, *arguments: Any, failure: type[Exception] = Exception
) -> Any:
    """An answer; None if this GPU, driver or user gets none."""
    if function is None:
        return None
    try:
        return function(*arguments)
    except failure:
        return None


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):  # nvidia-ml-py before 11.525
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
