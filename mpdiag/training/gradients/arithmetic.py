"""One sweep over gradients: are they finite, how large are they, and which was not finite first.

The sweep is a norm per tensor. Infinity and NaN pass through a norm, so detection and statistics
cost one reading; and a Euclidean norm that leaves FP32's range is refused with the rest, because
squares of such gradients would be infinite in an optimizer's state.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Kind = Literal["Inf", "NaN"]


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


def non_finite(names: Sequence[str], gradients: Sequence[Tensor]) -> list[tuple[str, Kind]]:
    """Names of the gradients that are not finite, each with ``NaN`` or ``Inf``."""
    found: list[tuple[str, Kind]] = []
    for name, gradient in zip(names, gradients, strict=True):
        values = values_of(gradient)
        if bool(torch.isnan(values).any()):
            found.append((name, "NaN"))
        elif bool(torch.isinf(values).any()):
            found.append((name, "Inf"))
    return found


def backward_order(root: Any, limit: int = 1_000_000) -> dict[int, int]:
    """When a backward pass reaches each parameter: ``id(parameter)`` -> rank, 0 the first.

    Autograd runs nodes in the reverse order of their creation; a parameter counts when the first
    operation that used it is reached.

    Args:
        root: The ``grad_fn`` of the loss, whose graph may be freed already.
        limit: Nodes to visit at most.
    """
    latest: dict[int, int] = {}
    seen = {root}
    stack = [root]
    while stack and len(seen) < limit:
        node = stack.pop()
        for child, _ in getattr(node, "next_functions", ()):
            if child is None:
                continue
            variable = getattr(child, "variable", None)
            if variable is not None:
                number = node._sequence_nr()
                latest[id(variable)] = max(latest.get(id(variable), -1), number)
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    order = sorted(latest, key=lambda key: -latest[key])
    return {key: rank for rank, key in enumerate(order)}
