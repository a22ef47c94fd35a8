"""The loss of each step, beside the statistics: ``mpdiag compare`` compares later trainings with it.

``torch.autograd.backward``, which ``Tensor.backward`` calls, is wrapped while something is recorded.
Its arguments are read and passed on, and the step clock is told of the call. A step's loss is the sum
of what ``backward()`` was called on since the gradients were last cleared: what the optimizer's
gradient is the gradient of. ``mpdiag train`` notes the same. Of a closure that an optimizer evaluates
several times, the first evaluation counts. No loss is written where a trainer of ours, or another
program, writes the log. ``mpdiag.log_metric`` writes here, too. A log hears the threads of its own
training only.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from mpdiag.files.paths import AnyPath, is_remote
from mpdiag.recording.step_clock import StepClock
from mpdiag.runs.training_log import RECORDED, LogWriter, Metric, TrainingStep, announce, withdraw
from mpdiag.tracing.autograd_graph import loss_of
from mpdiag.tracing.dispatch import in_backward, is_hidden
from mpdiag.tracing.uncompiled import apart, hide

MANY = 1_000
"""Steps that wait for the disk at most."""
_TRAINERS = ("mpdiag.training.", "mpdiag.sensitivity.", "mpdiag.launching.")


@dataclass(frozen=True)
class _Waiting:
    """A step that is not on disk yet; what lies on a device is read when it is written."""

    step: int
    losses: tuple[Any, ...]  # of its backward passes
    scale: Any
    skipped: Any
    seconds: float | None

    def loss(self) -> float:
        """The sum of the losses, without the loss scale; waits for the device."""
        return sum(float(part) for part in self.losses) / float(self.scale)


class LossLog:
    """Writes ``training.jsonl`` of a recording.

    Args:
        folder: The run folder.
        clock: Told of backward passes; knows closures.
        optimizers: All of the training; the list may grow.
        quiet: A context in which operations are no part of the training.
        failed: Told what went wrong while a loss was noted; training goes on.
        active: Whether to write at all; one rank does.
    """

    def __init__(
        self,
        folder: AnyPath,
        clock: StepClock,
        optimizers: Sequence[Optimizer],
        quiet: Callable[[], AbstractContextManager[Any]],
        failed: Callable[[str, Exception], None],
        *,
        active: bool = True,
    ) -> None:
        self._writer = LogWriter(folder, failed=lambda error: failed("writing the losses", error))
        self._quiet = quiet
        self._failed = failed
        self._clock = clock
        self._optimizers = optimizers
        self._parts: list[Any] = []  # losses of the present step's backward passes
        self._complete = False  # a closure's first evaluation is over
        self._giving_way = False
        self._waiting: list[_Waiting] = []
        self._written: list[TrainingStep] = []  # the last one, for a live view
        self._ended: float | None = None
        self._size: int | None = None  # of what we wrote; None before
        self._over = not active

    @property
    def due(self) -> bool:
        """Whether enough waits to be written."""
        return len(self._waiting) >= MANY

    def attach(self) -> None:
        """Note losses, and tell of backward passes, from now on."""
        if not self._over:
            announce(self)
        with _wrapping:
            _live.append(self)
            if not getattr(torch.autograd.backward, "_mpdiag", False):
                torch.autograd.backward = _listening(torch.autograd.backward)

    def detach(self) -> None:
        """Note no more; ``backward`` is put back, unless it has been wrapped again since."""
        with _wrapping:
            if self in _live:
                _live.remove(self)
            plain = getattr(torch.autograd.backward, "_mpdiag", None)
            if plain and not _live:
                torch.autograd.backward = plain

    def hears(self) -> bool:
        """Whether a backward pass of this thread is part of the training."""
        return self._clock.hears

    def give_way(self) -> None:
        """Note no losses any more: a trainer of ours, which scales them, is at work."""
        self._giving_way = True
        self._parts = []
        withdraw(self)

    def forget(self) -> None:
        """Write nothing more: the folder, or the log in it, belongs to another program."""
        self.give_way()
        self.detach()
        self._waiting, self._over = [], True

    def backward_began(self, tensors: Any, weights: Any) -> None:
        """A backward pass begins, from these tensors with these weights; see ``torch.autograd``."""
        try:
            if self._clock.active:
                self._clock.backward_began()
            if not self._giving_way and not self._over:
                self._note(tensors, weights)
        except Exception as error:  # noqa: BLE001 - what is watched goes on
            self.give_way()
            self._failed("noting the loss", error)

    def _note(self, tensors: Any, weights: Any) -> None:
        if self._clock.evaluating and self._clock.evaluation > 1:
            return
        if self._parts and not self._holds_gradients():
            self._complete = self._clock.evaluating
            self._parts = self._parts if self._complete else []
        if not self._complete:
            with self._quiet():
                self._parts.append(loss_of(tensors, weights))

    def _holds_gradients(self) -> bool:
        """Whether a gradient of an earlier backward pass is there, to which the next one adds."""
        parameters = [p for o in self._optimizers for g in o.param_groups for p in g["params"]]
        return not parameters or any(p.grad is not None for p in parameters)

    def step_ended(self, step: int, scale: Any, skipped: Any) -> None:
        """Note that a step ended, and its loss.

        Args:
            step: Its number.
            scale: The loss scale that a GradScaler of the script has; a number or a tensor.
            skipped: Whether it skipped the step; likewise.
        """
        moment = time.perf_counter()
        seconds = None if self._ended is None else round(moment - self._ended, 6)
        self._ended = moment
        parts, self._parts, self._complete = self._parts, [], False
        if not self._over and parts and all(part is not None for part in parts):
            self._waiting.append(_Waiting(step, tuple(parts), scale, skipped, seconds))

    def note_metric(self, name: str, value: float, *, higher_is_better: bool) -> None:
        """Write a metric, also one that is known only when recording is over."""
        self.flush(keep=0)
        self._write([Metric(name, value, higher_is_better)])

    def latest(self, most: int = 50) -> list[TrainingStep]:
        """The last steps, of losses that are read without waiting for a device."""
        with self._quiet():
            known = [
                TrainingStep(w.step, w.loss(), float(w.scale))
                for w in self._waiting[-most:]
                if all(getattr(v, "is_cpu", True) for v in (*w.losses, w.scale))
            ]
        return known or self._written

    def flush(self, keep: int = 1) -> None:
        """Write what waits, except for the last step: a program with its own log notes it after us."""
        kept = max(0, len(self._waiting) - keep)
        waiting, self._waiting = self._waiting[:kept], self._waiting[kept:]
        entries = [
            TrainingStep(w.step, w.loss(), float(w.scale), bool(w.skipped), seconds=w.seconds)
            for w in waiting
        ]
        self._written = entries[-1:] or self._written
        self._write(entries)

    def _write(self, entries: Sequence[TrainingStep | Metric]) -> None:
        if self._over or not entries:
            return
        if self._is_anothers():
            self.forget()
            return
        if self._size is None:
            self._writer.append(dict(RECORDED))
        for entry in entries:
            self._writer.append(entry)
        self._writer.close()  # a recording that nobody closes leaves no file open
        path = self._writer.path
        self._size = path.stat().st_size if not is_remote(path) and path.exists() else 0

    def _is_anothers(self) -> bool:
        """Whether the log holds lines that we did not write."""
        path = self._writer.path
        if self._size is None:
            return path.exists()
        return not is_remote(path) and path.exists() and path.stat().st_size != self._size

    def close(self) -> None:
        """Note no more losses, and write those that wait."""
        self.detach()
        self.flush(keep=0)
        self._optimizers = ()  # a metric may be logged long after the models are gone


_live: list[LossLog] = []
_wrapping = threading.Lock()


def _listening(plain: Any) -> Any:
    @functools.wraps(plain)
    def backward(*args: Any, **options: Any) -> Any:
        if _live and not is_hidden() and not in_backward():
            apart(_tell, args, options, sys._getframe(1))
        return plain(*args, **options)

    hide(backward)
    backward._mpdiag = plain  # type: ignore[attr-defined]
    return backward


def _tell(args: tuple[Any, ...], options: dict[str, Any], caller: Any) -> None:
    ours = _from_a_trainer(caller)
    tensors = args[0] if args else options.get("tensors")
    weights = args[1] if len(args) > 1 else options.get("grad_tensors")
    for log in [log for log in _live.copy() if log.hears()]:
        if ours:
            log.give_way()
        log.backward_began(tensors, weights)


def _from_a_trainer(frame: Any) -> bool:
    """Whether a trainer of ours calls, whose losses are scaled; ``Tensor.backward`` may lie between."""
    if frame.f_globals.get("__name__") == "torch._tensor":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(_TRAINERS)
