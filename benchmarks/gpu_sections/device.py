"""(f) The device's facts: NVML, ``mpdiag doctor``, and what it says under load."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch

from gpu_sections import programs
from gpu_sections.runner import has
from mpdiag.hardware.devices import read_nvml, throttling

if TYPE_CHECKING:
    from gpu_sections.child import Context

ALIKE = 0.03
"""Share by which torch's memory may be off NVML's, which counts what the driver keeps."""


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
    same = [
        gpu
        for gpu in seen.devices
        if gpu.name == here.name and gpu.capability == (here.major, here.minor)
    ]
    if not same:
        names = ", ".join(f"{g.name} {g.capability}" for g in seen.devices)
        ctx.check("f-nvml", False, f"torch has {here.name}, NVML {names}")
        return
    gpu = same[0]
    off = abs((gpu.memory_bytes or 0) - here.total_memory) / here.total_memory
    wanted = ("driver", "clock_mhz", "max_clock_mhz", "memory_clock_mhz", "power_watts")
    wanted += ("power_limit_watts", "temperature")
    absent = [name for name in wanted if getattr(gpu, name) is None]
    known = "known" if gpu.peaks is not None else "not known"
    figure = f"{gpu.name}, {gpu.clock_mhz} of {gpu.max_clock_mhz} MHz, peak rates {known}"
    reason = f"NVML gives no {', '.join(absent)}" if absent else ""
    ctx.check("f-nvml", off <= ALIKE and not absent, figure, reason=reason, facts=gpu.to_json())


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
    formats = ", ".join(f"{k} {v}" for k, v in abilities.items())
    figure = f"{len(devices)} devices; {formats}"
    ctx.check("f-doctor", held, figure, reason="; ".join(problems[:4]), abilities=abilities)


def load(ctx: Context) -> None:
    """Products for some seconds, with NVML read beside them."""
    if not ctx.cuda:
        words = [throttling(1 << bit) for bit in range(8)]
        ctx.check("f-throttling", sum(map(bool, words)) == 6, "no load without a GPU")
        return
    problem = read_nvml().problem
    if problem is not None or not has("pynvml"):
        ctx.skip(problem or "nvidia-ml-py is not installed", "f-throttling")
        return
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = min(4.0 if not ctx.quick else 2.0, ctx.left)
    began, samples, said, missed = time.monotonic(), 0, set(), set()
    clocks, powers, heat = [], [], []
    while time.monotonic() - began < seconds:
        for _ in range(40):
            a @ b
        bits, gpu = raw_bits(), read_nvml().devices[0]
        torch.cuda.synchronize()
        samples += 1
        said.update(gpu.throttling)
        # Two readings are some milliseconds apart: a reason must be missed in both to count.
        missed.update(set(throttling(bits & raw_bits())) - set(gpu.throttling))
        clocks.append(gpu.clock_mhz or 0)
        powers.append(gpu.power_watts or 0)
        heat.append(gpu.temperature or 0)
    figure = f"{min(clocks)} to {max(clocks)} MHz, {max(powers):.0f} W, {max(heat)} °C; "
    figure += f"said: {', '.join(sorted(said)) or 'nothing holds the clocks down'}"
    reason = f"not said: {', '.join(sorted(missed))}" if missed else ""
    ctx.check("f-throttling", not missed, figure, reason=reason, samples=samples)


def raw_bits() -> int:
    """The first GPU's reasons for lower clocks, as NVML gives them."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        names = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        ask: Any = next(getattr(pynvml, n) for n in names if hasattr(pynvml, n))
        return int(ask(handle))
    finally:
        pynvml.nvmlShutdown()
