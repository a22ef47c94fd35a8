"""What a caller may set beside the plan: overrides of its precision, and how training is run.

No torch here, so the command line reads these types without loading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mpdiag.errors import UsageError

if TYPE_CHECKING:
    import torch

Backend = Literal["auto", "native", "emulated"]


@dataclass(frozen=True)
class PrecisionOverrides:
    """What to change in the plan's precision; the default of each field follows level and plan.

    Attributes:
        dtype: What matrix multiplications compute in: ``"fp16"``, ``"bf16"`` or the torch dtype.
        operation_casts, keep_batch_norm_fp32, master_weights: The level's properties, see
            ``training/levels.py``.
        loss_scale: A number (a constant scale), ``"dynamic"``, the name of a scaler, a dict of its
            settings, or a scaler; see ``levels.scaler_of``.
        fp32_modules: Names of further modules to run in FP32.
        fp32_operations, low_operations: Names of operations to run in FP32, or in low precision,
            wherever they occur (levels that cast operations).
    """

    dtype: torch.dtype | str | None = None
    operation_casts: bool | None = None
    keep_batch_norm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: object = None
    fp32_modules: Sequence[str] = ()
    fp32_operations: Sequence[str] = ()
    low_operations: Sequence[str] = ()


@dataclass(frozen=True)
class TrainerOptions:
    """How a trainer works, whatever the precision.

    Attributes:
        max_skips: How many steps skipped in a row end training with ``TrainingDiverged``.
        process_group: The ranks that must agree on a step; default: all.
        check_tensor_cores: After the first steps on a GPU, profile one and log whether Tensor Cores
            are in use, with the cause if not; the answer is ``MixedPrecision.tensor_cores``.
        half_outputs: Models that hold half-precision weights (O2, O3) return half precision; else they
            return FP32.
        names: What the models' names begin with in the plan, one for each model; default: nothing.
    """

    max_skips: int = 8
    process_group: Any = None
    check_tensor_cores: bool = True
    half_outputs: bool = False
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse a limit that is no count."""
        if type(self.max_skips) is not int or self.max_skips < 1:
            message = f"max_skips must be a whole number of at least 1, not {self.max_skips!r}"
            raise UsageError(message)


AS_PLANNED = PrecisionOverrides()
DEFAULT_OPTIONS = TrainerOptions()
