"""When a step begins, and what is saved then, so that a skip can undo it.

A step begins with the first forward pass whose gradients may be wanted. What a script does to its
buffers before that (``update_bn``, loading, averaging) is its own, and no skip takes it back. Forward
passes without gradients are of either kind: a generator's, whose output a discriminator is trained on,
belongs to the step if one ``mp.autocast()`` spans both.

A forward pass changes buffers long before it is known whether the step will be taken: running
statistics of an overflowing batch stay infinite. Version counters do not show every change: kernels of
batch norm, ``torch._foreach_*`` and writes through ``.data`` go round them, in torch's own modules and
in code that people write. So every buffer is copied when a step begins, and compared by its values.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpdiag.training.judgement import norms, values_of
from mpdiag.training.skips.random_state import capture_random

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


class _Phase(Enum):
    BETWEEN = "nothing has run since the last step"
    PERHAPS = "what has run may belong to the next step"
    BEGUN = "the step has begun"


class StepStart:
    """Saves buffers and random state when a step begins.

    Attributes:
        random: Torch's random state before the step's first forward pass; empty where no hook saw one.
    """

    def __init__(self, buffers: BufferGuard) -> None:
        self._buffers = buffers
        self._phase = _Phase.BETWEEN
        self._contexts = 0  # how many there were
        self._context = 0  # the one that is open; 0: none
        self._saved_in = 0
        self._drawn = False  # whether a forward pass has run since the buffers were saved
        self.random: dict[str, Tensor] = {}

    @property
    def between(self) -> bool:
        """Whether no forward pass of the next step has run yet."""
        return self._phase is _Phase.BETWEEN

    def ended(self) -> None:
        """A step is over; what comes belongs to the next."""
        self._phase = _Phase.BETWEEN

    def hold(self) -> None:
        """Save nothing until the step is over."""
        self._phase = _Phase.BEGUN

    def enter(self, *, grad: bool) -> int:
        """A context for forward passes begins; parts of a model may be called in it that no hook sees.

        Returns:
            What ``leave`` must be given.
        """
        around = self._context
        if around == 0:
            self._contexts += 1
            self._context = self._contexts
            if grad and self._phase is not _Phase.BEGUN:
                self._save()
        return around

    def leave(self, around: int) -> None:
        """The context is over."""
        self._context = around

    def forward_began(self, *, grad: bool) -> None:
        """A forward pass begins.

        Args:
            grad: Whether gradients are recorded.
        """
        if self._phase is _Phase.BEGUN:
            return
        saved_here = self._context != 0 and self._saved_in == self._context
        if self._phase is _Phase.BETWEEN or (grad and not saved_here):
            self._save()
        if not self._drawn:
            self.random = capture_random()
            self._drawn = True
        if grad:
            self._phase = _Phase.BEGUN

    def _save(self) -> None:
        # What spoils a buffer is no purpose of a script.
        self._buffers.save(unless_spoiled=self._phase is _Phase.PERHAPS)
        self.random, self._drawn = {}, False
        self._saved_in, self._phase = self._context, _Phase.PERHAPS


# -- buffers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Saved:
    """A buffer and its copy; both are one tensor where nothing can write to it in place."""

    buffer: Tensor
    copy: Tensor


@dataclass(frozen=True, eq=False)
class _Layout:
    """The modules of some models and their buffers, as they were at one moment.

    Attributes:
        modules: Every module, once.
        parts: What their ``_modules`` and ``_buffers`` hold, one after another.
        names: The names of each module's buffers.
        buffers: The buffers, one after another.
    """

    modules: list[nn.Module]
    parts: list[nn.Module | Tensor | None]
    names: list[tuple[str, ...]]
    buffers: list[Tensor | None]

    def holds(self) -> bool:
        """Whether the models have the same modules and buffers still."""
        parts = _parts(self.modules)
        return len(parts) == len(self.parts) and all(map(operator.is_, parts, self.parts))


def _layout(models: Sequence[nn.Module]) -> _Layout:
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    return _Layout(
        modules,
        _parts(modules),
        [tuple(m._buffers) for m in modules],
        [buffer for m in modules for buffer in m._buffers.values()],
    )


def _parts(modules: Sequence[nn.Module]) -> list[nn.Module | Tensor | None]:
    """What some modules hold; asked twice in each step, of every module, so without a Python loop."""
    tables = chain.from_iterable(map(_TABLES, map(vars, modules)))
    return list(chain.from_iterable(map(_VALUES, tables)))


_TABLES = operator.itemgetter("_modules", "_buffers")
_VALUES = operator.methodcaller("values")


class BufferGuard:
    """Saves and restores the buffers of some models.

    The copies keep their memory from step to step.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._layout: _Layout | None = None
        self._saved: dict[int, _Saved] = {}  # by id of the buffer, which it keeps alive
        self._groups: list[list[_Saved]] = []  # those that are copied together
        self._copied: list[tuple[list[Tensor], list[Tensor]]] = []  # their copies, and they
        self._odd: list[_Saved] = []  # those that are copied one by one
        self._kinds: list[object] = []  # shape, dtype and device of each
        self._buffers: list[Tensor] = []  # all that are saved
        self._floats: list[Tensor] = []  # those whose values may be infinite
        self._bad_before: set[int] = set()  # buffers that were not finite before a step

    def save(self, *, unless_spoiled: bool = False) -> None:
        """Copy the buffers as they are now.

        Args:
            unless_spoiled: Keep the copy of a buffer that was finite when it was last saved and is
                not now; nobody waits for the device to learn which.
        """
        same = self._layout is not None and self._layout.holds()
        if not same or list(map(_KIND, self._buffers)) != self._kinds:
            self._look()
        if not self._buffers:
            return
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as ``torch.no_grad`` does, sooner
        try:
            self._copy(unless_spoiled=unless_spoiled)
        finally:
            torch._C._set_grad_enabled(grad)

    def _copy(self, *, unless_spoiled: bool) -> None:
        if unless_spoiled:
            for group in self._groups:
                torch._foreach_copy_([s.copy for s in group], [_unspoiled(s) for s in group])
        else:
            for copies, buffers in self._copied:
                torch._foreach_copy_(copies, buffers)
        for saved in self._odd:
            self._saved[id(saved.buffer)] = _Saved(saved.buffer, saved.buffer.detach().clone())

    def _look(self) -> None:
        """Find the buffers; what is new, or of another size, gets memory for its copy."""
        before, self._saved = self._saved, {}
        self._layout = _layout(self._models)
        groups: dict[tuple[torch.device, torch.dtype], list[_Saved]] = {}
        for buffer in self._layout.buffers:
            if buffer is None or buffer.is_meta or id(buffer) in self._saved:
                continue
            saved = before.get(id(buffer))
            if saved is None or not _alike(saved.copy, buffer):
                saved = _Saved(buffer, buffer if _overlaps(buffer) else buffer.detach().clone())
            if saved.copy is not buffer and _is_plain(buffer):
                groups.setdefault((buffer.device, buffer.dtype), []).append(saved)
            self._saved[id(buffer)] = saved
        self._groups = list(groups.values())
        self._copied = [([s.copy for s in g], [s.buffer for s in g]) for g in self._groups]
        self._buffers = [s.buffer for s in self._saved.values()]
        self._kinds = list(map(_KIND, self._buffers))
        self._odd = [
            s for s in self._saved.values() if not _is_plain(s.buffer) and s.copy is not s.buffer
        ]
        self._floats = [buffer for buffer in self._buffers if _may_be_infinite(buffer)]
        self._bad_before &= self._saved.keys()

    def _pairs(self) -> list[tuple[Tensor, _Saved | None]]:
        """Each floating-point buffer there is now, and what was in its place before."""
        if self._layout is None:
            return []
        found: dict[int, tuple[Tensor, _Saved | None]] = {}
        before = iter(self._layout.buffers)
        for module, names in zip(self._layout.modules, self._layout.names, strict=True):
            old = {name: next(before) for name in names}
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and _may_be_infinite(buffer):
                    found.setdefault(id(buffer), (buffer, self._saved.get(id(old.get(name)))))
        return list(found.values())

    def sizes(self) -> list[Tensor]:
        """Norms of the floating-point buffers, on their devices.

        Of what was not finite before, the norm is 0: a mask of minus infinities is no fault of the step.
        """
        if self._layout is None:
            return []
        if not self._bad_before and self._layout.holds():
            return norms([values_of(buffer) for buffer in self._floats], 2.0)
        pairs = self._pairs()
        found = norms([values_of(buffer) for buffer, _ in pairs], 2.0)
        for i, (_, saved) in enumerate(pairs):
            if saved is not None and id(saved.buffer) in self._bad_before:
                (before,) = norms([values_of(saved.copy)], 2.0)
                found[i] = torch.where(torch.isfinite(before), found[i], 0.0)
        return found

    def spoiled(self) -> list[Tensor]:
        """Buffers that are not finite now and were before the step; waits for the device."""
        found = []
        for buffer, saved in self._pairs():
            if math.isfinite(_norm(buffer)):
                continue
            if not _finite(buffer) and (saved is None or _finite(saved.copy)):
                found.append(buffer)
            elif saved is not None:  # large, or not finite before: seldom worth another look
                self._bad_before.add(id(saved.buffer))
        return found

    def are_spoiled(self) -> bool:
        """Whether there are such."""
        return bool(self.spoiled())

    def names_of(self, buffers: Sequence[Tensor]) -> list[str]:
        """Their names as PyTorch gives them."""
        names = {id(b): n for model in self._models for n, b in model.named_buffers()}
        return [names.get(id(b), "a buffer") for b in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Every buffer as it was saved; those that the step has made are taken away."""
        if self._layout is None:
            return
        before = iter(self._layout.buffers)
        for module, names in zip(self._layout.modules, self._layout.names, strict=True):
            for name in [n for n in module._buffers if n not in names]:
                del module._buffers[name]
            module._buffers.update({name: next(before) for name in names})
        for saved in self._saved.values():
            if saved.copy is not saved.buffer and not _same(saved.buffer, saved.copy):
                saved.buffer.copy_(saved.copy)


_KIND = operator.attrgetter("shape", "dtype", "device")


def _is_plain(buffer: Tensor) -> bool:
    return type(buffer) is Tensor and buffer.layout == torch.strided


def _may_be_infinite(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _overlaps(tensor: Tensor) -> bool:
    """Whether several of its elements are one place in memory: torch refuses to write to it."""
    return tensor.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _unspoiled(saved: _Saved) -> Tensor:
    """The buffer, or its copy where that was finite and the buffer is not."""
    if not _may_be_infinite(saved.buffer):
        return saved.buffer
    keep = torch.isfinite(saved.buffer).all() | ~torch.isfinite(saved.copy).all()
    return torch.where(keep, saved.buffer, saved.copy)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(values_of(tensor)).all())


def _norm(tensor: Tensor) -> float:
    return float(norms([values_of(tensor)], 2.0)[0])


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same, NaN counted as itself."""
    if not _alike(a, b):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
