"""A step that was taken past the trainer: easily written by mistake, and silent without this."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim import Optimizer


class StepGuard:
    """Warns once if a loop steps a trainer's optimizer itself.

    Args:
        optimizers: The trainer's.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._inside = self._said = False
        self._handles = [o.register_step_pre_hook(self._before) for o in optimizers]

    @contextmanager
    def within(self) -> Iterator[None]:
        """Here the trainer steps."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def release(self) -> None:
        """Watch no more; twice does no harm."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _before(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._inside or self._said:
            return
        self._said = True
        warnings.warn(
            "optimizer.step() was called past MixedPrecision: nothing was scaled, checked or logged; "
            "put mp.step(loss) in place of loss.backward() and optimizer.step()",
            RuntimeWarning,
            stacklevel=_level_of_the_loop(),
        )


def _level_of_the_loop() -> int:
    """How far up the stack, seen from our caller, a line stands that is not torch's."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("torch."):
        level, frame = level + 1, frame.f_back
    return level
