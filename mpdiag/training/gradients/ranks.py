"""What ranks must agree on: whether a step is taken, and at which scale; how gradients are reduced."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from mpdiag.errors import UsageError
from mpdiag.training.levels import DTYPES

if TYPE_CHECKING:
    from mpdiag.plan import ReductionPlan


def world_size(group: Any = None) -> int:
    """Ranks in the group; 1 without torch.distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size(group)


def rank() -> int:
    """This process's number."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    return distributed.get_rank()


def agree(
    finite: bool, scale: float, device: torch.device, group: Any = None
) -> tuple[bool, list[int]]:
    """Whether every rank's gradients are finite, and the ranks whose gradients are not.

    Raises:
        UsageError: If ranks scale their losses differently: their gradients could not be summed.
    """
    size = world_size(group)
    if size == 1:
        return finite, [] if finite else [rank()]
    if distributed.get_backend(group) == "gloo":
        device = torch.device("cpu")
    mine = torch.tensor([0.0 if finite else 1.0, math.log2(scale)], device=device)
    all_ranks = [torch.empty_like(mine) for _ in range(size)]
    distributed.all_gather(all_ranks, mine, group=group)
    table = torch.stack(all_ranks).tolist()
    scales = [row[1] for row in table]
    if min(scales) != max(scales):
        at = scales.index(next(s for s in scales if s != scales[0]))
        message = (
            f"rank 0 scales its loss by {2 ** scales[0]:g}, rank {at} by {2 ** scales[at]:g}: load "
            "the same state on every rank and call step() equally often"
        )
        raise UsageError(message)
    bad = [i for i, row in enumerate(table) if row[0]]
    return not bad, bad


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


# DDP compares a hook's annotations with types, and ours are strings.
_reduce.__annotations__ = {}
