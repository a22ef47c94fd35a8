"""Parts of a training: what is lost late is judged in each of them, so that none hides in the others.

Gradients shrink as a training goes on. Pooled over its later half, a last fifth that loses much may
vanish among the larger gradients before it. Parts are cut by the training's steps, recorded or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LATE = ((0.5, 1.0, "later half"), (0.6, 0.8, "fourth fifth"), (0.8, 1.0, "last fifth"))
"""The parts that count, the one that decides where all say the same first."""


@dataclass(frozen=True)
class Window:
    """The steps from ``first`` to before ``end``.

    Attributes:
        name: What it is called: ``the later half of the training``.
        first, end: Steps; they need not be whole.
        recorded: How many steps of it were recorded.
    """

    name: str
    first: float
    end: float
    recorded: int

    def holds(self, steps: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of some steps lie in it."""
        inside: NDArray[np.bool_] = (steps >= self.first) & (steps < self.end)
        return inside


def late_windows(steps: NDArray[np.int64], length: int = 0) -> tuple[Window, ...]:
    """The late parts of a training of which at least one step was recorded.

    Args:
        steps: The recorded steps, in order.
        length: How many steps the training had; 0 if that is not known.

    Returns:
        Parts of the training. If no step of its later half was recorded, parts of what was recorded.
    """
    if steps.size == 0:
        return ()
    reached = int(steps[-1]) + 1
    whole = max(length, reached)
    if steps[-1] >= whole / 2:
        return _windows(steps, whole, "of the training")
    if steps[-1] >= reached / 2:
        return _windows(steps, reached, "of the recorded steps")
    return (Window("the recorded steps", int(steps[0]), reached, steps.size),)


def unseen_windows(steps: NDArray[np.int64], length: int) -> tuple[str, ...]:
    """Names of the late parts of a training of which no step was recorded."""
    names = tuple(f"the {name} of the training" for *_, name in _LATE)
    seen = {window.name for window in late_windows(steps, length)}
    if names[0] not in seen:
        return names[:1]
    return tuple(name for name in names[1:] if name not in seen)


def _windows(steps: NDArray[np.int64], whole: int, of_what: str) -> tuple[Window, ...]:
    found = []
    for begin, end, name in _LATE:
        first, last = begin * whole, end * whole
        recorded = int(((steps >= first) & (steps < last)).sum())
        if recorded:
            found.append(Window(f"the {name} {of_what}", first, last, recorded))
    return tuple(found)
