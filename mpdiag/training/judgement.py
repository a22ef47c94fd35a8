"""One judgement of a step's unscaled gradients: check, agree over ranks, clip.

The check is a norm per tensor. Infinity and NaN pass through a norm, so detection and statistics cost
one reading; and a Euclidean norm that leaves FP32's range is refused with the rest, because squares of
such gradients would be infinite in an optimizer's state.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, distributed, nn

from mpdiag.errors import UsageError
from mpdiag.training import collectives

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
                raise UsageError(f"{name} must be a number above 0, not {limit!r}")


NO_CLIP = Clip()


@dataclass(frozen=True)
class JudgedGradients:
    """What all ranks together say of a step's gradients.

    Attributes:
        finite: Whether an optimizer may see them, on every rank.
        norm: Euclidean norm of them, unscaled and before clipping; infinite or NaN where one of them
            is. The norm of sharded ones is that of the whole, the same on every rank.
        absmax: Largest |gradient|, of the whole where they are sharded; NaN if it was not asked for.
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
        sizes: Norms of buffers, on their devices.
        spoiled: The buffers that the step made infinite, asked for where a size is not finite: it may
            have been so before.
        note_losses: Called with the values of the losses, once they are known; without the first ones,
            where their gradients were thrown away.
        losses_decide: Whether a step is skipped for a loss alone. Else a loss explains gradients that
            are not finite, for it may be of a model that another optimizer steps.
    """

    losses: Sequence[Tensor] = ()
    sizes: Sequence[Tensor] = ()
    spoiled: Callable[[], object] = lambda: True
    note_losses: Callable[[Sequence[float]], None] = lambda _values: None
    losses_decide: bool = True


NOTHING_ELSE = ForwardPass()


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks that must agree on a step.

    Attributes:
        device: Where they exchange their answers, if their backend can.
        group: Their process group; None: all.
        shards: The process group of all shards, by parameter that FSDP1 left a shard of here.
        shard_groups: Those of all sharded parameters, FSDP1's and DTensors, once each. Some of these
            may have no gradient here, and have one elsewhere: an expert without a token.
    """

    device: torch.device
    group: Any = None
    shards: Mapping[Tensor, Any] = field(default_factory=dict)
    shard_groups: Sequence[tuple[Any, ...]] = ()


def judge_gradients(
    gradients: Sequence[Tensor],
    forward: ForwardPass = NOTHING_ELSE,
    *,
    scale: float,
    ranks: Ranks,
    parameters: Sequence[Tensor] = (),
    absmax: bool = False,
    known_bad: bool = False,
    clip: Clip = NO_CLIP,
    inspect: Callable[[Sequence[Tensor]], None] | None = None,
) -> JudgedGradients:
    """Decide whether a step may be taken; where it may, clip its gradients.

    One synchronisation with the device, and one exchange where there are several ranks. Gradients of
    a step that may not be taken are left as they are, for a diagnosis.

    Args:
        gradients: Unscaled. Of sharded ones every rank must call. None at all is an error, which every
            rank of a group must learn.
        forward: What else must be finite.
        scale: The loss scale of the step, which must be the same on every rank.
        ranks: Who must agree.
        parameters: What the gradients are of, in their order; needed where ranks have ``shards``.
        absmax: Whether the largest |gradient| is wanted, which is a second reading.
        known_bad: Whether this rank has seen earlier that the step cannot be taken.
        clip: The limits.
        inspect: Called with the gradients before they are clipped.

    Raises:
        UsageError: If ranks scale their losses differently, or one has no gradient.
    """
    if not gradients and not ranks.shard_groups:
        agree(RankVerdict.NO_GRADIENT, scale, ranks)
    sums = _sums_of(gradients, parameters, ranks)
    norm, largest, forward_finite = measure(gradients, forward, sums, absmax=absmax)
    finite = math.isfinite(norm) and not known_bad
    verdict = RankVerdict.FINITE if finite else RankVerdict.GRADIENTS
    if not gradients and finite:
        verdict = RankVerdict.ABSTAINS
    verdicts = agree(verdict if forward_finite else RankVerdict.FORWARD, scale, ranks)
    if all(v is RankVerdict.ABSTAINS for v in verdicts):
        raise UsageError(_NO_GRADIENT)
    bad_ranks = tuple(i for i, v in enumerate(verdicts) if v in BAD)
    if not bad_ranks:
        if inspect is not None:
            inspect(gradients)
        if clip.norm is not None:
            # As ``torch.nn.utils.clip_grad_norm_`` multiplies, to the last bit.
            factor = float(
                clip.norm / (torch.tensor(norm, dtype=torch.float32, device="cpu") + 1e-6)
            )
            multiply(gradients, min(1.0, factor))
        if clip.value is not None:
            clamp(gradients, clip.value)
    forward_failed = RankVerdict.FORWARD in verdicts
    return JudgedGradients(not bad_ranks, norm, largest, bad_ranks, forward_failed)


def judge_without_gradients(
    scale: float, ranks: Ranks, *, absmax: bool = False
) -> JudgedGradients | None:
    """Learn what the other ranks say of a step for which this one has no gradient.

    Returns:
        None if no rank has any.
    """
    if ranks.shard_groups:  # a shard without a gradient, of a norm that others measure
        measure((), NOTHING_ELSE, _sums_of((), (), ranks), absmax=absmax)
    verdicts = agree(RankVerdict.ABSTAINS, scale, ranks)
    if all(v is RankVerdict.ABSTAINS for v in verdicts):
        return None
    bad_ranks = tuple(i for i, v in enumerate(verdicts) if v in BAD)
    norm = math.nan if bad_ranks else 0.0
    return JudgedGradients(not bad_ranks, norm, 0.0, bad_ranks, RankVerdict.FORWARD in verdicts)


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


BAD = (RankVerdict.GRADIENTS, RankVerdict.FORWARD)
"""Where one rank says this, no rank may step."""


def agree(verdict: RankVerdict, scale: float, ranks: Ranks) -> list[RankVerdict]:
    """What every rank of a group says of a step; one process alone stands at its own place.

    Raises:
        UsageError: On every rank, if they scale their losses differently, so that gradients could not
            be summed, or if one has no gradient.
    """
    device, group = ranks.device, ranks.group
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
    collectives.keep([mine, *all_ranks])
    table = torch.stack(all_ranks).tolist()
    verdicts = [RankVerdict(int(row[0])) for row in table]
    if RankVerdict.NO_GRADIENT in verdicts:
        without = [i for i, v in enumerate(verdicts) if v is RankVerdict.NO_GRADIENT]
        if len(without) == size:
            raise UsageError(_NO_GRADIENT)
        raise UsageError(
            f"rank {', '.join(map(str, without))} has no gradient, others have: no rank steps; call "
            "backward() on every rank before step()"
        )
    scales = [row[1] for row in table]
    if min(scales) != max(scales):
        at = scales.index(next(s for s in scales if s != scales[0]))
        raise UsageError(
            f"rank 0 scales its loss by {2 ** scales[0]:g}, rank {at} by {2 ** scales[at]:g}: load "
            "the same state on every rank and call step() equally often"
        )
    return verdicts


_NO_GRADIENT = "step() found no gradient: call step(loss), or backward(loss) first"


@dataclass(frozen=True, eq=False)
class _Sums:
    """Over which ranks the norms of some gradients are summed.

    Attributes:
        groups: Of each gradient: the process groups over which it is sharded.
        all_groups: All of these on any rank, in one order: each is summed over once by every rank.
        device: Where the sums are made of a rank that has no gradient.
    """

    groups: Sequence[tuple[Any, ...]]
    all_groups: Sequence[tuple[Any, ...]]
    device: torch.device


_LOCAL = _Sums((), (), torch.device("cpu"))


def _sums_of(gradients: Sequence[Tensor], parameters: Sequence[Tensor], ranks: Ranks) -> _Sums:
    """Sums over the shards of gradients that are DTensors, or FSDP1's; none where all are whole."""
    if "torch.distributed.tensor" not in sys.modules and not ranks.shard_groups:
        return _LOCAL
    groups = [sharded_group(gradient) for gradient in gradients]
    if ranks.shards:
        shards = [ranks.shards.get(parameter) for parameter in parameters]
        groups = [g if s is None else (s,) for g, s in zip(groups, shards, strict=True)]
    all_groups = [group for group in dict.fromkeys([*ranks.shard_groups, *groups]) if group]
    return _Sums(groups, all_groups, ranks.device) if all_groups else _LOCAL


def measure(
    gradients: Sequence[Tensor], forward: ForwardPass, sums: _Sums = _LOCAL, *, absmax: bool
) -> tuple[float, float, bool]:
    """Read all gradients once (twice with ``absmax``); one synchronisation with the device.

    Args:
        gradients: This rank's.
        forward: What else is read.
        sums: How norms of shards are those of the whole, which every rank must ask for.
        absmax: Whether the largest |gradient| is wanted.

    Returns:
        The Euclidean norm over all gradients, infinite or NaN where one is, or where it leaves FP32's
        range; the largest |gradient|, NaN if it was not asked for; whether losses and buffers are
        finite.
    """
    values = [values_of(g) for g in gradients]
    numbers = [_total(norms(values, 2.0), sums)]
    device = numbers[0].device
    if absmax:
        numbers.append(_largest([n.to(device) for n in norms(values, math.inf)], sums, device))
    numbers += [*forward.sizes, *forward.losses]
    wide = torch.float64 if any(n.dtype is torch.float64 for n in numbers) else torch.float32
    read = torch.stack([_scalar(n, device, wide) for n in numbers]).tolist()
    begin, end = 1 + absmax, 1 + absmax + len(forward.sizes)
    losses = _since_cleared(read[end:]) if math.isfinite(read[0]) else read[end:]
    if losses:
        forward.note_losses(losses)
    buffers_finite = all(map(math.isfinite, read[begin:end])) or not forward.spoiled()
    finite = all(map(math.isfinite, losses))
    if not forward.losses_decide:
        finite = finite or math.isfinite(read[0])
    return read[0], read[1] if absmax else math.nan, finite and buffers_finite


def _scalar(number: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """One number of those that are read together; most are as they must be."""
    if number.dtype is not dtype or number.device != device:
        number = number.to(device, dtype)
    return number.reshape(()) if number.ndim else number


def _since_cleared(losses: list[float]) -> list[float]:
    """The losses behind gradients that are finite.

    A loss that is not, and that others came after, was thrown away with its gradients:
    ``zero_grad(set_to_none=False)`` leaves no other trace.
    """
    bad = [i for i, loss in enumerate(losses[:-1]) if not math.isfinite(loss)]
    return losses[bad[-1] + 1 :] if bad else losses


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


def any_nonzero(gradients: Iterable[Tensor]) -> bool:
    """Whether any gradient is not zero; waits for the device. A norm of tiny values would be 0."""
    return any(bool(values_of(gradient).any()) for gradient in gradients)


def sharded_group(gradient: Tensor) -> Any:
    """The process groups over which a gradient is sharded; empty where each rank holds it whole."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(gradient, distributed.DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(gradient.placements) if p.is_shard())


def without_partial_sums(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient, placed as its parameter and summed over ranks if it was not yet.

    Under sequence parallelism the gradients of norms are DTensors that are ``Partial``: their local
    values have no norm and no largest value of their own.
    """
    if type(gradient) is Tensor:
        return gradient
    tensors = sys.modules.get("torch.distributed.tensor")
    placements = getattr(gradient, "placements", ())
    if tensors is None or not any(placement.is_partial() for placement in placements):
        return gradient
    placed: Any = gradient
    if isinstance(parameter, tensors.DTensor) and parameter.device_mesh == placed.device_mesh:
        wanted = parameter.placements
    else:
        wanted = [tensors.Replicate() if p.is_partial() else p for p in placements]
    summed: Tensor = placed.redistribute(placements=wanted)
    return summed


def ranks_of(device: torch.device, group: Any, models: Sequence[nn.Module]) -> Ranks:
    """The ranks that must agree on the steps of some models, and how these are sharded over them."""
    shards = fsdp_shards(models)
    groups = [sharded_group(p) for model in models for p in model.parameters()]
    unique = dict.fromkeys([*((own,) for own in shards.values()), *filter(None, groups)])
    return Ranks(device, group, shards, tuple(unique))


def fsdp_shards(models: Iterable[nn.Module]) -> dict[Tensor, Any]:
    """The ``shards`` of ``Ranks``: what FullyShardedDataParallel, that is FSDP1, has cut in models."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    parts = [m for model in models for m in model.modules()]
    handles = [m._handle for m in parts if isinstance(m, fsdp.FullyShardedDataParallel)]
    return {
        parameter: handle.process_group
        for handle in handles
        if handle is not None and handle.uses_sharded_strategy
        for parameter in handle.flat_param._params or [handle.flat_param]
    }


def _total(parts: Sequence[Tensor], sums: _Sums) -> Tensor:
    """The norm of all gradients, from that of each; of sharded ones, over all shards."""
    device = parts[0].device if parts else sums.device
    held = [part if part.device == device else part.to(device) for part in parts]
    totals: list[Tensor] = []
    for group in [(), *sums.all_groups]:
        members = held
        if sums.groups:
            members = [part for part, its in zip(held, sums.groups, strict=True) if its == group]
        if not members and not group:
            continue
        total = torch.zeros((), device=device)
        if members:
            total = torch.linalg.vector_norm(torch.stack(members))
        if group:
            total = total.square()
            for process_group in group:
                distributed.all_reduce(total, group=process_group)
                collectives.keep([total])
            total = total.sqrt()
        totals.append(total)
    if len(totals) > 1:
        totals = [torch.linalg.vector_norm(torch.stack(totals))]
    return totals[0]


def _largest(parts: Sequence[Tensor], sums: _Sums, device: torch.device) -> Tensor:
    """The largest of some values; of sharded gradients, over all shards."""
    largest = torch.stack([torch.zeros((), device=device), *parts]).max()
    for process_group in dict.fromkeys(one for group in sums.all_groups for one in group):
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=process_group)
        collectives.keep([largest])
    return largest


def norms(values: Sequence[Tensor], order: float) -> list[Tensor]:
    """A norm of each tensor, on its device, in FP32; 0 for an empty one."""
    if order == math.inf and any(v.numel() == 0 or v.device.type == "cpu" for v in values):
        return [_norm(v, order) for v in values]
    found: dict[int, Tensor] = {}
    for (_, dtype), indices in by_kind(values).items():
        options = {} if dtype in (torch.float32, torch.float64) else {"dtype": torch.float32}
        if options and (dtype.is_complex or order == math.inf):
            parts: Iterable[Tensor] = [_norm(values[i], order) for i in indices]
        else:
            parts = torch._foreach_norm([values[i] for i in indices], order, **options)
        found.update(zip(indices, parts, strict=True))
    return [found[i] for i in range(len(values))]


def by_kind(values: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Which tensors can be treated together: their places, by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, value in enumerate(values):
        kinds.setdefault((value.device, value.dtype), []).append(i)
    return kinds


def _norm(value: Tensor, order: float) -> Tensor:
    if value.numel() == 0:
        return torch.zeros((), device=value.device)
    if order == math.inf and not value.is_complex():  # on a CPU a tenth of a norm's time
        low, high = torch.aminmax(value)
        return torch.maximum(-low, high).float()
    norm: Tensor = torch.linalg.vector_norm(value, order)
    return norm.float()


def multiply(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if factor == 1.0 or not gradients:
        return
    values = [values_of(g) for g in gradients]
    for (device, dtype), indices in by_kind(values).items():
        if device.type == "cpu" and dtype.itemsize < torch.float32.itemsize:
            for i in indices:  # there, foreach rounds the factor to the gradients' precision
                values[i].mul_(factor)
        else:
            torch._foreach_mul_([values[i] for i in indices], factor)


def clamp(gradients: Sequence[Tensor], limit: float) -> None:
    """Bring every gradient into [-limit, limit], in place; of complex ones, both parts."""
    for gradient in gradients:
        values = values_of(gradient)
        if values.is_complex():  # as optimizers see it: two real numbers
            values = torch.view_as_real(values)
        values.clamp_(-limit, limit)


def unscale(gradients: Sequence[Tensor], scale: float) -> None:
    """Divide gradients by the loss scale, in place.

    The reciprocal of a power of two is exact; of scales so small that it would be infinite, the
    division itself is used.
    """
    inverse = 1.0 / scale
    if inverse < LARGEST:
        multiply(gradients, inverse)
    else:
        for gradient in gradients:
            values_of(gradient).div_(scale)


def divided(gradient: Tensor, scale: float) -> Tensor:
    """As ``unscale``, of a gradient that must stay as it is."""
    inverse = 1.0 / scale
    return gradient * inverse if inverse < LARGEST else gradient / scale
