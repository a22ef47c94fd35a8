"""The seam to the Tensor Core profiler, which is all in ``mpdiag/tensorcores/``.

The rest of the package records, analyzes, trains and compares without that folder. What needs a part of
the profiler asks here, by name, when it is used; nothing else names the folder.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpdiag.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from mpdiag.tensorcores.step_profiler import StepProfiler

_FOLDER = "mpdiag.tensorcores"
STEPS = 3
"""Steps that are measured by default."""
WARMUP = 5
"""Steps that pass before them."""


def is_installed() -> bool:
    """Whether this installation has the profiler."""
    return find_spec(_FOLDER) is not None


def part(name: str) -> ModuleType:
    """A module of the profiler.

    Args:
        name: Its name in the folder, such as ``trace_analysis``.

    Raises:
        UsageError: If the profiler is not installed.
    """
    if not is_installed():
        message = "the Tensor Core profiler is not installed here: reinstall mpdiag to profile"
        raise UsageError(message)
    return import_module(f"{_FOLDER}.{name}")


def profile(
    model: nn.Module | None = None, *, steps: int = STEPS, warmup: int = WARMUP
) -> StepProfiler:
    """Profile a few steps after a warm-up and report whether they ran on Tensor Cores.

    Args:
        model: The model, to name its modules in the result.
        steps: Number of steps to measure.
        warmup: Number of steps to skip first.

    Raises:
        UsageError: If there are no steps to measure.
    """
    made: Any = part("step_profiler").StepProfiler(model, steps=steps, warmup=warmup)
    profiler: StepProfiler = made
    return profiler
