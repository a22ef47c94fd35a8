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
    """Changes to a plan's precision. A field that you leave out follows level and plan.

    Attributes:
        dtype: The dtype of matrix multiplications: ``"fp16"``, ``"bf16"`` or a torch dtype.
        operation_casts: Whether each operation's inputs are cast, as autocast does.
        keep_batch_norm_fp32: Whether batch normalisation stays in FP32.
        master_weights: Whether the optimizers step FP32 masters of half-precision weights.
        loss_scale: A number (a constant scale), ``"dynamic"``, the name of a scaler, a dict of its
            settings, or a scaler.
        fp32_modules: Names of more modules to run in FP32.
        fp32_operations: Names of operations to run in FP32 (levels that cast operations).
        low_operations: Names of operations to run in half precision (the same levels).
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
    """Settings of a trainer that do not depend on the precision.

    Attributes:
        max_skips: Raise ``TrainingDiverged`` after this many skipped steps in a row.
        process_group: The ranks that must agree on a step. Default: all.
        check_tensor_cores: After the first steps on a GPU, profile one step and log whether it uses
            Tensor Cores, and if not, why. ``MixedPrecision.tensor_cores`` holds the answer.
        half_outputs: Whether models with half-precision weights (O2, O3) return half precision. By
            default they return FP32.
        names: A prefix of layer names in the plan for each model. Default: no prefix.
    """

    max_skips: int = 8
    process_group: Any = None
    check_tensor_cores: bool = True
    half_outputs: bool = False
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse a ``max_skips`` below 1."""
        if type(self.max_skips) is not int or self.max_skips < 1:
            message = f"max_skips must be a whole number of at least 1, not {self.max_skips!r}"
            raise UsageError(message)


AS_PLANNED = PrecisionOverrides()
DEFAULT_OPTIONS = TrainerOptions()
