"""Evidence, other than its name, of whether a kernel used Tensor Cores.

Hardware counters are the strongest evidence, then the rate, then the name. A kernel that multiplies
faster than the ordinary cores can must have used Tensor Cores, whatever its name; a low rate proves
nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mpdiag.hardware.devices import DeviceFacts
    from mpdiag.hardware.kernels import KernelFacts, KernelVerdict
    from mpdiag.hardware.peaks import Peaks
    from mpdiag.tensorcores.events import Kernel
    from mpdiag.tensorcores.work.traced_operation import OperationTime

MARGIN = 1.1
"""The factor by which a rate must exceed the published one: clocks may exceed the boost clock."""
FLOP_PER_CLOCK = {8: 512, 9: 512, 10: 512, 12: 256, 7: 256}
"""The most that the ordinary cores of one multiprocessor do, by major capability: FP16 in pairs
(CUDA C++ Programming Guide, arithmetic throughput)."""

_TENSOR = re.compile(
    r"pipe_tensor|pipe_tc_|inst_executed_pipe_uniform_tensor|ops_path_tensor|SQ_INSTS_VALU_MFMA"
)
# Only these count every kind of Tensor Core instruction, so only their zero is a no.
_WHOLE = re.compile(r"inst_executed_pipe_tensor\.|pipe_tensor_cycles_active|pipe_tc_cycles_active")


@dataclass(frozen=True)
class KernelEvidence:
    """Evidence for or against a kernel's use of Tensor Cores.

    Attributes:
        kind: ``"counters"`` or ``"rate"``.
        tensor_core: Whether it used them.
        text: The numbers behind it.
    """

    kind: Literal["counters", "rate"]
    tensor_core: bool
    text: str


def by_counters(runs: Iterable[Kernel]) -> KernelEvidence | None:
    """Evidence from hardware counters; None if no counter of the Tensor pipe was measured."""
    highest: dict[str, float] = {}
    for run in runs:
        for name, value in (run.counters or {}).items():
            if _TENSOR.search(name):
                highest[name] = max(value, highest.get(name, 0.0))
    active = {name: value for name, value in highest.items() if value > 0}
    if active:
        name = max(active, key=lambda n: (bool(_WHOLE.search(n)), active[n]))
        return KernelEvidence("counters", True, f"{name} = {active[name]:g}")
    whole = [name for name in highest if _WHOLE.search(name)]
    return KernelEvidence("counters", False, f"{whole[0]} = 0") if whole else None


def by_measured_rate(runs: Iterable[Kernel], device: DeviceFacts | None) -> KernelEvidence | None:
    """Evidence from a run's own FLOP, time and clock, where ncu measured the clock."""
    major = device.capability[0] if device and device.capability else None
    a_clock = FLOP_PER_CLOCK.get(major or 0)
    for run in runs:
        counters: Mapping[str, float] = run.counters or {}
        processors, clock = counters.get("# SMs"), counters.get("SM Frequency")
        if not (a_clock and run.flops and run.duration_us and processors and clock):
            continue
        rate, limit = run.flops / run.duration_us * 1e6, processors * clock * a_clock
        if rate > limit:
            return KernelEvidence("rate", True, _rates(rate, limit))
    return None


def by_rate(operation: OperationTime, peaks: Peaks | None) -> KernelEvidence | None:
    """Evidence from an operation's rate: proof of Tensor Cores, or None.

    Only matrix products count: Winograd and FFT convolutions do less arithmetic than their shapes
    imply.
    """
    work = operation.work
    if peaks is None or work is None or work.kind != "matmul" or operation.time_us <= 0:
        return None
    dtype = work.dtype or operation.dtype
    if dtype is None or dtype.startswith(("fp8", "int", "fp4")):
        dtype = "fp16"
    rate = work.least_flops * operation.calls / operation.time_us * 1e6
    limit = peaks.cuda_rate(dtype)
    return KernelEvidence("rate", True, _rates(rate, limit)) if rate > MARGIN * limit else None


def _rates(rate: float, limit: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s, CUDA cores do at most {limit / 1e12:.1f}"


def measured_verdict(facts: KernelFacts, measured: KernelEvidence | None) -> KernelVerdict:
    """The verdict by the name, corrected by what was measured."""
    if measured is None or (measured.tensor_core and facts.verdict == "tensor_core"):
        return facts.verdict
    if measured.tensor_core:
        # The rate of a product says nothing about helpers and additions that ran with it.
        matrix = facts.verdict in ("cuda_core", "unknown")
        return "tensor_core" if matrix or measured.kind == "counters" else facts.verdict
    if facts.verdict == "tensor_core":
        return "cuda_core"
    return facts.verdict


def contradicts(facts: KernelFacts, measured: KernelEvidence | None) -> bool:
    """Whether the measurement says the opposite of the name; an unknown name is no contradiction."""
    if measured is None:
        return False
    if measured.tensor_core:
        against = {"cuda_core"} | ({"other", "layout"} if measured.kind == "counters" else set())
        return facts.verdict in against
    return facts.verdict == "tensor_core"
