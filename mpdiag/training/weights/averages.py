"""``torch.optim.swa_utils.AveragedModel`` of models that hold half-precision weights.

An average moves by a small share of each update, which half precision swallows. A copy of such a model
is FP32, and while a trainer holds the model, its averages read the masters.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from mpdiag.training.weights.masters import Masters

_LOW = (torch.float16, torch.bfloat16)
_held: list[tuple[frozenset[nn.Module], Masters]] = []  # models of live trainers, and their masters


class _InFull:
    """What ``update_parameters`` reads of a model: its parameters and buffers, in FP32."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self) -> Iterator[Tensor]:
        return (in_full(p) for p in self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        return (in_full(b) for b in self._model.buffers())


def in_full(tensor: Tensor) -> Tensor:
    """The FP32 value of a parameter or buffer of a model that a trainer holds."""
    for _, masters in _held:
        if tensor in masters:
            return masters.value(tensor)
    return tensor.float() if tensor.dtype in _LOW else tensor


def read_masters(models: Sequence[nn.Module], masters: Masters) -> Callable[[], None]:
    """Let averages of some models read their masters from now on; returns what undoes it."""
    if not _held:
        _patch()
    entry = frozenset(models), masters
    _held.append(entry)

    def release() -> None:
        _held[:] = [other for other in _held if other is not entry]
        plain = getattr(AveragedModel.update_parameters, "_mpdiag", None)
        if not _held and plain is not None:  # else it was patched again since
            AveragedModel.update_parameters = plain  # type: ignore[method-assign]

    return release


def _patch() -> None:
    update = AveragedModel.update_parameters

    @functools.wraps(update)
    def update_parameters(self: Any, model: nn.Module) -> None:
        inside = set(model.modules())
        held = any(models & inside for models, _ in _held)
        update(self, _InFull(model) if held else model)  # type: ignore[arg-type]

    update_parameters._mpdiag = update  # type: ignore[attr-defined]
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]
