"""Device, driver and versions, found in a child process."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

PACKAGES = (
    *("torch", "triton", "numpy", "numba", "pandas", "pyarrow", "typer", "rich", "scikit-learn"),
    *("nvidia-ml-py", "tensorboard", "plotly", "msgspec", "universal-pathlib", "streamlit"),
)


def show(device: str) -> None:
    """Print the facts as one line of JSON; ``problem`` where the device is missing."""
    print(json.dumps(find(device)))


def find(device: str) -> dict[str, Any]:
    """The facts of this machine.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    import torch

    import mpdiag

    versions: dict[str, Any] = {"mpdiag": mpdiag.__version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        name = f"a CPU ({platform.machine()})"
        return {"device": {"name": name, "cores": cores}, "versions": versions}
    if not torch.cuda.is_available():
        problem = (
            "PyTorch finds no CUDA device, and this command would have nothing to settle: "
            "rehearse it with --device cpu"
        )
        return {"problem": problem}
    found = torch.cuda.get_device_properties(0)
    facts = {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "devices": torch.cuda.device_count(),
        "driver": _driver(),
        "ncu": shutil.which("ncu") is not None,
    }
    return {"device": facts, "versions": versions}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        from mpdiag.hardware.devices import read_nvml

        devices = read_nvml().devices
    except Exception:  # noqa: BLE001 - a fact that is not there
        devices = ()
    if devices and devices[0].driver:
        return devices[0].driver
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (found.stdout.split() or [None])[0]
