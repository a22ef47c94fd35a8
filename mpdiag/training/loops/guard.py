"""Steps that a loop takes past its trainer."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpdiag.training.arguments import inside
from mpdiag.training.callers import loop_stacklevel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim import Optimizer


class StepGuard:
    """Warns once if a loop steps a trainer's optimizer itself, which nothing else would show.

    Args:
        optimizers: The trainer's.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._inside = self._said = False
        self._handles: list[Any] = []
        self.watch(optimizers)

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Watch these, too."""
        self._handles += [
            one.register_step_pre_hook(self._before) for o in optimizers for one in inside(o)
        ]

    @contextmanager
    def within(self) -> Iterator[None]:
        """Steps inside this context are the trainer's own."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def release(self) -> None:
        """Remove the hooks; a second call does nothing."""
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
            stacklevel=loop_stacklevel(),
        )
