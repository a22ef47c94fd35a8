"""In which arithmetic the parts of a step run: forward passes, backward passes, updates."""

import copy
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

from mpdiag.emulation import policy
from mpdiag.emulation.mode import Emulation
from mpdiag.tracing.capture import refuse_capture
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.precision_share import PrecisionShare
from mpdiag.tracing.uncompiled import Eagerly
from mpdiag.training.weights.wrapping import Wrapped

_NOTHING = nullcontext()


def _nested(*contexts: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """Contexts inside one another, the first outermost; one that does nothing costs nothing."""
    needed = [context for context in contexts if context is not _NOTHING]
    return functools.reduce(_within, needed) if needed else _NOTHING


@contextmanager
def _within(
    outer: AbstractContextManager[object], inner: AbstractContextManager[object]
) -> Iterator[None]:
    with outer, inner:
        yield


class Casting:
    """The arithmetic of one trainer.

    Args:
        wrapped: The models, in the precision of their level.
        emulation: Emulates low precision; None where the device's own arithmetic is used.
        share: Counts what runs in half precision.
    """

    def __init__(
        self, wrapped: Wrapped, emulation: Emulation | None, share: PrecisionShare
    ) -> None:
        self._share = share
        self._wrapped = wrapped
        self._emulation = emulation
        self._precision = wrapped.precision
        self._device_type = wrapped.device_type

    def forward(self) -> AbstractContextManager[object]:
        """Forward passes and losses: operations are cast by the policy."""
        precision = self._precision
        low = self._wrapped.switch.on and precision.level != "O0"
        casts = low and precision.operation_casts
        eagerly = low and not (self._emulation is None and self._wrapped.compiles)
        return _nested(
            self._wrapped.looked() if precision.low_precision_model else _NOTHING,
            Eagerly() if eagerly else _NOTHING,
            self._emulation if low and self._emulation is not None else _NOTHING,
            policy.in_force(self._wrapped.policy) if casts else _NOTHING,
            torch.autocast(self._device_type, precision.dtype) if casts else _NOTHING,
            self._share.counting() if self._share.is_active else _NOTHING,
        )

    def backward(self) -> AbstractContextManager[object]:
        """Backward passes: the same arithmetic, with autocast off."""
        refuse_capture()
        low = self._wrapped.switch.on
        casts = low and self._precision.operation_casts  # for what is computed again in backward
        return _nested(
            self.off(),
            self._emulation if low and self._emulation is not None else _NOTHING,
            policy.in_force(self._wrapped.policy) if casts else _NOTHING,
            self._share.counting() if self._share.is_active else _NOTHING,
        )

    def recomputation(self) -> AbstractContextManager[object]:
        """A forward pass that checkpointing runs again inside a backward pass."""
        precision = self._precision
        casts = precision.operation_casts
        return torch.autocast(self._device_type, precision.dtype) if casts else _NOTHING

    def update(self) -> AbstractContextManager[object]:
        """Updates of weights; FP32 ones need no emulation, which looks at every small operation."""
        low = self._precision.low_precision_model and not self._precision.master_weights
        return self.backward() if low else self.off()

    def off(self) -> AbstractContextManager[object]:
        """No casts of any kind."""
        if torch.is_autocast_enabled(self._device_type):
            return torch.autocast(self._device_type, enabled=False)
        return _NOTHING


def widened(output: Any) -> Any:
    """What a module returns, its half-precision tensors in FP32; containers keep their type."""

    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype in HALF:
            return x.float()
        return _widened_fields(x) if hasattr(x, "__dataclass_fields__") else x

    return tree_map(cast, output)


def _widened_fields(output: Any) -> Any:
    """A dataclass with its fields widened."""
    if isinstance(output, type):
        return output
    result = copy.copy(output)
    for name in output.__dataclass_fields__:
        if hasattr(output, name):
            object.__setattr__(result, name, widened(getattr(output, name)))
    return result
