"""Facts about where a recording was made, for ``meta.json``; nothing secret, no environment dump."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from mpdiag.files.secrets import shown_arguments

if TYPE_CHECKING:
    import torch


@cache
def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("mpdiag", "torch", "numpy", "numba", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # noqa: PERF203
            continue
    return found


def device(model: torch.nn.Module | None) -> dict[str, Any]:
    """The device the model lies on."""
    import torch

    parameter = next(model.parameters(), None) if model is not None else None
    where = parameter.device if parameter is not None else torch.device("cpu")
    facts: dict[str, Any] = {"type": where.type, "threads": torch.get_num_threads()}
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        facts |= {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
    else:
        # On Linux without ``uname -p``, which Python would start for it.
        known = "" if platform.system() == "Linux" else platform.processor()
        facts["name"] = known or platform.machine()
    return facts


def ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks, (0, 1) where training is not distributed."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return announced_ranks()


def announced_ranks() -> tuple[int, int]:
    """Rank and number of ranks from the launcher's environment variables, without torch."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, world) if 0 <= rank < world else (0, 1)


def launcher() -> list[str]:
    """The words that start as many processes of a script on one machine; [] without torchrun."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" not in os.environ or local != os.environ.get("WORLD_SIZE"):
        return []
    return ["torchrun", f"--nproc-per-node={local}"]


def arguments() -> list[str]:
    """The command line, as the script sees it, without secrets: a run folder is shown to others."""
    return shown_arguments(map(str, sys.argv))
