"""Mixed precision for PyTorch, measured first.

Record an FP32 training, analyze what FP16, BF16 or FP8 would have lost, get a plan::

    with mpdiag.record(model, optimizer, "runs/mine"):
        train()
    plan = mpdiag.analyze("runs/mine").plan

A name is imported when it is first used, so that ``import mpdiag`` costs nothing.
Nothing inside the package imports this module.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpdiag.version import __version__

if TYPE_CHECKING:
    from mpdiag.analysis.analyzer import analyze
    from mpdiag.analysis.comparison.compare import compare
    from mpdiag.analysis.difference.compared import diff
    from mpdiag.emulation.block_rounding import fake_quantize
    from mpdiag.emulation.random_bits import CounterGenerator
    from mpdiag.numerics.block_formats import BlockFormat
    from mpdiag.numerics.histograms import ExponentHistogram
    from mpdiag.plan import PrecisionPlan
    from mpdiag.precision.audit import audit
    from mpdiag.profiler import profile
    from mpdiag.recording.recorder import Recorder, record
    from mpdiag.runs.run import Run, list_runs, open_run
    from mpdiag.runs.training_log import log_metric
    from mpdiag.sensitivity.forward_mismatch import mismatch
    from mpdiag.sensitivity.fp32_search import search_fp32
    from mpdiag.sensitivity.measurement import measure_sensitivity
    from mpdiag.tracing.nonfinite import find_nonfinite
    from mpdiag.training.options import PrecisionOverrides, TrainerOptions
    from mpdiag.training.results import StepResult
    from mpdiag.training.trainer import MixedPrecision

# Public name -> the module it lives in. The block above says the same to type checkers.
_HOMES = {
    "BlockFormat": "mpdiag.numerics.block_formats",
    "CounterGenerator": "mpdiag.emulation.random_bits",
    "ExponentHistogram": "mpdiag.numerics.histograms",
    "MixedPrecision": "mpdiag.training.trainer",
    "PrecisionOverrides": "mpdiag.training.options",
    "PrecisionPlan": "mpdiag.plan",
    "Recorder": "mpdiag.recording.recorder",
    "Run": "mpdiag.runs.run",
    "StepResult": "mpdiag.training.results",
    "TrainerOptions": "mpdiag.training.options",
    "analyze": "mpdiag.analysis.analyzer",
    "audit": "mpdiag.precision.audit",
    "compare": "mpdiag.analysis.comparison.compare",
    "diff": "mpdiag.analysis.difference.compared",
    "fake_quantize": "mpdiag.emulation.block_rounding",
    "find_nonfinite": "mpdiag.tracing.nonfinite",
    "list_runs": "mpdiag.runs.run",
    "log_metric": "mpdiag.runs.training_log",
    "measure_sensitivity": "mpdiag.sensitivity.measurement",
    "mismatch": "mpdiag.sensitivity.forward_mismatch",
    "open_run": "mpdiag.runs.run",
    "profile": "mpdiag.profiler",
    "record": "mpdiag.recording.recorder",
    "search_fp32": "mpdiag.sensitivity.fp32_search",
}

__all__ = [
    "BlockFormat",
    "CounterGenerator",
    "ExponentHistogram",
    "MixedPrecision",
    "PrecisionOverrides",
    "PrecisionPlan",
    "Recorder",
    "Run",
    "StepResult",
    "TrainerOptions",
    "__version__",
    "analyze",
    "audit",
    "compare",
    "diff",
    "fake_quantize",
    "find_nonfinite",
    "list_runs",
    "log_metric",
    "measure_sensitivity",
    "mismatch",
    "open_run",
    "profile",
    "record",
    "search_fp32",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module 'mpdiag' has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
