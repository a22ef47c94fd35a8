"""(f) The device's facts: NVML, ``mpdiag doctor``, and what it says under load."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch

from gpu_sections import programs
from mpdiag.hardware.devices import read_nvml, throttling
from mpdiag.hardware.peaks import has_tensor_cores

if TYPE_CHECKING:
    from gpu_sections.child import Context
    from mpdiag.hardware.devices import DeviceFacts

ALIKE = 0.03
"""Share by which torch's memory may be off NVML's, which counts what the driver keeps."""
WANTED = {
    "driver": ("nvmlSystemGetDriverVersion",),
    "clock_mhz": ("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
    "max_clock_mhz": ("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
    "memory_clock_mhz": ("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
    "power_watts": ("nvmlDeviceGetPowerUsage",),
    "power_limit_watts": ("nvmlDeviceGetEnforcedPowerLimit",),
    "temperature": ("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
}
"""Facts that should be there, with the call of NVML that gives each."""
UNLISTED = "NVML lists no device on the bus of torch's"
FAST = 0x1 | 0x2 | 0x100
"""Bits of NVML that slow nothing down: idle, and clocks set for applications or for a display."""
FORMATS = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""Formats with the first compute capability whose Tensor Cores have them."""


def examine(ctx: Context) -> None:
    """Every promise of facts."""
    with ctx.settling("f-nvml"):
        compare_facts(ctx)
    with ctx.settling("f-doctor"):
        ask_doctor(ctx)
    with ctx.settling("f-throttling"):
        load(ctx)


def compare_facts(ctx: Context) -> None:
    """NVML against torch."""
    seen = read_nvml()
    if not ctx.cuda:
        ctx.check("f-nvml", True, f"{len(seen.devices)} GPUs", reason=seen.problem or "")
        return
    if seen.problem is not None:
        ctx.skip(seen.problem, "f-nvml")
        return
    here = torch.cuda.get_device_properties(0)
    index, handle = own_handle(here)
    if index is None:
        ctx.skip(UNLISTED, "f-nvml")
        return
    if seen.devices[index].mig:
        ctx.skip("torch's device is a slice (MIG), and NVML's facts are the whole GPU's", "f-nvml")
        return
    gpu = seen.devices[index]
    off = abs((gpu.memory_bytes or 0) - here.total_memory) / here.total_memory
    same = gpu.name == here.name and gpu.capability == (here.major, here.minor) and off <= ALIKE
    absent = [name for name in WANTED if getattr(gpu, name) is None]
    refused = [name for name in absent if refuses(handle, name)]
    known = "known" if gpu.peaks is not None else "not known"
    figure = f"{gpu.name}, {gpu.clock_mhz} of {gpu.max_clock_mhz} MHz, peak rates {known}"
    said = (
        [] if same else [f"torch: {here.name}, {here.total_memory} bytes; NVML: {gpu.memory_bytes}"]
    )
    lost = [name for name in absent if name not in refused]
    said += [f"not read: {', '.join(lost)}"] if lost else []
    said += [f"NVML itself refuses {', '.join(refused)}"] if refused else []
    ctx.check("f-nvml", same and not lost, figure, reason="; ".join(said), facts=gpu.to_json())


def own_handle(here: Any) -> tuple[int | None, Any]:
    """NVML's number and handle of torch's device, by its bus; None where NVML has no such device.

    ``CUDA_VISIBLE_DEVICES`` and the order of buses make NVML's numbers differ from torch's. Where
    torch does not name the bus, the first device of the same name is taken.
    """
    import pynvml

    pynvml.nvmlInit()  # and left so: handles are valid until the shutdown
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    wanted = tuple(getattr(here, name, None) for name in names)
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        place, name = pynvml.nvmlDeviceGetPciInfo(handle), pynvml.nvmlDeviceGetName(handle)
        known = (place.domain, place.bus, place.device)
        if known == wanted or (None in wanted and name in (here.name, here.name.encode())):
            return index, handle
    return None, None


def refuses(handle: Any, name: str) -> bool:
    """Whether NVML, asked here once more, gives a fact to nobody: not supported, or not permitted."""
    import pynvml

    function, *arguments = WANTED[name]
    if not hasattr(pynvml, function):
        return True
    try:
        own = () if function.startswith("nvmlSystem") else (handle,)
        getattr(pynvml, function)(*own, *(getattr(pynvml, a) for a in arguments))
    except pynvml.NVMLError:
        return True
    return False


def ask_doctor(ctx: Context) -> None:
    """The command, as one types it."""
    ran = programs.run(programs.mpdiag("doctor", "--json"), ctx.left)
    if ran.code is None:
        ctx.skip("the command did not end in time", "f-doctor")
        return
    ran.expect_success()
    document = json.loads(ran.out)
    devices = [d["name"] for d in document["devices"]]
    abilities = {a["format"]: a["how"] for a in document["abilities"]}
    expected = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    problems = [p["message"] for p in document["problems"]]
    held = devices == (expected if ctx.cuda else []) and {"fp16", "bf16", "fp8"} <= set(abilities)
    if ctx.cuda:
        held = held and abilities_fit(document["abilities"])
    formats = ", ".join(f"{k} {v}" for k, v in abilities.items())
    figure = f"{len(devices)} devices; {formats}"
    ctx.check("f-doctor", held, figure, reason="; ".join(problems[:4]), abilities=abilities)


def abilities_fit(said: list[dict[str, Any]]) -> bool:
    """Whether doctor grants the first device the formats that its capability has, and no others."""
    own = {a["format"]: a["how"] for a in said if a["device"] == torch.cuda.get_device_name(0)}
    here = torch.cuda.get_device_capability(0)
    without = has_tensor_cores(torch.cuda.get_device_name(0), here) is False
    return all(
        (own.get(k) == "tensor cores") == (here >= first and not without)
        for k, first in FORMATS.items()
    )


def load(ctx: Context) -> None:
    """Products for some seconds, with NVML read beside them."""
    if not ctx.cuda:
        words = [throttling(1 << bit) for bit in range(8)]
        ctx.check("f-throttling", sum(map(bool, words)) == 6, "no load without a GPU")
        return
    problem = read_nvml().problem
    if problem is not None:
        ctx.skip(problem, "f-throttling")
        return
    if ctx.left < 1:
        ctx.skip("no time was left for a load", "f-throttling")
        return
    index, handle = own_handle(torch.cuda.get_device_properties(0))
    if index is None:
        ctx.skip(UNLISTED, "f-throttling")
        return
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = min(4.0 if not ctx.quick else 2.0, ctx.left)
    began, samples, seen = time.monotonic(), [], []
    while time.monotonic() - began < seconds:
        for _ in range(100):  # about a sixth of a second, in which NVML is asked three times
            a @ b
        before, gpu, after = raw_bits(handle), read_nvml().devices[index], raw_bits(handle)
        torch.cuda.synchronize()
        samples.append(gpu)
        seen.append(((before or 0) & (after or 0), gpu.throttling))
        if before is None:
            ctx.skip("NVML gives no reasons for lower clocks on this GPU", "f-throttling")
            return
    report_load(ctx, samples, seen)


def report_load(
    ctx: Context, samples: list[DeviceFacts], seen: list[tuple[int, tuple[str, ...]]]
) -> None:
    """What NVML's bits were under load, and whether each was said in words.

    Args:
        ctx: Takes the check.
        samples: The facts, read again and again.
        seen: With each, the bits that were set before and after it, and the words.
    """
    clocks = [gpu.clock_mhz or 0 for gpu in samples]
    power = max(gpu.power_watts or 0 for gpu in samples)
    heat = max(gpu.temperature or 0 for gpu in samples)
    said = {words for _, sample in seen for words in sample}
    figure = f"{min(clocks)} to {max(clocks)} MHz, {power:.0f} W, {heat} °C; "
    figure += f"said: {', '.join(sorted(said)) or 'nothing holds the clocks down'}"
    missed = {hex(bit) for bits, words in seen for bit in unsaid(bits, words)}
    if not any(bits & ~FAST for bits, _ in seen):
        ctx.check("f-throttling", None, figure, reason="NVML gave no reason under this load")
        return
    reason = f"not said: {', '.join(sorted(missed))}" if missed else ""
    ctx.check("f-throttling", not missed, figure, reason=reason, samples=len(samples))


def unsaid(bits: int, words: tuple[str, ...]) -> list[int]:
    """The bits that slow kernels down and that no word stands for."""
    single = [1 << i for i in range(bits.bit_length()) if bits & ~FAST & (1 << i)]
    return [bit for bit in single if not set(throttling(bit)) & set(words)]


def raw_bits(handle: Any) -> int | None:
    """A GPU's reasons for lower clocks, as NVML gives them; None if it gives none."""
    import pynvml

    for name in (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ):
        try:
            return int(getattr(pynvml, name)(handle))
        except (AttributeError, pynvml.NVMLError):  # an older package, or driver
            continue
    return None
