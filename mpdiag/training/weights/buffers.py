"""Buffers as they were before a step, restored when it is skipped.

A forward pass changes buffers long before it is known whether the step will be taken: batch
norm's running statistics of an overflowing batch stay infinite. The guard copies the
buffers that training changes, at the first forward pass of each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence


_NORMS = (nn.modules.batchnorm._NormBase,)


@dataclass
class _Saved:
    """A buffer of a module, and what it held."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor

    @property
    def now(self) -> Tensor | None:
        """The buffer of that name today; code may put another tensor in its place."""
        return self.module._buffers.get(self.name)

    @property
    def changed(self) -> bool:
        """Whether it may differ from the copy.

        A version counter shows it, except for running statistics: their kernels do not count writes.
        """
        silent = isinstance(self.module, _NORMS) and self.module.training
        return silent or self.now is not self.buffer or self.buffer._version != self.version


class BufferGuard:
    """Saves and restores the buffers of some models.

    Every buffer is copied in the first step; afterwards only those that have changed since, so a
    large mask that never changes costs its copy once.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._saved: dict[tuple[int, str], _Saved] = {}

    def save(self) -> None:
        """Copy the buffers as they are now."""
        before, self._saved = self._saved, {}
        for model in self._models:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is None or buffer.is_meta:
                        continue
                    key = (id(module), name)
                    old = before.get(key)
                    if old is None or old.changed:
                        copy = buffer.detach().clone()
                        old = _Saved(module, name, buffer, buffer._version, copy)
                    self._saved[key] = old

    def changed(self) -> list[Tensor]:
        """Floating-point buffers that may have changed since they were saved."""
        return [
            now
            for old in self._saved.values()
            if old.changed and (now := old.now) is not None and now.is_floating_point()
        ]

    def names_of(self, buffers: Sequence[Tensor]) -> list[str]:
        """Their names as PyTorch gives them."""
        names = {id(b): n for model in self._models for n, b in model.named_buffers()}
        return [names.get(id(b), "a buffer") for b in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every buffer that may have changed."""
        for old in self._saved.values():
            if old.changed:
                old.buffer.copy_(old.copy)
                old.module._buffers[old.name] = old.buffer
                old.version = old.buffer._version
