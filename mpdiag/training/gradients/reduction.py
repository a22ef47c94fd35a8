"""How DDP reduces gradients where the plan says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from mpdiag.errors import UsageError
from mpdiag.training.levels import DTYPES

if TYPE_CHECKING:
    from mpdiag.plan import ReductionPlan


def apply_reduction(models: list[nn.Module], plan: ReductionPlan | None) -> None:
    """Reduce the gradients of DDP models as the plan says; other models are left alone.

    Raises:
        UsageError: If the plan names a dtype that cannot be reduced in.
    """
    if plan is None:
        return
    dtype = DTYPES.get(plan.dtype)
    if dtype is None:
        message = f"the plan reduces gradients in {plan.dtype!r}: choose one of {', '.join(DTYPES)}"
        raise UsageError(message)
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            group = model.process_group
            model.register_comm_hook((group, dtype, plan.pre_divide), _reduce)


def _reduce(state: tuple[Any, torch.dtype, bool], bucket: Any) -> Any:
    """A DDP communication hook: the mean over ranks, in a dtype, divided before or after the sum."""
    group, dtype, pre_divide = state
    size = distributed.get_world_size(group)
    gradients = bucket.buffer()
    narrow = gradients.to(dtype)
    if narrow is gradients:
        narrow = gradients.clone()
    if pre_divide:
        narrow.div_(size)
    work = distributed.all_reduce(narrow, group=group, async_op=True)

    def finish(future: Any) -> torch.Tensor:
        total = future.value()[0].to(gradients.dtype)
        if not pre_divide:
            total = total.div(size)
        gradients.copy_(total)
        return gradients  # type: ignore[no-any-return]

    return work.get_future().then(finish)


# DDP compares a hook's annotations with types; here they are strings.
_reduce.__annotations__ = {}
