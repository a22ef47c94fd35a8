"""Tensors of collectives, until the threads of the process group have let them go.

Gloo works in threads of its own, and one still holds a collective's tensors for a moment after everybody
knows the result. Letting a tensor of Python's go takes Python's lock. A thread that asks for it while
Python shuts down is ended inside code that may not be ended, which aborts the program ("terminate called
without an active exception"), or is waited for in vain.
"""

import atexit
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_PATIENCE = 1.0
"""Seconds to wait for a thread at the end; one whose collective has failed lets nothing go."""
_MOST = 64
_kept: list[Tensor] = []


def keep(tensors: Sequence[Tensor]) -> None:
    """Hold the tensors of a collective that has ended, until nobody else does."""
    held = [t for t in _kept[-_MOST:] if _has_others(t)]
    _kept[:] = [*held, *(t for t in tensors if t.device.type == "cpu")]


def let_go() -> None:
    """Wait until nobody else holds what is kept, and drop it; Python does so before it shuts down."""
    end = time.monotonic() + _PATIENCE
    while any(map(_has_others, _kept)) and time.monotonic() < end:
        time.sleep(0.0001)
    _kept.clear()


def _has_others(tensor: Any) -> bool:
    """Whether something besides Python holds a tensor."""
    return bool(tensor._use_count() > 1)


atexit.register(let_go)
