"""oneDNN's switch, which is the whole process's, shared by all threads that emulate.

Two threads that each restored what they found would leave it off for good. So contexts in which it is
off are counted, and the last to end gives it back. A thread that computes in FP32 meanwhile finds it
off or on: its results may differ by the rounding of other kernels.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = threading.Lock()
_contexts = 0
_before = True


def switch_off() -> bool:
    """Switch it off until ``give_back`` was called as often; returns how it was at first."""
    global _contexts, _before  # noqa: PLW0603 - as the switch itself
    with _lock:
        if _contexts == 0:
            _before = torch._C._get_mkldnn_enabled()
        _contexts += 1
        torch._C._set_mkldnn_enabled(False)
        return _before


def give_back() -> None:
    """One context in which it was off is over."""
    global _contexts  # noqa: PLW0603
    with _lock:
        _contexts -= 1
        if _contexts == 0:
            torch._C._set_mkldnn_enabled(_before)


@contextmanager
def off() -> Iterator[None]:
    """Off inside."""
    switch_off()
    try:
        yield
    finally:
        give_back()
