"""Steps that a loop takes past its trainer."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from mpdiag.training.arguments import inside
from mpdiag.training.callers import loop_stacklevel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer


class _Within:
    """A context that may be entered inside itself; a generator would cost more than the rest.

    Attributes:
        depth: How often it was.
    """

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_exception: object) -> None:
        self.depth -= 1


class StepGuard:
    """Warns once if a loop steps a trainer's optimizer itself, which nothing else would show.

    Args:
        optimizers: The trainer's.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._said = False
        self._within = _Within()
        self._handles: list[Any] = []
        self.watch(optimizers)

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Watch these, too."""
        self._handles += [
            one.register_step_pre_hook(self._before) for o in optimizers for one in inside(o)
        ]

    def within(self) -> AbstractContextManager[None]:
        """Steps inside this context are the trainer's own."""
        return self._within

    def release(self) -> None:
        """Remove the hooks; a second call does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _before(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._within.depth or self._said:
            return
        self._said = True
        warnings.warn(
            "optimizer.step() was called past MixedPrecision: nothing was scaled, checked or logged; "
            "put mp.step(loss) in place of loss.backward() and optimizer.step()",
            RuntimeWarning,
            stacklevel=loop_stacklevel(),
        )
