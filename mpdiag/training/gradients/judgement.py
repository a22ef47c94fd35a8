"""One judgement of a step's gradients: check, agree over ranks, unscale, clip.

The check is a norm per tensor. Infinity and NaN pass through a norm, so detection and statistics
cost one reading; and a Euclidean norm that leaves FP32's range is refused with the rest, because
squares of such gradients would be infinite in an optimizer's state.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from mpdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Clip:
    """Limits on gradients.

    Attributes:
        norm: Largest Euclidean norm of all of them together; None: no limit.
        value: Largest |gradient|; None: no limit.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        """Refuse limits that are not above 0."""
        for name, limit in (("clip_norm", self.norm), ("clip_value", self.value)):
            if limit is not None and not limit > 0:
                message = f"{name} must be a number above 0, not {limit!r}"
                raise UsageError(message)


NO_CLIP = Clip()


@dataclass(frozen=True)
class JudgedGradients:
    """What all ranks together say of a step's gradients.

    Attributes:
        finite: Whether an optimizer may see them, on every rank.
        norm: Euclidean norm of this rank's, unscaled and before clipping; infinite or NaN where one
            of them is.
        absmax: Largest |gradient|, likewise; NaN if it was not asked for.
        bad_ranks: The ranks whose gradients are not finite.
    """

    finite: bool
    norm: float
    absmax: float
    bad_ranks: tuple[int, ...]


def judge_gradients(
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor] = (),
    *,
    carried: float,
    scale: float,
    device: torch.device,
    group: Any = None,
    absmax: bool = False,
    known_bad: bool = False,
    clip: Clip = NO_CLIP,
    inspect: Callable[[Sequence[Tensor]], None] | None = None,
) -> JudgedGradients:
    """Decide whether a step may be taken; where it may, leave its gradients unscaled and clipped.

    One synchronisation with the device, and one exchange where there are several ranks. Gradients of
    a step that may not be taken are left as they are, for a diagnosis.

    Args:
        gradients: At least one; of sharded ones every rank must call.
        buffers: What else must be finite.
        carried: The scale that is still on the gradients.
        scale: The loss scale of the step, which must be the same on every rank.
        device: Where ranks exchange their answers, if their backend can.
        group: The ranks; default: all.
        absmax: Whether the largest |gradient| is wanted, which is a second reading.
        known_bad: Whether this rank has seen earlier that the step cannot be taken.
        clip: The limits.
        inspect: Called with the unscaled gradients before they are clipped.

    Raises:
        UsageError: If ranks scale their losses differently.
    """
    found = sweep(gradients, buffers, absmax=absmax)
    norm, largest = found.norm / carried, found.absmax / carried
    # Scales below 1 enlarge gradients: what was finite before they are taken off may not be after.
    finite = found.finite and norm <= LARGEST and not known_bad
    finite, bad_ranks = agree(finite, scale, device, group)
    if finite:
        if inspect is not None:
            unscale(gradients, carried)
            carried = 1.0
            inspect(gradients)
        _unscale_and_clip(gradients, carried, norm, clip)
    return JudgedGradients(finite, norm, largest, tuple(bad_ranks))


def _unscale_and_clip(gradients: Sequence[Tensor], carried: float, norm: float, clip: Clip) -> None:
    factor = 1.0 if clip.norm is None else clip_factor(norm, clip.norm)
    if factor < 1.0 and math.frexp(carried)[0] == 0.5:  # powers of two: one pass, the same bits
        multiply(gradients, factor / carried)
    else:
        unscale(gradients, carried)
        multiply(gradients, factor)
    if clip.value is not None:
        clamp(gradients, clip.value)


# -- ranks -----------------------------------------------------------------------------------------


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


# -- one reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """What one reading of all gradients says.

    Attributes:
        norm: Euclidean norm over all gradients; infinite or NaN where one is, or where it leaves
            FP32's range.
        absmax: Largest |gradient|; NaN if it was not asked for.
        others: Norm of what else was looked at (buffers).
    """

    norm: float
    absmax: float = math.nan
    others: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether an optimizer may see these gradients."""
        return math.isfinite(self.norm) and math.isfinite(self.others)


def values_of(gradient: Tensor) -> Tensor:
    """The values a gradient stores on this rank: dense, of sparse and distributed ones too."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(gradient, distributed.DTensor):
        gradient = gradient.to_local()
    if gradient.layout != torch.strided:
        return gradient._values() if gradient.layout == torch.sparse_coo else gradient.to_dense()
    return gradient


def sharded_group(gradient: Tensor) -> Any:
    """The process groups over which a gradient is sharded; empty where each rank holds it whole."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(gradient, distributed.DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(gradient.placements) if p.is_shard())


def sweep(
    gradients: Sequence[Tensor], others: Sequence[Tensor] = (), *, absmax: bool = False
) -> Sweep:
    """Read all gradients once (twice with ``absmax``); one synchronisation with the device.

    Args:
        gradients: At least one; of sharded ones every rank must call, for the norm is of the whole.
        others: Further tensors that must be finite, and do not count into the norm.
        absmax: Whether the largest |gradient| is wanted.
    """
    values = [values_of(g) for g in gradients]
    parts = norms(values, 2.0)
    device = parts[0].device
    groups: dict[Any, list[Tensor]] = {}
    for gradient, part in zip(gradients, parts, strict=True):
        groups.setdefault(sharded_group(gradient), []).append(part.to(device))
    totals = []
    for group, members in groups.items():
        total = torch.linalg.vector_norm(torch.stack(members))
        if group:
            total = total.square()
            for process_group in group:
                torch.distributed.all_reduce(total, group=process_group)
            total = total.sqrt()
        totals.append(total)
    norm = totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals))
    found = [norm, norm.new_zeros(()), norm.new_zeros(())]
    if absmax:
        found[1] = torch.stack([m.to(device) for m in norms(values, math.inf)]).max()
    if others:
        found[2] = torch.stack([n.to(device) for n in norms(others, 2.0)]).sum()
    size, largest, rest = torch.stack([f.float() for f in found]).tolist()
    return Sweep(size, largest if absmax else math.nan, rest)


def norms(values: Sequence[Tensor], order: float) -> list[Tensor]:
    """A norm of each tensor, on its device, in FP32; 0 for an empty one."""
    if order == math.inf and any(v.numel() == 0 for v in values):
        return [_norm(v, order) for v in values]
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, value in enumerate(values):
        by_kind.setdefault((value.device, value.dtype), []).append(i)
    result: list[Tensor | None] = [None] * len(values)
    for (_, dtype), indices in by_kind.items():
        options = {} if dtype in (torch.float32, torch.float64) else {"dtype": torch.float32}
        if options and (dtype.is_complex or order == math.inf):
            found: Iterable[Tensor] = [_norm(values[i], order) for i in indices]
        else:
            found = torch._foreach_norm([values[i] for i in indices], order, **options)
        for i, n in zip(indices, found, strict=True):
            result[i] = n
    return [r for r in result if r is not None]


def _norm(value: Tensor, order: float) -> Tensor:
    if value.numel() == 0:
        return torch.zeros((), device=value.device)
    norm: Tensor = torch.linalg.vector_norm(value, order)
    return norm.float()


def multiply(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if factor == 1.0 or not gradients:
        return
    dense = [values_of(g) for g in gradients]
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in dense:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for group in by_kind.values():
        torch._foreach_mul_(group, factor)


def clip_factor(norm: float, limit: float) -> float:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies by, to the last bit."""
    return min(1.0, float(limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6)))


def clamp(gradients: Sequence[Tensor], limit: float) -> None:
    """Bring every gradient into [-limit, limit], in place."""
    for gradient in gradients:
        values_of(gradient).clamp_(-limit, limit)


def unscale(gradients: Sequence[Tensor], scale: float) -> None:
    """Divide gradients by the loss scale, in place.

    The reciprocal of a power of two is exact; of scales so small that it would be infinite, the
    division itself is used.
    """
    if scale == 1.0:
        return
    inverse = 1.0 / scale
    if math.isfinite(inverse) and inverse < torch.finfo(torch.float32).max:
        multiply(gradients, inverse)
    else:
        for gradient in gradients:
            values_of(gradient).div_(scale)
