"""What is installed here, what that means for training in mixed precision, and what ``doctor`` prints.

The packages that can fail to load although they are installed (a wrong CUDA library, a Numba too
old for this NumPy) are imported for real; of the others, the version is looked up.
"""

import os
import platform
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from mpdiag.display.wording import counted
from mpdiag.hardware import capabilities as able
from mpdiag.hardware import devices as nvml
from mpdiag.hardware.cpu_instructions import cpu_name, read_instructions
from mpdiag.hardware.flags import Flag, read_flags
from mpdiag.installation.extras import EXTRAS
from mpdiag.reports.text.tables import Fitted
from mpdiag.version import __version__

SCHEMA_VERSION = 1

REQUIRED = (
    *("torch", "numpy", "pandas", "pyarrow", "plotly"),
    *("numba", "nvidia-ml-py", "typer", "rich"),
)
OPTIONAL = ("triton", *dict.fromkeys(name for extra in EXTRAS.values() for name in extra.packages))
_LOADED = ("torch", "numba", "pyarrow")


@dataclass(frozen=True)
class Device:
    """One CUDA device, as torch sees it."""

    index: int
    name: str
    capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Problem:
    """Something that is missing or does not load, and what to do about it."""

    message: str
    fix: str


@dataclass(frozen=True)
class Environment:
    """The facts of this machine and this Python.

    Attributes:
        mpdiag: Version of this package.
        python: Version of Python.
        platform: Operating system and machine.
        cpus: Logical CPUs this process may use.
        threads: Threads torch computes with; None where torch does not load.
        cpu_capability: Vector instructions torch uses on the CPU; None where torch does not load.
        packages: Installed version of each required and optional package; None where absent.
        cuda: CUDA version torch was built with; None for a build without.
        devices: CUDA devices that torch can use.
        problems: What is missing or broken.
        cudnn: cuDNN's version; None without.
        gpus: What NVML says of every NVIDIA GPU.
        abilities: What each device can do with each format.
        flags: Settings that decide what runs on Tensor Cores.
    """

    mpdiag: str
    python: str
    platform: str
    cpus: int
    threads: int | None
    cpu_capability: str | None
    packages: dict[str, str | None]
    cuda: str | None
    devices: tuple[Device, ...]
    problems: tuple[Problem, ...]
    cudnn: str | None = None
    gpus: tuple[nvml.DeviceFacts, ...] = ()
    abilities: tuple[able.FormatSupport, ...] = ()
    flags: tuple[Flag, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The facts as a JSON document."""
        document = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        return document | {"gpus": [gpu.to_json() for gpu in self.gpus]}


def examine() -> Environment:
    """Examine this machine; takes as long as importing torch."""
    packages = {name: _installed(name) for name in (*REQUIRED, *OPTIONAL)}
    problems = [
        Problem(f"{name} is not installed", f"pip install {name}")
        for name in REQUIRED
        if packages[name] is None
    ]
    loaded: dict[str, ModuleType] = {}
    for name in _LOADED:
        if packages[name] is not None:
            try:
                loaded[name] = import_module(name)
            except Exception as error:  # noqa: BLE001 - whatever it raises is what we report
                reason = " ".join(str(error).split()) or type(error).__name__
                fix = f"pip install --force-reinstall {name}"
                problems.append(Problem(f"{name} does not load: {reason}", fix))
    torch = loaded.get("torch")
    found = _devices(torch) if torch else ()
    seen = nvml.read_nvml()
    if torch and torch.version.cuda and not found:
        message = f"torch was built for CUDA {torch.version.cuda}, but finds no GPU"
        problems.append(Problem(message, "check the driver with nvidia-smi; the CPU works"))
    if found and packages["triton"] is None:
        fix = "pip install triton; without it plain torch counts, in several passes"
        problems.append(Problem("triton is not installed, so recording on the GPU is slower", fix))
    return Environment(
        mpdiag=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpus=processor_cores(),
        threads=torch.get_num_threads() if torch else None,
        cpu_capability=torch.backends.cpu.get_cpu_capability() if torch else None,
        packages=packages,
        cuda=torch.version.cuda if torch else None,
        devices=found,
        problems=(*problems, *_held_back(seen)),
        cudnn=_cudnn(torch),
        gpus=seen.devices,
        abilities=_abilities(torch, found, seen),
        flags=read_flags(torch, read_instructions(torch)) if torch else (),
    )


def _held_back(seen: nvml.NvmlReading) -> tuple[Problem, ...]:
    """What slows a GPU down right now."""
    return tuple(
        Problem(f"{gpu.name}: {reason}", "see nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE")
        for gpu in seen.devices
        for reason in gpu.throttling
    )


def _cudnn(torch: Any) -> str | None:
    number = torch.backends.cudnn.version() if torch else None
    numbers = able.version(number)
    return None if numbers is None else ".".join(map(str, numbers))


def _abilities(
    torch: Any, found: tuple[Device, ...], seen: nvml.NvmlReading
) -> tuple[able.FormatSupport, ...]:
    """Of every GPU torch can use, else of the CPU."""
    if torch is None:
        return ()
    if not found:
        return able.cpu_format_support(cpu_name(), read_instructions(torch))
    driver = seen.devices[0].driver if seen.devices else None
    software = able.Software(
        cuda=able.version(torch.version.cuda),
        cudnn=able.version(_cudnn(torch)),
        driver=able.version(driver),
    )
    kinds = {(d.name, d.capability) for d in found}  # eight of a kind need saying once
    return tuple(
        ability
        for name, capability in sorted(kinds)
        for ability in able.gpu_format_support(nvml.DeviceFacts(name, _pair(capability)), software)
    )


def _pair(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor_cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _devices(torch: Any) -> tuple[Device, ...]:
    if not torch.cuda.is_available():
        return ()
    devices = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        capability = f"{facts.major}.{facts.minor}"
        devices.append(Device(index, facts.name, capability, facts.total_memory))
    return tuple(devices)


def environment_text(environment: Environment, *, verbose: bool = False) -> RenderableType:
    """The facts for a person: problems first, in one screen.

    Args:
        environment: What was found.
        verbose: With every package, the reason of each format's answer, and every setting.
    """
    e = environment
    problems = [
        Text.assemble(("problem: ", "bold yellow"), f"{p.message}: {p.fix}") for p in e.problems
    ]
    if verbose:
        return Group(*problems, _packages(e), *_gpu_lines(e), *_tables(e))
    more = Text("With -v: every package, reasons, what Tensor Cores need, all settings", "dim")
    return Group(*problems, _brief(e), *_gpu_lines(e), *_brief_tables(e), more)


def _brief(e: Environment) -> Table:
    """Versions, devices, and which extras are there."""
    facts = _device_rows(e)
    versions = ", ".join(f"{name} {e.packages[name]}" for name in REQUIRED[:2] if e.packages[name])
    facts.add_row("packages", versions)
    complete = [x.name for x in EXTRAS.values() if all(e.packages[name] for name in x.packages)]
    missing = [x.name for x in EXTRAS.values() if x.name not in complete]
    facts.add_row("extras", Text(", ".join(complete) or "none"))
    if missing:
        facts.add_row("not installed", Text(", ".join(missing)))
    return facts


def _brief_tables(e: Environment) -> list[RenderableType]:
    """Where each format is computed, and the settings that could be better."""
    parts: list[RenderableType] = []
    if e.abilities:
        parts.append(Text(_ABILITIES, "bold"))
        table = Fitted(("format", "device", "where"), boxed=False, lead=3)
        for a in e.abilities:
            table.add_row(a.format.upper(), a.device, a.how)
        parts.append(table)
    advised = [flag for flag in e.flags if flag.advice]
    if advised:
        names = (flag.name.removeprefix("torch.backends.") for flag in advised)
        parts.append(Text(f"Settings that may be better: {', '.join(names)}"))
    return parts


_ABILITIES = "What this machine can do with each format"


def _device_rows(e: Environment) -> Table:
    """mpdiag, Python, CPU and GPUs."""
    facts = Table.grid("", Column(overflow="fold"), padding=(0, 2))
    facts.add_row("mpdiag", e.mpdiag)
    facts.add_row("python", f"{e.python} on {e.platform}")
    threads = "" if e.threads is None else f", {counted(e.threads, 'torch thread')}"
    capability = "" if e.cpu_capability is None else f" ({e.cpu_capability})"
    facts.add_row("cpu", f"{e.cpus} available{threads}{capability}")
    for device in e.devices:
        gigabytes = device.memory_bytes / 2**30
        what = f"{device.name}, compute capability {device.capability}, {gigabytes:.0f} GiB"
        facts.add_row(f"cuda:{device.index}", Text(what))
    if not e.devices:
        facts.add_row("cuda", "no GPU; recording, analysis and emulated FP16 work on the CPU")
    return facts


def _packages(e: Environment) -> Table:
    """Devices and every package."""
    facts = _device_rows(e)
    for name in REQUIRED:
        facts.add_row(name, e.packages[name] or Text("not installed (required)"))
    if e.devices:
        facts.add_row("triton", e.packages["triton"] or Text("not installed (see above)"))
    for extra in EXTRAS.values():
        there = [f"{name} {e.packages[name]}" for name in extra.packages if e.packages[name]]
        complete = len(there) == len(extra.packages)
        lack = f"not installed: {extra.install} ({extra.serves})"
        facts.add_row(Text(f"[{extra.name}]"), Text(", ".join(there) if complete else lack))
    return facts


def _gpu_lines(e: Environment) -> list[RenderableType]:
    """Clocks, power and driver of each GPU, as NVML reports them."""
    lines = []
    for gpu in e.gpus:
        parts = [f"driver {gpu.driver}" if gpu.driver else ""]
        if gpu.clock_mhz is not None and gpu.max_clock_mhz is not None:
            parts.append(f"{gpu.clock_mhz} of {gpu.max_clock_mhz} MHz")
        if gpu.power_watts is not None and gpu.power_limit_watts is not None:
            parts.append(f"{gpu.power_watts:.0f} of {gpu.power_limit_watts:.0f} W")
        if gpu.temperature is not None:
            parts.append(f"{gpu.temperature} °C")
        if gpu.clocks_fixed:
            parts.append("clocks set manually")
        if gpu.mig:
            parts.append("partitioned (MIG)")
        if gpu.peaks is None:
            parts.append("peak rates unknown: no roofline")
        lines.append(Text(f"{gpu.name}: {', '.join(p for p in parts if p)}"))
    return list(lines)


def _tables(e: Environment) -> list[RenderableType]:
    """Formats and settings."""
    tables: list[RenderableType] = []
    if e.abilities:
        title = _ABILITIES
        if not e.devices:
            title += " (no GPU: Tensor Cores cannot be used or verified here)"
        table = Fitted(
            ("format", "device", "where", "why", "Tensor Cores need"),
            title,
            sentences=frozenset({"why", "Tensor Cores need"}),
        )
        for a in e.abilities:
            table.add_row(a.format.upper(), a.device, a.how, a.reason, a.needs)
        tables += [Text(""), table]
    if e.flags:
        title = "Settings that matter (torch's defaults and the environment)"
        table = Fitted(
            ("setting", "value", "effect", "better"),
            title,
            sentences=frozenset({"effect", "better"}),
            lead=2,
        )
        for flag in e.flags:
            table.add_row(
                flag.name.removeprefix("torch.backends."), flag.value, flag.meaning, flag.advice
            )
        tables += [Text(""), table]
    return tables
