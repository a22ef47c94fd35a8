"""Plain ``torch.amp`` by a plan, for loops that are written with it.

::

    scaler = grad_scaler(plan, "cuda")
    for x, y in loader:
        with torch.autocast(**autocast_arguments(plan, "cuda")):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

The scaler is a ``GradScaler`` whose ``update`` asks the plan's own: constant, backoff with bounds
and hysteresis, or LogNormal. Modules in FP32, buffers and skips are handled as ``torch.amp`` handles
them; ``mpdiag.MixedPrecision`` applies the plan to these, too.
"""

import math
from typing import Any

import torch
from torch.optim import Optimizer

from mpdiag.integrations.shared import dump_scaler, load_scaler
from mpdiag.plan import PrecisionPlan
from mpdiag.training import levels


def autocast_arguments(plan: PrecisionPlan, device_type: str = "cuda") -> dict[str, Any]:
    """The arguments of ``torch.autocast``.

    Raises:
        UsageError: If mpdiag cannot train in the plan's format.
    """
    precision = levels.resolve(plan)
    enabled = precision.dtype != torch.float32
    return {
        "device_type": device_type,
        "dtype": precision.dtype if enabled else torch.bfloat16,
        "enabled": enabled,
    }


def grad_scaler(plan: PrecisionPlan, device: str = "cuda") -> "PlanScaler":
    """A ``GradScaler`` with the plan's loss scale; disabled if the plan needs none."""
    return PlanScaler(plan, device)


class PlanScaler(torch.amp.GradScaler):
    """A ``GradScaler`` with the plan's scaler. Call ``grad_scaler`` to make one."""

    def __init__(self, plan: PrecisionPlan, device: str) -> None:
        self._plan_scaler = levels.scaler_of(plan.loss_scale, levels.resolve(plan))
        scaled = plan.loss_scale.method != "none" and plan.level not in ("O0", "O3")
        super().__init__(device, init_scale=self._plan_scaler.scale, enabled=scaled)
        self._absmax = 0.0

    def _unscale_grads_(
        self, optimizer: Optimizer, *arguments: Any, **options: Any
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            optimizer, *arguments, **options
        )
        if self._plan_scaler.needs_absmax:
            unscaled = [p.grad for group in optimizer.param_groups for p in group["params"]]
            norms = torch._foreach_norm([g for g in unscaled if g is not None], math.inf)
            self._absmax = max([self._absmax, *(float(norm) for norm in norms)])
        return found

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move to the next scale: the plan's scaler's, or the one given."""
        if not self._enabled or new_scale is not None:
            super().update(new_scale)
            return
        found = sum(
            float(value)
            for state in self._per_optimizer_states.values()
            for value in state["found_inf_per_device"].values()
        )
        self._plan_scaler = self._plan_scaler.adjust(math.inf if found else self._absmax)
        self._absmax = 0.0
        super().update(self._plan_scaler.scale)

    def state_dict(self) -> dict[str, Any]:
        """As ``GradScaler``'s, and the plan's scaler's state."""
        if not self._enabled:
            return {}
        return {**super().state_dict(), "plan": dump_scaler(self._plan_scaler)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            StateMismatch: If another plan's scaler wrote it, or a plain ``GradScaler``.
        """
        if self._enabled:
            self._plan_scaler = load_scaler(self._plan_scaler, state_dict.get("plan", {}))
            state_dict = {k: v for k, v in state_dict.items() if k != "plan"}
        super().load_state_dict(state_dict)
