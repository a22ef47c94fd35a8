"""What a trainer gave a model, to see what others have written since.

At O2 the model's weights are rounded copies of FP32 masters, and people write to both: they load a
state, clamp, prune or swap averages in the model, or move the masters by a method of the optimizer.
Version counters do not show it (``.data``, ``torch._foreach_*`` and fused kernels go round them), so
the halves that the trainer wrote last are kept, two bytes a weight, and compared by value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._utils import _unflatten_dense_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

LARGE = 1 << 16
"""Elements from which a weight is looked at alone; smaller ones are looked at together."""

Pair = tuple["Tensor", "Tensor"]
"""A parameter of the model, and its master."""


def same(a: Tensor, b: Tensor) -> Tensor:
    """Element by element, whether two tensors hold the same; NaN counts as itself."""
    return (a == b) | ((a != a) & (b != b))


class Bundle:
    """Weights of one dtype on one device that are looked at as one tensor.

    Args:
        pairs: Parameters of the model and their masters.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.parameters = [p for p, _ in pairs]
        self.masters = [m for _, m in pairs]
        self.dtype = self.parameters[0].dtype
        self.on_cpu = self.parameters[0].device.type == "cpu"
        self.given: Tensor | None = None  # None: while a step is under way
        self._versions: list[tuple[int, int]] = []  # of the masters, off a CPU
        self._differs: Tensor | None = None
        self._packed = _Packed(self.parameters), _Packed(self.masters)

    def now(self) -> Tensor:
        """What the model holds; of one weight alone, the weight itself."""
        return self._packed[0].read()

    def remember(self) -> None:
        """What the model holds is what the trainer has given it."""
        flat = self.now()
        self.given = flat.clone() if len(self.parameters) == 1 else flat
        self._versions = [] if self.on_cpu else self._versions_now()

    def _versions_now(self) -> list[tuple[int, int]]:
        return [(m._version, m.data_ptr()) for m in self.masters]

    def begin_comparison(self) -> None:
        """Ask the device whether the model holds something else; nobody waits for the answer.

        It is there after the next synchronisation with the device, for ``differs``.
        """
        if self.given is None:
            return
        different = ~same(self.now(), self.given).all()
        self._differs = torch.empty((), dtype=torch.bool, pin_memory=different.is_cuda)
        self._differs.copy_(different, non_blocking=different.is_cuda)

    def differs(self) -> bool:
        """Whether the model holds something else than it was given."""
        if self.given is None:
            return False
        if self._differs is not None:
            asked, self._differs = self._differs, None
            return bool(asked)
        now = self.now()
        return not _equal(now, self.given) and not bool(same(now, self.given).all())

    def differing(self) -> dict[Tensor, Tensor]:
        """By parameter: which of its elements are others than the trainer gave."""
        if self.given is None or not self.differs():
            return {}
        other = ~same(self.now(), self.given)
        parts = zip(self.parameters, _split(other, self.parameters), strict=True)
        return {p: part for p, part in parts if bool(part.any())}

    def refresh(self) -> None:
        """Give the model what someone has written into the masters; its own changes stay.

        A CPU compares them. Elsewhere the answer would have to be waited for, so version counters say
        whether to look; what goes round them (``.data``) the model sees after its next step.
        """
        if self.given is None:
            return
        if not self.on_cpu:
            if self._versions == self._versions_now():
                return
            self._versions = self._versions_now()
        masters = self._packed[1].read()
        rounded = masters.to(self.dtype)
        if self.on_cpu and _equal(rounded, self.given):
            return
        now = self.now()
        fits = torch.isfinite(rounded) | ~torch.isfinite(masters)
        fresh = ~same(rounded, self.given) & same(now, self.given) & fits
        if self.on_cpu and not bool(fresh.any()):
            return
        values = torch.where(fresh, rounded, now)
        self.given = torch.where(fresh, rounded, self.given)
        torch._foreach_copy_(self.parameters, list(_split(values, self.parameters)))


def bundles_of(pairs: Sequence[Pair]) -> list[Bundle]:
    """Weights in bundles, each with what the model holds as what it was given."""
    groups: dict[object, list[Pair]] = {}
    for parameter, master in pairs:
        plain = parameter.is_contiguous() and master.is_contiguous()
        alone = parameter.numel() >= LARGE or not plain
        key = id(parameter) if alone else (parameter.device, parameter.dtype)
        groups.setdefault(key, []).append((parameter, master))
    found = [Bundle(group) for group in groups.values()]
    for bundle in found:
        bundle.remember()
    return found


def adopted(
    parameter: Tensor, master: Tensor, changed: Tensor | None, wide: Mapping[Tensor, Tensor]
) -> Tensor:
    """The value of a master after what others have written into its parameter.

    Args:
        parameter: In half precision.
        master: In FP32; elements that nobody has written keep all their bits.
        changed: Which elements were written; None: none.
        wide: FP32 values that parameters were assigned, as far as they are known.
    """
    given = wide.get(parameter)
    if given is not None and given.shape == parameter.shape:
        full = given.detach().to(parameter.device, torch.float32)
        holds = same(full.to(parameter.dtype), parameter.detach())
        if bool(holds.all()):
            return full
        source = torch.where(holds, full, parameter.detach().float())
    else:
        source = parameter.detach().float()
    return master.detach() if changed is None else torch.where(changed, source, master.detach())


class _Packed:
    """Tensors read as one; views of them are kept, for making a view costs more than reading it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._views: list[Tensor] = []
        self._places: list[int] = []

    def read(self) -> Tensor:
        """All elements; of one tensor alone, that tensor itself, else a copy."""
        if len(self._tensors) == 1:
            return self._tensors[0].detach()
        # ``.data = …`` puts a tensor elsewhere, or its elements in another order.
        places = [t.data_ptr() if t.is_contiguous() else -1 for t in self._tensors]
        if places != self._places or -1 in places:
            self._places = places
            self._views = [t.detach().reshape(-1) for t in self._tensors]
        return torch.cat(self._views)


def _split(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    return (flat,) if len(like) == 1 else _unflatten_dense_tensors(flat, like)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are the same; four elements at a time where they lie one after another."""
    a, b = a.view(torch.int16), b.view(torch.int16)
    if a.is_contiguous() and b.is_contiguous() and a.storage_offset() % 4 == 0:
        whole = a.numel() // 4 * 4
        a, b = a.view(-1), b.view(-1)
        if not torch.equal(a[:whole].view(torch.int64), b[:whole].view(torch.int64)):
            return False
        a, b = a[whole:], b[whole:]
    return a.numel() == 0 or torch.equal(a, b)
