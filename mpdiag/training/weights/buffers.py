"""Buffers as they were before a step, restored when it is skipped.

A forward pass changes buffers long before it is known whether the step will be taken: running
statistics of an overflowing batch stay infinite. Version counters do not show every change: kernels of
batch norm, ``torch._foreach_*`` and writes through ``.data`` go round them, in torch's own modules and
in code that people write. So every buffer is copied when a step begins, and compared by its values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpdiag.training.gradients.judgement import norms, values_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn


@dataclass(frozen=True, eq=False)
class _Saved:
    """A buffer and its copy; both are one tensor where nothing can write to it in place."""

    buffer: Tensor
    copy: Tensor


class BufferGuard:
    """Saves and restores the buffers of some models.

    The copies keep their memory from step to step.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._modules: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._saved: dict[int, _Saved] = {}  # by id of the buffer, which it keeps alive
        self._bad_before: set[int] = set()  # buffers that were not finite before a step

    @torch.no_grad()
    def save(self, *, unless_spoiled: bool = False) -> None:
        """Copy the buffers as they are now.

        Args:
            unless_spoiled: Keep the copy of a buffer that was finite when it was last saved and is
                not now; nobody waits for the device to learn which.
        """
        before, self._saved = self._saved, {}
        self._modules = [
            (module, dict(module._buffers)) for model in self._models for module in model.modules()
        ]
        kept: dict[tuple[torch.device, torch.dtype], list[_Saved]] = {}
        for _, buffers in self._modules:
            for buffer in buffers.values():
                if buffer is None or buffer.is_meta or id(buffer) in self._saved:
                    continue
                saved = before.get(id(buffer))
                if saved is None or not _holds(saved, buffer):
                    saved = _Saved(buffer, buffer if _overlaps(buffer) else buffer.detach().clone())
                elif saved.copy is not buffer:
                    kept.setdefault((buffer.device, buffer.dtype), []).append(saved)
                self._saved[id(buffer)] = saved
        self._bad_before &= self._saved.keys()
        for group in kept.values():
            now = [_unspoiled(saved) if unless_spoiled else saved.buffer for saved in group]
            torch._foreach_copy_([saved.copy for saved in group], now)

    def _pairs(self) -> Iterator[tuple[Tensor, _Saved | None]]:
        """Each floating-point buffer there is now, and what was in its place before."""
        seen: set[int] = set()
        for module, before in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.is_meta or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                if buffer.is_floating_point() or buffer.is_complex():
                    yield buffer, self._saved.get(id(before.get(name)))

    def sizes(self) -> list[Tensor]:
        """A norm of each floating-point buffer, on its device; of what was not finite before, 0.

        A mask of minus infinities is no fault of the step.
        """
        pairs = list(self._pairs())
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

    def names_of(self, buffers: Sequence[Tensor]) -> list[str]:
        """Their names as PyTorch gives them."""
        names = {id(b): n for model in self._models for n, b in model.named_buffers()}
        return [names.get(id(b), "a buffer") for b in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Every buffer as it was saved; those that the step has made are taken away."""
        for module, buffers in self._modules:
            for name in [n for n in module._buffers if n not in buffers]:
                del module._buffers[name]
            module._buffers.update(buffers)
        for saved in self._saved.values():
            if saved.copy is not saved.buffer and not _same(saved.buffer, saved.copy):
                saved.buffer.copy_(saved.copy)


def _holds(saved: _Saved, buffer: Tensor) -> bool:
    """Whether the copy's memory can take the buffer's values again."""
    plain = type(buffer) is Tensor and buffer.layout == torch.strided
    return plain and _alike(saved.copy, buffer)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _overlaps(tensor: Tensor) -> bool:
    """Whether several of its elements are one place in memory: torch refuses to write to it."""
    return tensor.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _unspoiled(saved: _Saved) -> Tensor:
    """The buffer, or its copy where that was finite and the buffer is not."""
    if not (saved.buffer.is_floating_point() or saved.buffer.is_complex()):
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
