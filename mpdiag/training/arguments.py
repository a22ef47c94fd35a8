"""Checks of what callers give ``MixedPrecision``; each refusal is one sentence."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpdiag.emulation import policy
from mpdiag.errors import UsageError
from mpdiag.numerics.autocast_lists import Rule
from mpdiag.training.levels import Precision


def listed(value: Any, kind: type, name: str) -> list[Any]:
    """One or several, as a list without repetitions.

    Raises:
        UsageError: If it is something else.
    """
    found = [value] if isinstance(value, kind) else value
    if not isinstance(found, Sequence) or not found or not all(isinstance(v, kind) for v in found):
        message = f"{name} must be a {kind.__name__} or a list of them, not {type(value).__name__}"
        raise UsageError(message)
    return list({id(v): v for v in found}.values())


_STEPS = ("param_groups", "state", "step", "zero_grad", "state_dict", "load_state_dict")


def listed_optimizers(value: Any) -> list[Optimizer]:
    """One optimizer or several; also objects that wrap one and are none themselves, as LARC does.

    Raises:
        UsageError: If something lacks what an optimizer has.
    """
    found = list(value) if isinstance(value, Sequence) else [value]
    for one in found:
        missing = [name for name in _STEPS if not hasattr(one, name)]
        if missing:
            raise UsageError(
                f"optimizer must be an Optimizer or a list of them, not {type(one).__name__} (it has "
                f"no {missing[0]})"
            )
    if not found:
        raise UsageError("optimizer must be an Optimizer or a list of them, not an empty list")
    return list({id(one): one for one in found}.values())


def inside(optimizer: Any) -> list[Optimizer]:
    """The optimizer, and those it holds, that are ``torch.optim.Optimizer``."""
    held = [optimizer, *vars(optimizer).values()]
    return [one for one in held if isinstance(one, Optimizer)]


def check_type(value: Any, kind: type, name: str) -> None:
    """Refuse an argument of another type.

    Raises:
        UsageError: Naming the argument.
    """
    if not isinstance(value, kind):
        raise UsageError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")


def check_loss(loss: Any) -> None:
    """Refuse a loss that is no tensor.

    Raises:
        UsageError: Saying what to pass instead.
    """
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"the loss is a {type(loss).__name__}, which has no gradient: pass the tensor, "
            "without .item() or float()"
        )


def choose_backend(
    wanted: str, precision: Precision, device: torch.device, models: Sequence[nn.Module]
) -> str:
    """``native`` or ``emulated``.

    Raises:
        UsageError: If the backend cannot do what is asked.
    """
    if wanted not in ("auto", "native", "emulated"):
        raise UsageError(f"backend must be auto, native or emulated, not {wanted!r}")
    slow = device.type == "cpu" and precision.dtype == torch.float16
    if wanted == "native" and slow:
        raise UsageError(
            "a CPU's own FP16 is slow and incomplete: use backend='emulated' for the same numbers, "
            "or a BF16 plan"
        )
    chosen = wanted if wanted != "auto" else ("emulated" if slow else "native")
    if chosen == "emulated" and any(
        isinstance(m, torch.jit.ScriptModule) for model in models for m in model.modules()
    ):
        raise UsageError(
            "emulation cannot see inside a TorchScript module: give MixedPrecision the eager model, "
            "or use backend='native'"
        )
    return "native" if precision.level == "O0" else chosen


def operation_rules(
    fp32: Sequence[str], low: Sequence[str], precision: Precision
) -> dict[str, Rule]:
    """Rules by operation, from two lists of names.

    Raises:
        UsageError: If a name is unknown, in both lists, or the level casts no operations.
    """
    if (fp32 or low) and not precision.operation_casts:
        raise UsageError(
            f"fp32_operations and low_operations need operation casts, which level "
            f"{precision.level} does not have: name fp32_modules instead, or choose O1"
        )
    rules: dict[str, Rule] = {}
    pairs: tuple[tuple[Sequence[str], Rule], ...] = ((fp32, "fp32"), (low, "low"))
    for names, rule in pairs:
        for name in names:
            operation = policy.operation_named(name)
            if rules.setdefault(operation, rule) != rule:
                raise UsageError(
                    f"operation {name!r} is asked for in FP32 and in low precision: choose one"
                )
    return rules
