"""What ``doctor`` prints: problems first, then what is installed and what it can do."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mpdiag.installation.extras import EXTRAS
from mpdiag.reports.machine import REQUIRED, Environment
from mpdiag.reports.text.tables import Fitted


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
    more = Text("With -v: every package, why, what Tensor Cores need, all settings", "dim")
    return Group(*problems, _brief(e), *_gpu_lines(e), *_brief_tables(e), more)


def _brief(e: Environment) -> Table:
    """Versions, devices, and which extras are there."""
    facts = _devices(e)
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


def _devices(e: Environment) -> Table:
    """mpdiag, Python, CPU and GPUs."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("mpdiag", e.mpdiag)
    facts.add_row("python", f"{e.python} on {e.platform}")
    threads = "" if e.threads is None else f", threads of torch: {e.threads}"
    capability = "" if e.cpu_capability is None else f" ({e.cpu_capability})"
    facts.add_row("cpu", f"{e.cpus} available{threads}{capability}")
    for device in e.devices:
        gigabytes = device.memory_bytes / 2**30
        what = f"{device.name}, compute capability {device.capability}, {gigabytes:.0f} GiB"
        facts.add_row(f"cuda:{device.index}", Text(what))
    if not e.devices:
        facts.add_row("cuda", "no device; recording, analysis and emulated FP16 work on the CPU")
    return facts


def _packages(e: Environment) -> Table:
    """Devices and every package."""
    facts = _devices(e)
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
            parts.append("clocks set by hand")
        if gpu.mig:
            parts.append("cut into slices (MIG)")
        if gpu.peaks is None:
            parts.append("peak rates not known: no roofline")
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
            ("setting", "value", "what that does", "better"),
            title,
            sentences=frozenset({"what that does", "better"}),
            lead=2,
        )
        for flag in e.flags:
            table.add_row(
                flag.name.removeprefix("torch.backends."), flag.value, flag.meaning, flag.advice
            )
        tables += [Text(""), table]
    return tables
