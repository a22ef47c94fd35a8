"""One judgement of a step's gradients: check, agree over ranks, unscale, clip.

The check is a norm per tensor, or one pass that unscales as it reads. Infinity and NaN pass through
a norm, so detection and statistics cost one reading; and a Euclidean norm that leaves FP32's range is
refused with the rest, because squares of such gradients would be infinite in an optimizer's state.
"""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import _disable_current_modes

from mpdiag.errors import UsageError
from mpdiag.training.gradients.unscaling import give_back, unscaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LARGEST = torch.finfo(torch.float32).max
JOINED = 1 << 14
"""Elements on a CPU up to which one norm of all, copied together, costs less than a norm of each."""


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
        bad_ranks: The ranks whose gradients, or whose forward passes, are not finite.
        forward_failed: Whether a forward pass was not finite on any rank, which no scale changes.
    """

    finite: bool
    norm: float
    absmax: float
    bad_ranks: tuple[int, ...]
    forward_failed: bool = False


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """What of a forward pass must be finite, beside the gradients.

    Attributes:
        losses: One number each, on their devices.
        buffers: Dense FP32 tensors of one device.
        sizes: Norms of other buffers, on their devices.
        spoiled: Whether the step made a buffer infinite, asked where a size is not finite: it may have
            been so before.
        note_losses: Called with the values of the losses, once they are known.
    """

    losses: Sequence[Tensor] = ()
    buffers: Sequence[Tensor] = ()
    sizes: Sequence[Tensor] = ()
    spoiled: Callable[[], bool] = lambda: True
    note_losses: Callable[[Sequence[float]], None] = lambda _values: None


NOTHING_ELSE = ForwardPass()


def judge_gradients(
    gradients: Sequence[Tensor],
    forward: ForwardPass = NOTHING_ELSE,
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
        gradients: Of sharded ones every rank must call. None at all is an error, which every rank
            of a group must learn.
        forward: What else must be finite.
        carried: The scale that is still on the gradients.
        scale: The loss scale of the step, which must be the same on every rank.
        device: Where ranks exchange their answers, if their backend can.
        group: The ranks; default: all.
        absmax: Whether the largest |gradient| is wanted, which is a second reading.
        known_bad: Whether this rank has seen earlier that the step cannot be taken.
        clip: The limits.
        inspect: Called with the unscaled gradients before they are clipped.

    Raises:
        UsageError: If ranks scale their losses differently, or one has no gradient.
    """
    if not gradients:
        agree(RankVerdict.NO_GRADIENT, scale, device, group)
    plain = are_plain(gradients)
    at_once = plain and not known_bad and clip.norm is None and world_size(group) == 1
    done = unscaled(gradients, carried) if at_once else None
    read = gradients if done is None else [done.norm]
    how = {"absmax": absmax, "apart": absmax or clip.norm is not None, "plain": plain}
    found = sweep(read, forward.sizes, forward.losses, forward.buffers, **how)
    if found.losses:
        forward.note_losses(found.losses)
    top = done.absmax if absmax and done else found.absmax
    norm, largest = found.norm / carried, top / carried
    fine = all(map(math.isfinite, found.losses))
    fine = fine and (math.isfinite(found.others) or not forward.spoiled())
    # Scales below 1 enlarge gradients: what was finite before they are taken off may not be after.
    finite = math.isfinite(found.norm) and norm <= LARGEST and not known_bad
    verdict = RankVerdict.FINITE if finite else RankVerdict.GRADIENTS
    verdicts = agree(verdict if fine else RankVerdict.FORWARD, scale, device, group)
    bad_ranks = [i for i, v in enumerate(verdicts) if v.bad]
    if not bad_ranks:
        left = carried if done is None else 1.0
        if inspect is not None:
            unscale(gradients, left)
            left = 1.0
            inspect(gradients)
        _unscale_and_clip(gradients, left, norm, clip, plain=plain)
    elif done is not None:
        give_back(gradients, carried)
    return JudgedGradients(
        not bad_ranks, norm, largest, tuple(bad_ranks), RankVerdict.FORWARD in verdicts
    )


def judge_without_gradients(
    scale: float, device: torch.device, group: Any = None
) -> JudgedGradients | None:
    """Learn what the other ranks say of a step for which this one has no gradient.

    Returns:
        None if no rank has any.
    """
    verdicts = agree(RankVerdict.ABSTAINS, scale, device, group)
    if all(v is RankVerdict.ABSTAINS for v in verdicts):
        return None
    bad_ranks = tuple(i for i, v in enumerate(verdicts) if v.bad)
    norm = math.nan if bad_ranks else 0.0
    return JudgedGradients(not bad_ranks, norm, 0.0, bad_ranks, RankVerdict.FORWARD in verdicts)


def _unscale_and_clip(
    gradients: Sequence[Tensor], carried: float, norm: float, clip: Clip, *, plain: bool
) -> None:
    factor = 1.0 if clip.norm is None else clip_factor(norm, clip.norm)
    if factor < 1.0 and math.frexp(carried)[0] == 0.5:  # powers of two: one pass, the same bits
        multiply(gradients, factor / carried, plain=plain)
    else:
        unscale(gradients, carried, plain=plain)
        multiply(gradients, factor, plain=plain)
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


class RankVerdict(IntEnum):
    """What one rank says of a step."""

    FINITE = 0
    GRADIENTS = 1
    """A gradient is not finite."""
    FORWARD = 2
    """The loss or a buffer is not finite."""
    NO_GRADIENT = 3
    ABSTAINS = 4
    """It has no gradient, which others may have."""

    @property
    def bad(self) -> bool:
        """Whether no rank may step."""
        return self in (RankVerdict.GRADIENTS, RankVerdict.FORWARD)


def agree(
    verdict: RankVerdict, scale: float, device: torch.device, group: Any = None
) -> list[RankVerdict]:
    """What every rank of a group says of a step; one process alone stands at its own place.

    Raises:
        UsageError: On every rank, if they scale their losses differently, so that gradients could not
            be summed, or if one has no gradient.
    """
    size = world_size(group)
    if size == 1:
        if verdict is RankVerdict.NO_GRADIENT:
            raise UsageError(_NO_GRADIENT)
        return [RankVerdict.FINITE] * rank() + [verdict]
    if distributed.get_backend(group) == "gloo":
        device = torch.device("cpu")
    mine = torch.tensor([float(verdict), math.log2(scale)], device=device)
    all_ranks = [torch.empty_like(mine) for _ in range(size)]
    distributed.all_gather(all_ranks, mine, group=group)
    table = torch.stack(all_ranks).tolist()
    verdicts = [RankVerdict(int(row[0])) for row in table]
    if RankVerdict.NO_GRADIENT in verdicts:
        without = [i for i, v in enumerate(verdicts) if v is RankVerdict.NO_GRADIENT]
        if len(without) == size:
            raise UsageError(_NO_GRADIENT)
        message = (
            f"rank {', '.join(map(str, without))} has no gradient, others have: no rank steps; call "
            "backward() on every rank before step()"
        )
        raise UsageError(message)
    scales = [row[1] for row in table]
    if min(scales) != max(scales):
        at = scales.index(next(s for s in scales if s != scales[0]))
        message = (
            f"rank 0 scales its loss by {2 ** scales[0]:g}, rank {at} by {2 ** scales[at]:g}: load "
            "the same state on every rank and call step() equally often"
        )
        raise UsageError(message)
    return verdicts


_NO_GRADIENT = "step() found no gradient: call step(loss), or backward(loss) first"


# -- one reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """What one reading of all gradients says.

    Attributes:
        norm: Euclidean norm over all gradients; infinite or NaN where one is, or where it leaves
            FP32's range.
        absmax: Largest |gradient|; NaN if it was not asked for.
        others: The sum of the other sizes; not finite where one of them is not.
        losses: The values of the losses.
    """

    norm: float
    absmax: float = math.nan
    others: float = 0.0
    losses: tuple[float, ...] = ()


def values_of(gradient: Tensor) -> Tensor:
    """The values a gradient stores on this rank: dense, of sparse and distributed ones too."""
    if type(gradient) is Tensor and gradient.layout is torch.strided:
        return gradient
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
    gradients: Sequence[Tensor],
    others: Sequence[Tensor] = (),
    losses: Sequence[Tensor] = (),
    beside: Sequence[Tensor] = (),
    *,
    absmax: bool = False,
    apart: bool = True,
    plain: bool | None = None,
) -> Sweep:
    """Read all gradients once (twice with ``absmax``); one synchronisation with the device.

    Args:
        gradients: At least one; of sharded ones every rank must call, for the norm is of the whole.
        others: Further sizes, one number each.
        losses: One number each.
        beside: Dense FP32 tensors of one device, whose norm is another size.
        absmax: Whether the largest |gradient| is wanted.
        apart: Whether the norm must have the bits of ``clip_grad_norm_``, a norm of the norms of each;
            without, its last bits may be others.
        plain: What ``are_plain`` says of the gradients, if it is known.
    """
    values = gradients
    if are_plain(gradients) if plain is None else plain:
        joined = None if apart else _joined_norms(gradients, beside)
        if joined is not None:
            found, *sizes = joined
            others, beside = [*others, *sizes], ()
        else:
            found = torch.linalg.vector_norm(torch.stack(norms(gradients, 2.0)))
    else:
        values = [values_of(g) for g in gradients]
        found = _total(gradients, norms(values, 2.0))
    if beside:
        others = [*others, torch.linalg.vector_norm(torch.stack(norms(beside, 2.0)))]
    device, first = found.device, [found]
    if absmax:
        first.append(torch.stack([m.to(device) for m in norms(values, math.inf)]).max())
    sizes = [f if f.dtype == torch.float32 else f.float() for f in first]
    sizes += [f if f.device == device else f.to(device) for f in others]
    sizes += [
        f if f.dim() == 0 and f.device == device else f.reshape(()).to(device) for f in losses
    ]
    kinds = {f.dtype for f in sizes}
    if len(kinds) > 1:
        wide = torch.float64 if torch.float64 in kinds else torch.float32
        sizes = [f.to(wide) for f in sizes]
    read = torch.stack(sizes).tolist()
    begin, end = len(first), len(first) + len(others)
    # A sum is infinite or NaN where one of them is.
    return Sweep(read[0], read[1] if absmax else math.nan, sum(read[begin:end]), tuple(read[end:]))


def _joined_norms(*groups: Sequence[Tensor]) -> list[Tensor] | None:
    """One norm over each group of dense FP32 tensors that is not empty, from one copy of all.

    None where the copy would cost more than a norm of each: off a CPU, and of many elements.
    """
    sizes = [sum(map(Tensor.numel, values)) for values in groups if values]
    if sum(sizes) > JOINED or any(v and v[0].device.type != "cpu" for v in groups):
        return None
    joined = torch.cat([v if v.dim() == 1 else v.reshape(-1) for vs in groups for v in vs])
    return [torch.linalg.vector_norm(part) for part in joined.split(sizes)]


def _total(gradients: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients, from that of each; of sharded ones, over all shards."""
    device = parts[0].device
    groups: dict[Any, list[Tensor]] = {}
    if "torch.distributed.tensor" not in sys.modules:
        groups[()] = [part if part.device == device else part.to(device) for part in parts]
    else:
        for gradient, part in zip(gradients, parts, strict=True):
            groups.setdefault(sharded_group(gradient), []).append(part.to(device))
    totals: list[Tensor] = []
    for group, members in groups.items():
        total = torch.linalg.vector_norm(torch.stack(members))
        if group:
            total = total.square()
            for process_group in group:
                torch.distributed.all_reduce(total, group=process_group)
            total = total.sqrt()
        totals.append(total)
    return totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals))


def norms(values: Sequence[Tensor], order: float) -> list[Tensor]:
    """A norm of each tensor, on its device, in FP32; 0 for an empty one."""
    if order == math.inf and any(v.numel() == 0 for v in values):
        return [_norm(v, order) for v in values]
    if are_plain(values):
        return list(torch._foreach_norm(list(values), order))
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


_KIND = operator.attrgetter("__class__", "dtype", "layout", "device")


def are_plain(values: Sequence[Tensor]) -> bool:
    """Whether all are dense FP32 tensors on one device, as nearly always; False for none."""
    kinds = set(map(_KIND, values))
    if len(kinds) != 1:
        return False
    kind, dtype, layout, _ = kinds.pop()
    return kind is Tensor and dtype is torch.float32 and layout is torch.strided


def _norm(value: Tensor, order: float) -> Tensor:
    if value.numel() == 0:
        return torch.zeros((), device=value.device)
    norm: Tensor = torch.linalg.vector_norm(value, order)
    return norm.float()


def multiply(gradients: Sequence[Tensor], factor: float, *, plain: bool | None = None) -> None:
    """Multiply gradients in place; ``plain`` is what ``are_plain`` says of them, if it is known."""
    if factor == 1.0 or not gradients:
        return
    if are_plain(gradients) if plain is None else plain:
        on_cpu = gradients[0].device.type == "cpu"
        torch._foreach_mul_(list(gradients), number(factor) if on_cpu else factor)
        return
    dense = [values_of(g) for g in gradients]
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in dense:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), group in by_kind.items():
        if device.type == "cpu" and dtype.itemsize < torch.float32.itemsize:
            for gradient in group:  # there, foreach rounds the factor to the gradients' precision
                gradient.mul_(factor)
        else:
            torch._foreach_mul_(group, factor)


@lru_cache(maxsize=8)
def number(value: float) -> Tensor:
    """A number as an FP32 tensor of no dimension on the CPU, where torch multiplies by it sooner.

    By a Python number it multiplies no other way, but makes it a tensor first, for each tensor anew.
    """
    with torch.inference_mode(mode=False), _disable_current_modes():
        return torch.tensor(value, dtype=torch.float32, device="cpu")


def clip_factor(norm: float, limit: float) -> float:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies by, to the last bit."""
    return min(1.0, float(limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6)))


def clamp(gradients: Sequence[Tensor], limit: float) -> None:
    """Bring every gradient into [-limit, limit], in place; of complex ones, both parts."""
    for gradient in gradients:
        values = values_of(gradient)
        if values.is_complex():  # as optimizers see it: two real numbers
            values = torch.view_as_real(values)
        values.clamp_(-limit, limit)


def unscale(gradients: Sequence[Tensor], scale: float, *, plain: bool | None = None) -> None:
    """Divide gradients by the loss scale, in place; for ``plain`` see ``multiply``.

    The reciprocal of a power of two is exact; of scales so small that it would be infinite, the
    division itself is used.
    """
    if scale == 1.0:
        return
    inverse = 1.0 / scale
    if math.isfinite(inverse) and inverse < LARGEST:
        multiply(gradients, inverse, plain=plain)
    else:
        for gradient in gradients:
            values_of(gradient).div_(scale)
