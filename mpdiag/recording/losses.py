"""The losses of a recorded training, so that ``mpdiag compare`` has an FP32 side.

No hook of torch tells of a loss: it belongs to no module. What a loop differentiates is what it
passes to ``torch.autograd.backward``, which every ``loss.backward()`` calls; so that one function is
wrapped while a recording runs, and given back afterwards.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.recording.modes import in_backward, is_traced
from mpdiag.training_log import FILE, LogWriter, Metric, TrainingStep, announce

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_WAITING = 256
"""So many losses may wait on a device; reading them is one transfer."""

_told: list[Callable[[torch.Tensor], None]] = []
_taken: list[tuple[Any, Any]] = []  # torch's own function, and ours that stands in its place


class LossLog:
    """Writes the loss of each step into a run's ``training.jsonl``.

    A trainer by a plan that writes into the same folder keeps its own log there; this one is silent
    then.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._log = LogWriter(folder)
        self._mine = False
        self._silent = self._closed = False
        self._loss: float | torch.Tensor | None = None
        self._steps: list[tuple[int, float | torch.Tensor, Any, Any, float]] = []
        self._last: float | None = None

    def begin(self) -> None:
        """Be where this process writes its metrics."""
        announce(self)

    def note(self, loss: torch.Tensor) -> None:
        """Keep the loss of a backward pass; the last one of a step counts."""
        held = loss.detach()
        self._loss = held.item() if held.device.type == "cpu" else held.clone()

    def end_step(self, step: int, scale: Any, skipped: Any) -> None:
        """The step is over: what was noted was its loss, at that loss scale."""
        loss, self._loss = self._loss, None
        if loss is None or self._silent:
            return
        self._steps.append((step, loss, scale, skipped, time.perf_counter()))
        if len(self._steps) >= _WAITING:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        waiting, self._steps = self._steps, []
        if not waiting or self._gives_way():
            return
        for step, loss, scale, skipped, moment in _on_host(waiting):
            seconds = None if self._last is None else round(moment - self._last, 6)
            self._last = moment
            self._log.append(
                TrainingStep(step, loss / scale, scale, skipped=bool(skipped), seconds=seconds)
            )

    def note_metric(self, name: str, value: float, *, higher_is_better: bool) -> None:
        """Write a metric, also one that is known only when training is over."""
        self.flush()
        if self._gives_way():
            return
        metric = Metric(name, value, higher_is_better)
        if self._closed:
            self._log.append_after_the_end(metric)
        else:
            self._log.append(metric)

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        self._log.close()
        self._closed = True

    def forget(self) -> None:
        """Write nothing any more: the folder is not ours, or the process."""
        self._silent = True
        self._steps = []
        self._log.close()

    def _gives_way(self) -> bool:
        if not self._silent and not self._mine:
            self._silent = self._path.exists()
            self._mine = not self._silent
        return self._silent


def _on_host(steps: list[tuple[int, Any, Any, Any, float]]) -> list[tuple[Any, ...]]:
    """The same with numbers in place of tensors, which are fetched in one transfer a device."""
    held: dict[torch.device, list[torch.Tensor]] = {}
    for row in steps:
        for value in row:
            if isinstance(value, torch.Tensor):
                held.setdefault(value.device, []).append(value)
    numbers: dict[int, float] = {}
    for tensors in held.values():
        flat = torch.stack([t.reshape(()).to(torch.float64) for t in tensors]).tolist()
        numbers.update(zip(map(id, tensors), flat, strict=True))
    return [tuple(numbers.get(id(v), v) for v in row) for row in steps]


class Listening:
    """Someone is told of the loss of every backward pass that a loop begins, until ``remove``."""

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        self._tell = tell
        if not _taken or torch.autograd.backward is _taken[0][0]:
            plain = torch.autograd.backward
            _taken[:] = [(plain, _telling(plain))]
            torch.autograd.backward = _taken[0][1]
        _told.append(tell)

    def remove(self) -> None:
        """Tell them no more; the last one gives torch its function back."""
        if self._tell in _told:
            _told.remove(self._tell)
        # Whoever wrapped ours since keeps it: it passes through.
        if not _told and _taken and torch.autograd.backward is _taken[0][1]:
            torch.autograd.backward, _ = _taken.pop()


def _telling(plain: Any) -> Any:
    @functools.wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if _told and (loss := _loss_of(tensors)) is not None:
            for tell in _told:
                tell(loss)
        return plain(tensors, *args, **kwargs)

    return backward


def _loss_of(tensors: Any) -> torch.Tensor | None:
    """The scalar that a loop differentiates, if that is what it does."""
    if isinstance(tensors, (list, tuple)):
        if len(tensors) != 1:
            return None
        tensors = tensors[0]
    # A distributed tensor is read by all ranks or by none.
    if type(tensors) is not torch.Tensor or is_traced() or in_backward():
        return None
    scalar = tensors.numel() == 1 and tensors.is_floating_point() and not tensors.is_meta
    return tensors if scalar and not _by_a_plan() else None


def _by_a_plan() -> bool:
    """Whether our trainer calls: it scales the loss, and logs by itself."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith("torch."):
            return name.startswith("mpdiag.training")
        frame = frame.f_back
    return False
