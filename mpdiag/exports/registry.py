"""Every framework a plan can be written for, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdiag.display.wording import did_you_mean
from mpdiag.errors import UsageError
from mpdiag.exports import distributed, legacy, pytorch, tensorflow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.exports.export import Export, Exporter
    from mpdiag.plan import PrecisionPlan

EXPORTERS: Mapping[str, Exporter] = {
    "torch": pytorch.torch,
    "lightning": pytorch.lightning,
    "huggingface": pytorch.huggingface,
    "accelerate": pytorch.accelerate,
    "deepspeed": distributed.deepspeed,
    "megatron": distributed.megatron,
    "keras": tensorflow.keras,
    "tensorflow": tensorflow.tensorflow,
    **legacy.EXPORTERS,
}


def export_plan(plan: PrecisionPlan, framework: str) -> Export:
    """Write a plan as a framework's settings.

    Args:
        plan: The plan.
        framework: One of ``EXPORTERS``, in any case.

    Raises:
        UsageError: If there is no such framework, or it has no such format; the message names
            those there are.
    """
    exporter = EXPORTERS.get(framework.lower())
    if exporter is None:
        hint = did_you_mean(framework, EXPORTERS)
        message = f"cannot export to {framework!r}{hint}: choose one of {', '.join(EXPORTERS)}"
        raise UsageError(message)
    return exporter(plan)
