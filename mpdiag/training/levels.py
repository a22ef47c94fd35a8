"""Opt levels: what O0, O1, O2 and O3 mean, property by property.

Source: GTC 2019, *Automatic Mixed Precision for PyTorch* (opt levels and their properties).

====  ==============  ===============  ===============  ==============  ===============
level model weights   operation casts  batch norm       master weights  loss scale
====  ==============  ===============  ===============  ==============  ===============
O0    FP32            no               FP32             –               1
O1    FP32            yes              by operation     –               by the plan
O2    low precision   no               FP32             FP32            by the plan
O3    low precision   no               low precision    none            1
====  ==============  ===============  ===============  ==============  ===============
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from mpdiag.errors import UsageError
from mpdiag.numerics.formats import TRAINABLE
from mpdiag.numerics.loss_scalers import (
    SCALERS,
    Backoff,
    ConstantScale,
    Scaler,
    scaler_class,
    scaler_named,
)
from mpdiag.plan import NO_SCALE, LossScalePlan, PrecisionPlan
from mpdiag.training.options import AS_PLANNED, PrecisionOverrides

Level = Literal["O0", "O1", "O2", "O3"]
LEVELS: tuple[Level, ...] = ("O0", "O1", "O2", "O3")
DTYPES: dict[str, torch.dtype] = {f.name: getattr(torch, str(f.torch_name)) for f in TRAINABLE}


@dataclass(frozen=True)
class Precision:
    """Every property of a level, resolved.

    Attributes:
        level: O0 to O3.
        dtype: What matrix multiplications compute in: float16, bfloat16, or float32 for O0.
        operation_casts: Whether each operation casts its inputs, by the operation policy.
        low_precision_model: Whether the model itself holds weights of ``dtype``.
        keep_batch_norm_fp32: Whether such a model keeps batch normalisation in FP32.
        master_weights: Whether the optimizer holds FP32 copies of such weights.
        blocks: The recipe of block formats that some of the products are in; "" without one.
    """

    level: Level
    dtype: torch.dtype
    operation_casts: bool
    low_precision_model: bool
    keep_batch_norm_fp32: bool
    master_weights: bool
    blocks: str = ""

    @property
    def name(self) -> str:
        """What a training in it is called: its recipe, or its format."""
        return self.blocks or self.format

    @property
    def format(self) -> str:
        """``fp16``, ``bf16`` or ``fp32``."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)


def resolve(
    plan: PrecisionPlan, level: str | None = None, overrides: PrecisionOverrides = AS_PLANNED
) -> Precision:
    """The properties of a level, with overrides; what is None follows the level and the plan.

    Raises:
        UsageError: If there is no such level, or an override makes no sense for it.
    """
    chosen = plan.level if level is None else level
    if plan.blocks is not None and chosen in ("O2", "O3"):
        if level is not None:
            raise UsageError(
                f"a plan with block formats is trained at level O1, or in FP32 at O0, not at {level}"
            )
        chosen = "O1"
    if chosen not in LEVELS:
        raise UsageError(f"there is no level {chosen!r}: choose one of {', '.join(LEVELS)}")
    dtype = overrides.dtype
    compute = _dtype(plan.target if dtype is None else dtype, named=dtype is not None)
    base = Precision(
        level=chosen,
        dtype=compute if chosen != "O0" else torch.float32,
        operation_casts=chosen == "O1",
        low_precision_model=chosen in ("O2", "O3"),
        keep_batch_norm_fp32=chosen == "O2" and plan.keep_batch_norm_fp32,
        master_weights=chosen == "O2",
        blocks="" if plan.blocks is None or chosen == "O0" else plan.blocks.target,
    )
    names = ("operation_casts", "keep_batch_norm_fp32", "master_weights")
    given = {name: getattr(overrides, name) for name in names}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    _refuse_contradictions(base, compute if dtype is not None else None, changed)
    return replace(base, **changed)


def _dtype(value: torch.dtype | str, *, named: bool) -> torch.dtype:
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    if named:
        message = f"dtype must be one of {', '.join(DTYPES)} or the torch dtype, not {value!r}"
    else:
        message = (
            f"the plan's target is {value}, which no trainer here computes in: "
            "analyze again with --target fp16 or --target bf16"
        )
    raise UsageError(message)


def _refuse_contradictions(
    base: Precision, dtype: torch.dtype | None, overrides: dict[str, Any]
) -> None:
    """One sentence for each override that contradicts its level."""
    level = base.level
    if level == "O0" and dtype not in (None, torch.float32):
        message = f"level O0 is plain FP32, so dtype {dtype} makes no sense: choose O1, O2 or O3"
        raise UsageError(message)
    if level != "O0" and base.dtype == torch.float32:
        message = f"level {level} needs a dtype below FP32 (fp16 or bf16): for FP32 choose O0"
        raise UsageError(message)
    if level == "O0" and overrides.get("operation_casts"):
        raise UsageError("level O0 casts nothing: FP32 weights with operation casts are level O1")
    if level == "O1" and overrides.get("operation_casts") is False:
        message = "level O1 without operation casts computes in FP32 alone: choose O0, O2 or O3"
        raise UsageError(message)
    if level in ("O0", "O1"):
        for name in ("keep_batch_norm_fp32", "master_weights"):
            if name in overrides:
                raise UsageError(
                    f"{name} makes no sense at level {level}: its weights are FP32 already "
                    "(O2 and O3 hold low-precision weights)"
                )


def scaler_of(plan: LossScalePlan, precision: Precision, override: object = None) -> Scaler:
    """The loss scaler: the override, else what the level and the plan say.

    Args:
        plan: The plan's loss scale.
        precision: At O0 and O3 the scale is 1 unless overridden; BF16 has FP32's range.
        override: None, a number (a constant scale), ``"dynamic"``, the name of a scaler, a dict
            of its settings with ``method``, or a ``Scaler``.

    Raises:
        UsageError: If the override is none of these, or a setting makes no sense.
    """
    if override is None:
        if precision.level in ("O0", "O3"):
            return ConstantScale(1.0)
        return plan.scaler()
    if isinstance(override, str):
        if override == NO_SCALE:
            return ConstantScale(1.0)
        kind = scaler_class(Backoff.name if override == "dynamic" else override)
        planned = plan.scaler()
        return planned if type(planned) is kind else kind()
    if isinstance(override, dict):
        settings: dict[str, Any] = dict(override)
        return scaler_named(str(settings.pop("method", Backoff.name)), **settings)
    if isinstance(override, (int, float)) and not isinstance(override, bool):
        return ConstantScale(float(override))
    if isinstance(override, Scaler):
        return override
    names = ", ".join(map(repr, (NO_SCALE, "dynamic", *SCALERS)))
    raise UsageError(
        f"loss_scale must be a number, {names}, a dict of settings or a Scaler (see "
        f"mpdiag.numerics.loss_scalers), not {override!r}"
    )
