"""``measure_sensitivity``: measures the sensitivity of each operation and stores it in the run folder.

::

    mpdiag.measure_sensitivity(model, lambda: loss_fn(model(x), y), "runs/ssd", scale=64)

Each operation runs once in the narrow format while everything else stays in FP32, and one backward
pass estimates all of them at once. The dashboard's *Operations* view ranks operations by the result.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mpdiag.files.paths import place
from mpdiag.numerics.formats import FP16
from mpdiag.runs.sensitivity import OperationSensitivity, Sensitivities
from mpdiag.sensitivity.loss_estimate import by_operation, estimate
from mpdiag.sensitivity.measurement import Sensitivity, measure, plain

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch import Tensor, nn


def measure_sensitivity(
    model: nn.Module,
    step: Callable[[], Tensor],
    run: str | os.PathLike[str] | None = None,
    *,
    fmt: str = FP16.name,
    scale: float = 1.0,
) -> Sensitivities:
    """Measure every operation of a step in a narrow format, one after the other.

    Args:
        model: In FP32, in the mode it trains in; left as it was.
        step: Runs the model on a batch and returns the loss, the same each time it is called.
        run: The run folder for ``sensitivity.json``; None to store nothing.
        fmt: ``fp16``, ``bf16``, ``fp8_e4m3`` or ``fp8_e5m2``.
        scale: The loss scale of the gradients.

    Raises:
        UsageError: If the step returns no loss, or trains nothing.
        ValueError: If there is no such format.
    """
    estimates = dict(by_operation(estimate(model, step, fmt=fmt, scale=scale)))
    rows = tuple(
        _row(found, estimates.get((found.module, found.op)))
        for found in measure(model, step, fmt=fmt, scale=scale)
    )
    result = Sensitivities(fmt, float(scale), rows)
    if run is not None:
        result.save(place(run))
    return result


def _row(found: Sensitivity, estimated: float | None) -> OperationSensitivity:
    return OperationSensitivity(
        module=found.module,
        op=found.op,
        calls=len(found.sites),
        output_error=plain(found.output_error),
        loss_error=plain(found.loss_error),
        gradient_error=plain(found.gradient_error),
        gradient_cosine=plain(found.gradient_cosine),
        worst_gradient=found.worst_gradient,
        estimate=None if estimated is None else plain(estimated),
        finite=math.isfinite(found.loss_error) and math.isfinite(found.gradient_error),
    )
