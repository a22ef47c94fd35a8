"""What hardware counters count: which matrix instructions, on which generation of GPU.

A counter that is not zero proves only what it counts, and a zero denies only what it counts. So each
one is listed with its *paths*, the kinds of matrix instruction that it counts, and each generation
with the paths that it has. Sources, besides the profilers' own lists of metrics
(``ncu --query-metrics --chip CHIP``, ``rocprofv3 --list-avail``):

- Nsight Compute, Kernel Profiling Guide, "Pipelines" (https://docs.nvidia.com/nsight-compute/ProfilingGuide):
  ``pipe_tensor_cycles_active`` from compute capability 7.0 to 12.0, ``pipe_tc_cycles_active`` on 10.x,
  for tcgen05 alone.
- ncu's description of ``sm__inst_executed_pipe_tensor_op_hmma_type_hfma2``: HFMA2.MMA, which multiplies
  and adds pairs and no matrix, runs on the Tensor pipe. Compilers load constants with it, so that plain
  FP32 kernels keep the pipe of an H100 busy for 1.4 to 1.7 % of the time (8.0 to 9.0; newer GPUs have no
  such metric).
- On 9.0 ``op_gmma`` counts wgmma, and ``ops_path_tensor_op_hmma`` does not. On 12.0 the metrics are
  named by subpipe: ``subpipe_hmma`` has HMMA, QMMA and OMMA, ``subpipe_hmma_op_hmma`` HMMA alone.
- AMD, "MI300 and MI200 series performance counters" and "MI350 series performance counters"
  (https://rocm.docs.amd.com/en/latest/conceptual/gpu-arch/mi300-mi200-performance-counters.html):
  ``SQ_INSTS_MFMA`` counts all, ``SQ_INSTS_VALU_MFMA_*`` one type each, ``…_MOPS_*`` its work divided
  by 512.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.kernels.rules import DATA

Vendor = Literal["nvidia", "amd"]

WHOLE = frozenset({"*"})
"""The paths of a counter that counts every matrix instruction."""
ADVICE: Mapping[Vendor, str] = {
    "nvidia": "ncu --csv --metrics gpu__time_duration.sum,sm__inst_executed_pipe_tensor.sum,"
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "amd": "rocprofv3 --pmc SQ_INSTS_MFMA --output-format csv",
}
"""Commands that measure enough to decide, on every generation."""

_PREFIX: Mapping[Vendor, str] = {"nvidia": "sm", "amd": "gfx"}
_DTYPES = {
    "F16": "fp16", "BF16": "bf16", "F32": "fp32", "F64": "fp64", "I8": "int8", "XF32": "tf32",
    "F8": "fp8", "fp16": "fp16", "bf16": "bf16", "tf32": "tf32", "fp64": "fp64", "int8": "int8",
    "int4": "int4", "fp8": "fp8", "fp4": "fp4",
}  # fmt: skip

_NVIDIA_PIPE = re.compile(
    r"^sms?p?__(?:inst_executed_pipe|pipe)_tensor(?:_cycles_active)?(?:_v\d)?(?:\.|$)"
)
_NVIDIA_PATH = re.compile(
    r"^sms?p?__(?:inst_executed_pipe|pipe)_tensor"
    r"(?:_subpipe_(?P<subpipe>hmma|imma|dmma))?(?:_op_(?P<op>[a-z]+mma))?"
    r"(?P<rest>_(?!cycles_active)[a-z0-9_]+)?(?:_cycles_active)?(?:\.|$)"
)
_NVIDIA_TC = re.compile(r"^sms?p?__(?:inst_executed_pipe|pipe)_tc(?:_cycles_active)?(?:\.|$)")
_NVIDIA_OPS = re.compile(
    r"^sms?p?__ops_path_tensor(?:_op_(?P<op>[a-z]+mma))?_src_(?P<src>[a-z0-9_]+?)_dst_(?P<dst>[a-z0-9]+)"
)
_NVIDIA_OTHER = re.compile(r"inst_executed_pipe_uniform_tensor|inst_executed_op_shared_gmma")
_HFMA2 = re.compile(r"_op_hmma(?=\.|$)|(?<=pipe_tensor)(?=\.|$)")
_AMD_WHOLE = re.compile(
    r"^(?:SQ_INSTS_(?:VALU_)?MFMA|SQ_VALU_MFMA_BUSY_CYCLES|MfmaUtil|MfmaFlops)(?:_sum)?$"
)
_AMD_TYPE = re.compile(
    r"^(?:SQ_INSTS_VALU_MFMA_(?:MOPS_)?|MfmaFlops)(?P<type>BF16|XF32|F6F4|F16|F32|F64|F8|I8)(?:_sum)?$"
)


@dataclass(frozen=True)
class CounterMeaning:
    """What one counter counts.

    Attributes:
        vendor: Whose GPU.
        paths: The kinds of matrix instruction that it counts, all of each kind; ``WHOLE`` for all;
            empty where it counts only a part of a kind, so that its zero denies nothing.
        shared: Whether it counts other instructions, too.
        dtype: Of the inputs, as in ``KernelFacts.dtype``; empty where it does not say.
        instruction: Such as ``DMMA``; empty where it does not say.
    """

    vendor: Vendor
    paths: frozenset[str]
    shared: bool = False
    dtype: str = ""
    instruction: str = ""


@cache
def _generations() -> dict[str, dict[str, str]]:
    return {row["generation"]: row for row in read_table(DATA / "counter_paths.tsv")}


@cache
def generation(capability: tuple[int, int] | None, vendor: Vendor) -> str | None:
    """The generation of a GPU, such as ``sm90``; None where it is not known."""
    if capability is None:
        return None
    major, minor = capability
    for name, row in _generations().items():
        same = {f"{major}.{minor}", f"{major}.*"} & set(row["capabilities"].split())
        if same and name.startswith(_PREFIX[vendor]):
            return name
    return None


def _paths(name: str) -> frozenset[str]:
    return frozenset(_generations()[name]["paths"].split())


def meaning(metric: str, capability: tuple[int, int] | None) -> CounterMeaning | None:
    """What a counter counts; None if no matrix instruction.

    Args:
        metric: As the profiler names it, with its suffix (``.sum``, ``_sum``).
        capability: Compute capability; None where it is not known.
    """
    if _AMD_WHOLE.match(metric):
        return CounterMeaning("amd", WHOLE, instruction="MFMA")
    typed = _AMD_TYPE.match(metric)
    if typed:
        kind = typed["type"]
        return CounterMeaning("amd", frozenset({kind}), False, _DTYPES.get(kind, ""), "MFMA")
    if "tensor" in metric or "_tc" in metric or "_gmma" in metric:
        return _nvidia(metric, generation(capability, "nvidia"))
    return None


def covers(paths: frozenset[str], capability: tuple[int, int] | None, vendor: Vendor) -> bool:
    """Whether zeros on these paths mean that no matrix instruction ran.

    Args:
        paths: What was measured.
        capability: Compute capability; where it is not known, every generation must be covered.
        vendor: Whose GPU.
    """
    if paths >= WHOLE:
        return True
    known = generation(capability, vendor)
    if known is not None:
        return paths >= _paths(known)
    vendors = [name for name in _generations() if name.startswith(_PREFIX[vendor])]
    return all(paths >= _paths(name) for name in vendors)


def without_hfma2(metric: str, counters: Mapping[str, float]) -> float | None:
    """A counter without the HFMA2.MMA in it; None where those were not counted beside it."""
    name, at, suffix = metric.partition(".")
    if not _HFMA2.search(name + at):
        return None
    prefix = name.partition("_pipe_tensor")[0]
    other = counters.get(f"{prefix}_pipe_tensor_op_hmma_type_hfma2{at}{suffix}")
    return None if other is None else max(0.0, counters[metric] - other)


def _nvidia(metric: str, known: str | None) -> CounterMeaning | None:
    shared = known is None or _generations()[known]["shared"] == "yes"
    if _NVIDIA_TC.match(metric):
        return CounterMeaning("nvidia", frozenset({"tcgen05"}), instruction="UTC*MMA")
    if _NVIDIA_PIPE.match(metric):
        return CounterMeaning("nvidia", WHOLE, shared)
    worked = _NVIDIA_OPS.match(metric)
    if worked:
        # Pairs of FP16 may be counted here where HFMA2.MMA runs on the pipe; other types may not.
        pairs = shared and (worked["src"], worked["dst"]) == ("fp16", "fp16")
        instruction = (worked["op"] or "").upper()
        return CounterMeaning(
            "nvidia", frozenset(), pairs, _DTYPES.get(worked["src"], ""), instruction
        )
    match = _NVIDIA_PATH.match(metric)
    if match:
        return _by_path(match, known, shared=shared)
    return CounterMeaning("nvidia", frozenset()) if _NVIDIA_OTHER.search(metric) else None


def _by_path(match: re.Match[str], known: str | None, *, shared: bool) -> CounterMeaning | None:
    """A counter of one kind of instruction, or of one subpipe."""
    subpipe, op, rest = match["subpipe"], match["op"], match["rest"]
    if rest == "_type_hfma2" or not (subpipe or op):
        return None
    kind = op or subpipe
    pairs = shared and kind == "hmma"
    dtype = (
        "fp64" if kind == "dmma" else "fp16" if known in ("sm70", "sm75") and kind == "hmma" else ""
    )
    if rest:  # a part of them, such as …_scope_1cta
        return CounterMeaning("nvidia", frozenset(), pairs, dtype, kind.upper())
    if op:
        return CounterMeaning("nvidia", frozenset({op}), pairs, dtype, op.upper())
    paths = {"hmma": {"hmma", "qmma"}}.get(subpipe, {subpipe})
    return CounterMeaning("nvidia", frozenset(paths), pairs, dtype)
