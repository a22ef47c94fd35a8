"""Settings that decide what runs on Tensor Cores: read and explained, never changed.

They are the settings of this process: torch's defaults and the environment. A script may change them.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpdiag.hardware.cpu_instructions import CpuInstructions

_VARIABLES = {
    "NVIDIA_TF32_OVERRIDE": "0 turns TF32 off everywhere, whatever torch's settings say",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1 allows TF32 in matrix products",
    "CUBLAS_WORKSPACE_CONFIG": "limits cuBLAS's choice of kernels, for determinism",
    "CUDA_LAUNCH_BLOCKING": "1 waits for every kernel, which makes timings meaningless",
    "ONEDNN_MAX_CPU_ISA": "limits oneDNN to older instructions, without AMX for instance",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16 lets oneDNN compute FP32 products in BF16",
}
"""The only environment variables that are read."""


MEDIUM = 'torch.set_float32_matmul_precision("medium")'
"""The line that lets oneDNN multiply FP32 matrices in BF16."""
CONVOLUTION = 'torch.backends.mkldnn.conv.fp32_precision = "bf16"'
"""The line for convolutions, from torch 2.9 on."""
RECURRENT = 'torch.backends.mkldnn.rnn.fp32_precision = "bf16"'
"""The line for recurrent layers, from torch 2.9 on."""
IN_BF16 = "multiplies in BF16 on AMX"


@dataclass(frozen=True)
class Flag:
    """A setting.

    Attributes:
        name: As it is written in code.
        value: Its value, as text.
        meaning: What that value does.
        advice: When to change it; "" if there is no reason to.
    """

    name: str
    value: str
    meaning: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def read_flags(torch: Any, cpu: CpuInstructions | None = None) -> tuple[Flag, ...]:
    """Read every setting that matters.

    Args:
        torch: The torch module.
        cpu: The CPU's instructions, by which settings are explained where torch finds no GPU.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    on_cpu = cpu if _has_gpu(torch) is False else None
    precision = _ask(torch.get_float32_matmul_precision)
    found = [
        _matmul_precision(precision) if on_cpu is None else _on_cpu(precision, on_cpu),
        *([] if on_cpu is None else _cpu_convolutions(torch, on_cpu)),
        _switch(
            "torch.backends.cudnn.allow_tf32",
            _ask(partial(getattr, cudnn, "allow_tf32")),
            "FP32 convolutions and RNNs may run in TF32",
            "FP32 convolutions and RNNs stay off Tensor Cores",
            when_off="True, unless the lowest bits matter",
        ),
        _switch(
            "torch.backends.cudnn.benchmark",
            _ask(partial(getattr, cudnn, "benchmark")),
            "cuDNN benchmarks its algorithms for each new shape, which is slow if shapes vary",
            "cuDNN chooses by heuristics",
            when_off="True where input shapes are constant",
        ),
        _switch(
            "torch.backends.cudnn.deterministic",
            _ask(partial(getattr, cudnn, "deterministic")),
            "only deterministic algorithms, fewer of which use Tensor Cores",
            "any algorithm",
        ),
        *(
            _switch(
                f"torch.backends.cuda.matmul.allow_{name}_reduced_precision_reduction",
                _ask(partial(getattr, matmul, f"allow_{name}_reduced_precision_reduction")),
                f"partial sums of a product may be added in {name.upper()}",
                "partial sums are added in FP32",
                when_on="False where long sums lose accuracy or overflow",
            )
            for name in ("fp16", "bf16")
        ),
        _switch(
            "torch.backends.mkldnn.is_available()",
            _ask(torch.backends.mkldnn.is_available),
            "oneDNN computes on the CPU, with AMX if available",
            "this torch has no oneDNN, so BF16 is slow on the CPU",
        ),
        Flag(
            "channels_last",
            "not a setting",
            "a memory format; Tensor Cores convert NCHW convolutions each time",
            "model.to(memory_format=torch.channels_last) for convolutions in half precision",
        ),
    ]
    found += [
        Flag(name, value[:40], meaning)
        for name, meaning in _VARIABLES.items()
        if (value := os.environ.get(name)) is not None
    ]
    return tuple(found)


def _matmul_precision(value: Any) -> Flag:
    meanings = {
        "highest": "FP32 matrix products stay off Tensor Cores",
        "high": "FP32 matrix products may run in TF32",
        "medium": "FP32 matrix products may run in BF16",
    }
    name = "torch.get_float32_matmul_precision()"
    advice = 'torch.set_float32_matmul_precision("high") allows TF32' if value == "highest" else ""
    return Flag(name, str(value), meanings.get(str(value), "not known"), advice)


def _has_gpu(torch: Any) -> bool | None:
    found = _ask(lambda: torch.cuda.is_available())  # noqa: PLW0108 - a torch may lack it
    return None if found is None else bool(found)


def _on_cpu(value: Any, cpu: CpuInstructions) -> Flag:
    """The same setting on a CPU, where oneDNN reads it.

    Source: torch's ``Context.cpp`` (``setFloat32MatmulPrecision``) and ``mkldnn/Matmul.cpp``:
    "medium" allows oneDNN BF16 and "high" TF32, the latter only where there is AMX-FP16. oneDNN uses
    BF16 for FP32 operands on AMX, and not on vector units of x86.
    """
    plain = "FP32 matrix products are computed in FP32"
    may = "oneDNN may use {} for FP32 matrix products"
    meaning = advice = ""
    if value == "highest":
        meaning = plain
        advice = f"{MEDIUM} {IN_BF16}" if cpu.has("amx_bf16") else ""
    elif value == "high":
        meaning = may.format("TF32") if cpu.has("amx_fp16") else f"no effect on this CPU: {plain}"
        advice = f"{MEDIUM} {IN_BF16}" if cpu.has("amx_bf16") else ""
    elif value == "medium" and cpu.names is not None:
        arm = cpu.has("bf16")
        meaning = may.format("BF16") if arm else f"no effect on this CPU: {plain}"
        if cpu.has("amx_bf16"):
            meaning = "FP32 matrix products are computed in BF16 on AMX"
    return Flag("torch.get_float32_matmul_precision()", str(value), meaning or "not known", advice)


def _cpu_convolutions(torch: Any, cpu: CpuInstructions) -> list[Flag]:
    """What FP32 convolutions are computed in, from torch 2.9 on; nothing where torch has no setting."""
    value = _ask(lambda: torch.backends.mkldnn.conv.fp32_precision)
    if value is None:
        return []
    amx = cpu.has("amx_bf16")
    meaning = "FP32 convolutions are computed in FP32"
    if value == "bf16":
        meaning = "FP32 convolutions are computed in BF16 on AMX" if amx else "BF16 is allowed"
    advice = f"{CONVOLUTION} {IN_BF16}" if amx and value != "bf16" else ""
    return [Flag("torch.backends.mkldnn.conv.fp32_precision", str(value), meaning, advice)]


def _switch(
    name: str, value: Any, on: str, off: str, *, when_on: str = "", when_off: str = ""
) -> Flag:
    if value is None:
        return Flag(name, "not known", "this version of torch does not say")
    return Flag(name, str(bool(value)), on if value else off, when_on if value else when_off)


def _ask(read: Callable[[], Any]) -> Any:
    """A setting; None if this torch lacks it or has it under another name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names
        try:
            return read()
        except (AttributeError, RuntimeError):
            return None
