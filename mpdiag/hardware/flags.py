"""Settings that decide what runs on Tensor Cores: read and explained, never changed.

They are the settings of this process: torch's defaults and the environment. A script may change them.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpdiag.hardware.cpu_instructions import CpuInstructions
from mpdiag.hardware.tables import read_table

_TABLE = Path(__file__).with_name("flags.tsv")
_PRECISION = "torch.get_float32_matmul_precision()"
_CONVOLUTIONS = "torch.backends.mkldnn.conv.fp32_precision"

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
        cpu: The CPU's instructions, by which settings are explained where torch finds no GPU;
            CUDA's settings are left out there.
    """
    on_cpu = cpu if _read(torch, "torch.cuda.is_available()") is False else None
    precision, convolutions = _read(torch, _PRECISION), _read(torch, _CONVOLUTIONS)
    flags = [_matmul_precision(precision) if on_cpu is None else _on_cpu(precision, on_cpu)]
    if on_cpu is not None and convolutions is not None:
        flags.append(_cpu_convolutions(convolutions, on_cpu))
    for row in read_table(_TABLE):
        name, meaning = row["name"], row["on"]
        if on_cpu is not None and name.startswith(("torch.backends.cuda", "torch.backends.cudnn")):
            continue
        value = os.environ.get(name)
        if row["kind"] == "switch":
            flags.append(_switch(_read(torch, name), row))
        elif row["kind"] == "note":
            flags.append(Flag(name, "not a setting", meaning, row["advice_on"]))
        elif value is not None:
            flags.append(Flag(name, value[:40], meaning))
    return tuple(flags)


def _read(torch: Any, name: str) -> Any:
    """A setting by its name in code; None if this torch lacks it or has it under another name."""
    value = torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names
        try:
            for part in name.removeprefix("torch.").split("."):
                value = getattr(value, part.removesuffix("()"))
                value = value() if part.endswith("()") else value
        except (AttributeError, RuntimeError):
            return None
    return value


def _switch(value: Any, row: Mapping[str, str]) -> Flag:
    if value is None:
        return Flag(row["name"], "not known", "this version of torch does not say")
    state = "on" if value else "off"
    return Flag(row["name"], str(bool(value)), row[state], row[f"advice_{state}"])


def _matmul_precision(value: Any) -> Flag:
    meanings = {
        "highest": "FP32 matrix products stay off Tensor Cores",
        "high": "FP32 matrix products may run in TF32",
        "medium": "FP32 matrix products may run in BF16",
    }
    advice = 'torch.set_float32_matmul_precision("high") allows TF32' if value == "highest" else ""
    return Flag(_PRECISION, str(value), meanings.get(str(value), "not known"), advice)


def _on_cpu(value: Any, cpu: CpuInstructions) -> Flag:
    """The same setting on a CPU, where oneDNN reads it.

    Source: torch's ``Context.cpp`` (``setFloat32MatmulPrecision``) and ``mkldnn/Matmul.cpp``:
    "medium" allows oneDNN BF16 and "high" TF32, the latter only where there is AMX-FP16. oneDNN uses
    BF16 for FP32 operands on AMX, and not on vector units of x86.
    """
    exact = "FP32 matrix products are computed in FP32"
    may = "oneDNN may use {} for FP32 matrix products"
    meaning = "not known"
    if value == "highest":
        meaning = exact
    elif value == "high":
        meaning = may.format("TF32") if cpu.has("amx_fp16") else f"no effect on this CPU: {exact}"
    elif value == "medium" and cpu.has("amx_bf16"):
        meaning = "FP32 matrix products are computed in BF16 on AMX"
    elif value == "medium" and cpu.names is not None:
        meaning = may.format("BF16") if cpu.has("bf16") else f"no effect on this CPU: {exact}"
    lower = cpu.has("amx_bf16") and value in ("highest", "high")
    return Flag(_PRECISION, str(value), meaning, f"{MEDIUM} {IN_BF16}" if lower else "")


def _cpu_convolutions(value: Any, cpu: CpuInstructions) -> Flag:
    """What FP32 convolutions are computed in, from torch 2.9 on."""
    amx = cpu.has("amx_bf16")
    if value == "bf16":
        meaning = "FP32 convolutions are computed in BF16 on AMX" if amx else "BF16 is allowed"
        return Flag(_CONVOLUTIONS, str(value), meaning)
    advice = f"{CONVOLUTION} {IN_BF16}" if amx else ""
    return Flag(_CONVOLUTIONS, str(value), "FP32 convolutions are computed in FP32", advice)
