"""When a step begins, and what is saved then, so that a skip can undo it.

A step begins with the first forward pass whose gradients may be wanted. What a script does to its
buffers before that (``update_bn``, loading, averaging) is its own, and no skip takes it back. Forward
passes without gradients are of either kind: a generator's, whose output a discriminator is trained on,
belongs to the step if one ``mp.autocast()`` spans both.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from mpdiag.training.skips.random_state import capture_random

if TYPE_CHECKING:
    from torch import Tensor

    from mpdiag.training.weights.buffers import BufferGuard


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
