"""A weight that exists twice, and what others have written into either copy.

At O2 the model's weights are rounded copies of FP32 masters, and people write to both: they load a
state, clamp, prune or swap averages in the model, or move the masters by a method of the optimizer.
Version counters do not show it (``.data``, ``torch._foreach_*`` and fused kernels go round them), so
the halves that the trainer wrote last are kept, two bytes a weight, and compared by value.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpdiag.errors import UsageError
from mpdiag.training.judgement import values_of

CAST_FIRST = (
    "levels O2 and O3 cast weights, which must happen before they are distributed: give MixedPrecision "
    "the plain model and wrap it in DDP afterwards; choose O1 for a model that is sharded"
)

_FEW = 4096
"""Below this count, comparing numbers is as fast as comparing their bits."""


def same(a: Tensor, b: Tensor) -> Tensor:
    """Element by element, whether two tensors hold the same; NaN counts as itself."""
    return (a == b) | ((a != a) & (b != b))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The sum over each tensor's bits, int64; None if one is of a class whose bits are its own."""
    sums = []
    for tensor in tensors:
        values = values_of(tensor.detach())
        if type(values) is not Tensor:
            return None
        values = torch.view_as_real(values) if values.is_complex() else values
        sums.append(values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
    return torch.stack([one.to(sums[0].device) for one in sums])


def answers_late(device: torch.device) -> bool:
    """Whether Python would have to wait for what a device has computed."""
    return device.type != "cpu"


class Weight:
    """A parameter of a model in half precision, and its FP32 master.

    To an optimizer the master is the parameter: ``requires_grad_()`` of either reaches the other, and
    both have the same attributes (``lr_scale``, or how a tensor is sharded).

    Attributes:
        parameter, master: Both copies.
        dtype: The parameter's.
        given: What the trainer has written into the parameter last; None while a step is under way.
        wide: An FP32 value that the parameter was assigned, and where the parameter lay then.
    """

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        self.parameter = parameter
        self.master: Tensor = nn.Parameter(value.detach().clone().float(), parameter.requires_grad)
        self.master.__dict__ = parameter.__dict__
        self._trained = parameter.requires_grad
        self.dtype = parameter.dtype
        self.wide: tuple[Tensor, int] | None = None
        self.remember()

    def remember(self) -> None:
        """What the model holds is what the trainer has given it."""
        self.given: Tensor | None = self.parameter.detach().clone()
        self._version = self._version_now()

    def _version_now(self) -> tuple[int, int]:
        return self.master._version, self.master.data_ptr()

    def differs(self) -> Tensor:
        """Whether the model holds something else than it was given, as one flag on the device."""
        if self.given is None:
            return torch.zeros((), dtype=torch.bool, device=self.parameter.device)
        return ~same(self.parameter.detach(), self.given).all()

    def changed(self) -> Tensor | None:
        """Which elements of the model are others than it was given; None: none."""
        if self.given is None or _surely_same(self.parameter, self.given):
            return None
        other = ~same(self.parameter.detach(), self.given)
        return other if bool(other.any()) else None

    def refresh(self) -> None:
        """Give the model what someone has written into the master; its own changes stay.

        A CPU compares them. Elsewhere the answer would have to be waited for, so version counters say
        whether to look; what goes round them (``.data``) the model sees after its next step.
        """
        if self.given is None:
            return
        late = answers_late(self.parameter.device)
        if late:
            before, self._version = self._version, self._version_now()
            if before == self._version:
                return
        rounded = self.master.detach().to(self.dtype)
        if not late and _surely_same(rounded, self.given):
            return
        now = self.parameter.detach()
        fits = torch.isfinite(rounded) | ~torch.isfinite(self.master)
        fresh = ~same(rounded, self.given) & same(now, self.given) & fits
        self.given = torch.where(fresh, rounded, self.given)
        now.copy_(torch.where(fresh, rounded, now))

    def note_wide(self, value: Tensor) -> None:
        """The parameter receives a value that is known in FP32."""
        self.wide = value, self.parameter.data_ptr()

    def forget_wide(self) -> None:
        """It was adopted, or others have loaded the master."""
        self.wide = None

    def value(self, changed: Tensor | None) -> Tensor:
        """The value of the master after what others have written into the parameter.

        Args:
            changed: Which elements were written; None: none. The others keep all their bits.
        """
        parameter, master = self.parameter.detach(), self.master.detach()
        source = parameter.float()
        wide, at = self.wide or (None, 0)
        if wide is not None and at == parameter.data_ptr() and wide.shape == parameter.shape:
            full = wide.detach().to(parameter.device, torch.float32)
            holds = same(full.to(parameter.dtype), parameter)
            if bool(holds.all()):
                return full
            source = torch.where(holds, full, source)
        return master if changed is None else torch.where(changed, source, master)

    def straighten(self) -> None:
        """Give the parameter its own dtype back, and the master the shape and place of the parameter.

        One that was frozen or unfrozen takes the other along.
        """
        parameter, master = self.parameter, self.master
        if parameter.requires_grad is not master.requires_grad:
            self._trained = not self._trained
            parameter.requires_grad_(self._trained)
            master.requires_grad_(self._trained)
        if parameter.dtype is not self.dtype:
            value = parameter.data
            parameter.data = value.to(self.dtype)
            self.note_wide(value)
        if parameter.shape != master.shape or parameter.device != master.device:
            if hasattr(parameter, "_fsdp_flattened"):
                raise UsageError(CAST_FIRST)
            source = master if parameter.shape == master.shape else parameter
            master.data = source.detach().to(parameter.device).float()
            self.remember()


def _surely_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same; if not, ask ``same``, for NaN or -0 may count as different.

    Of many numbers the bits are compared, four at a time: numbers take twelve times as long.
    """
    if a.numel() < _FEW:
        return torch.equal(a.detach(), b)
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    aligned = a.numel() % 4 == a.storage_offset() % 4 == b.storage_offset() % 4 == 0
    kind = torch.int64 if aligned else torch.int16
    return torch.equal(a.view(kind), b.view(kind))
