"""What goes wrong while recording: noted, said once, and kept away from the training."""

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpdiag.files.paths import AnyPath
from mpdiag.recording.operations import OperationWatch
from mpdiag.recording.step_clock import StepClock
from mpdiag.tracing.capture import is_captured
from mpdiag.tracing.uncompiled import apart, hide

_MOST = 20
WRITING = "writing"
"""How the place of a failure begins by which something did not reach the disk."""


class Failures:
    """The failures of a recording.

    Args:
        folder: The run folder, for the warning.
        clock: Knows the step; muted when memory has run out.
        tell: Called with the sentence of the first failure; without it, Python warns.

    Attributes:
        found: The first 20: dicts of step, where and error.
    """

    def __init__(
        self, folder: AnyPath, clock: StepClock, tell: Callable[[str], None] | None = None
    ) -> None:
        self.found: list[dict[str, Any]] = []
        self._tell = tell or _warn
        self._folder = folder
        self._clock = clock

    @property
    def writing(self) -> bool:
        """Whether something that was recorded did not reach the disk."""
        return any(str(failure["where"]).startswith(WRITING) for failure in self.found)

    def note(self, where: str, error: Exception) -> None:
        """Note a failure and warn of the first one. Out of memory, nothing more is recorded."""
        first = not self.found
        if len(self.found) < _MOST:
            text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            self.found.append({"step": self._clock.number, "where": where, "error": text})
        if first:
            self._tell(
                f"recording into {self._folder} failed at step {self._clock.number} in {where} "
                f"({self.found[0]['error']}); training goes on, the record is incomplete"
            )
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            self._clock.mute()


def _warn(message: str) -> None:
    """Warn; where warnings are errors, which must not reach the training, print instead."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        print(f"mpdiag: {message}", file=sys.stderr)


class HookGuard:
    """What every hook needs around it.

    Args:
        clock: Says whether hooks do anything at all.
        governor: Measures what hooks cost.
        operations: Must not record what hooks compute.
        failures: Where failures are noted.
    """

    def __init__(
        self,
        clock: StepClock,
        governor: AbstractContextManager[None],
        operations: OperationWatch,
        failures: Failures,
    ) -> None:
        self.clock = clock
        self.governor = governor
        self.failures = failures
        self.lock = threading.RLock()
        self.operations = operations

    def call(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call a hook's method: alone, measured, and as no part of the training.

        Gradients are switched off by torch's own switch: a ``no_grad`` takes longer than a small
        tensor takes to be counted.
        """
        watch = self.operations
        with self.lock, self.governor, torch._C.DisableTorchFunctionSubclass():
            enabled = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
            try:
                if watch.recording:
                    with watch.quiet():
                        method(*args, **kwargs)
                else:
                    method(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(enabled)


def guarded(where: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a hook: runs only while recording is active, one at a time, and never raises.

    Nor does it run while a CUDA graph is captured; see ``dispatch.is_hidden``. A hook is a method of an
    object that has a ``guard``.
    """

    def decorate(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def hook(self: Any, *args: Any, **kwargs: Any) -> None:
            guard: HookGuard = self.guard
            if not guard.clock.active or is_captured():
                return
            try:
                apart(functools.partial(guard.call, method, self, *args, **kwargs))
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                guard.failures.note(where, error)

        hide(hook)
        return hook

    return decorate
