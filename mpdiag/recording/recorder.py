"""``record``: watch an ordinary FP32 training and write what its numbers were like.

::

    with mpdiag.record(model, optimizer, "runs/ssd") as recorder:
        train()

The course of a step, and who sees it::

    forward of a model        observer: activations, hooks on their tensors      (forward_began)
    backward                  observer: activation gradients                     (backward_reached)
    optimizer.step            observer: weight gradients, weights, updates       (optimizer_stepped)
    → the step ends           ledger: rows; now and then a part on disk          (end_step)

With several optimizers a step ends when all have stepped, or with the first forward pass after a step
of the busiest; with none, when a model is called again.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.errors import RunExists
from mpdiag.recording.cadence import SPARSE_EVERY, Cadence
from mpdiag.recording.closing import carry_through
from mpdiag.recording.description import describe_optimizer, describe_training
from mpdiag.recording.governor import Governor
from mpdiag.recording.grad_scaler import ScalerWatch
from mpdiag.recording.ledger import Ledger
from mpdiag.recording.lifecycle import live
from mpdiag.recording.losses import LossLog
from mpdiag.recording.observer import Observer
from mpdiag.recording.operations import OperationWatch, planned
from mpdiag.recording.ownership import is_replaced
from mpdiag.runs import provenance
from mpdiag.runs.operations import encode as encode_operations
from mpdiag.runs.run import now
from mpdiag.runs.writer import RunWriter
from mpdiag.tracing.dispatch import in_backward
from mpdiag.tracing.names import Models, Subjects, subjects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch.optim import Optimizer

    from mpdiag.files.paths import AnyPath
    from mpdiag.recording.governor import Clock

logger = logging.getLogger("mpdiag")

Adopted = tuple[torch.nn.Module, torch.nn.Module | None]
_MAX_FAILURES = 20
WORD_SECONDS = 5.0
"""Of several ranks each writes what it has at least this often."""


class Recorder:
    """A recording in progress; made by ``mpdiag.record``.

    Attributes:
        folder: The run folder.
        step: Number of the present step.
        steps_recorded: Steps recorded so far.
        failures: What went wrong while recording, if anything: dicts of step, where and error.
    """

    def __init__(
        self,
        model: Models | Subjects,
        optimizers: list[Optimizer],
        folder: AnyPath,
        cadence: Cadence,
        include: str | None = None,
        exclude: str | None = None,
        overwrite: bool = False,
        script: str | None = None,
        operations: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.folder = folder
        self._script = script
        self.step = 0
        self.steps_recorded = 0
        self.failures: list[dict[str, Any]] = []
        self._subjects: Subjects = (
            model if isinstance(model, Subjects) else subjects(model, include, exclude)
        )
        self._optimizers = optimizers
        self._cadence = cadence
        self._filters = {"include": include, "exclude": exclude}
        self._rank, self._world = provenance.ranks()
        self._operations = operations
        self._operation_steps: list[int] = []
        self._operation_reason = ""
        self._state = "recording"
        self._created = now()
        self._writer: RunWriter | None = None
        self._observer: Observer | None = None
        self._scalers = ScalerWatch(self, optimizers)
        self._losses = LossLog(folder, self._quietly, self.failed, active=self._rank == 0)
        self._counts = {id(o): 0 for o in optimizers}
        self._scale: Any = 1.0
        self._skipped: Any = False
        self._backwards: set[int] = set()
        self._accumulating = False
        self._ending = False
        self._looked_for_scalers = False
        self._begun_forwards = 0
        self._written_at = time.monotonic()
        self._table: list[dict[str, Any]] | None = None  # of modules, as it was written last
        budget = cadence.budget if cadence.every is None else None
        self._governor = Governor(budget, SPARSE_EVERY, clock)
        try:
            self._writer = RunWriter(
                folder, rank=self._rank, world_size=self._world, overwrite=overwrite
            )
        except OSError as error:
            self.failed("opening the run folder", error)

    # -- life --------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:  # noqa: PYI034 - typing.Self is Python 3.11's
        """Start recording."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop recording; an exception of the training passes through, and the run stays good."""
        if kind is None or (kind is SystemExit and not getattr(error, "code", None)):
            self.close()
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def start(self) -> Recorder:
        """Place the hooks and write the first ``meta.json``."""
        if self._writer is None or self._observer is not None or self._state != "recording":
            return self
        ledger = Ledger(self._writer)
        self._observer = Observer(self._subjects, self._optimizers, ledger, self, self._governor)
        self._observer.operations = self._watch_operations()
        try:
            self._observer.attach()
            self._scalers.find()
            self._begin_step()
            self._write_meta()
            self._losses.attach()
        except RunExists:  # another process began here since: nothing of its run may be touched
            self._writer = None
            self._stop_observing()
            raise
        except KeyboardInterrupt:  # no ``with`` block has been entered that would close this
            self.close("interrupted")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._stop("starting", error)
        live.add(self)
        return self

    def close(self, state: str = "complete") -> None:
        """Stop recording and finish the run folder; doing so twice does no harm.

        A Ctrl-C that falls into it is raised when the folder is finished.
        """
        observer = self._observer
        if observer is not None:
            carry_through(lambda again: self._close(observer, state, again=again))

    def _close(self, observer: Observer, state: str, *, again: bool) -> None:
        """Do it; ``again`` if it was interrupted somewhere before."""
        # A step that was not ended counts if a backward ran in it (there may be no optimizer), unless
        # it was broken off: then it may be half of one.
        if (state != "complete" and not observer.step_due) or again:
            observer.ledger.drop_step()
        elif observer.step_due or (
            observer.recording and (self._backwards or observer.ledger.has("weight_grad"))
        ):
            self.end_step()
        self._observer = None
        if observer.operations is not None:
            observer.operations.begin(self.step, wanted=False)
        observer.detach()
        self._scalers.release()
        self._losses.detach()
        live.discard(self)
        if self._state == "recording":  # and did not have to stop before the training did
            self._state = state
        try:
            self._check_ownership(observer)
            observer.ledger.flush()
            self._losses.close()
        except Exception as error:  # noqa: BLE001 - Ctrl-C may have come in the midst of a count
            self.failed("writing the last statistics", error)
        try:
            if self._writer is not None:
                self._writer.sweep()
            self._write_meta(observer.ledger)
        except Exception as error:  # noqa: BLE001
            self.failed("finishing the run folder", error)
        if self._governor.changes:
            logger.warning("recording into %s: %s", self.folder, self._governor.words())

    def log_metric(self, name: str, value: float, *, higher_is_better: bool = True) -> None:
        """Write a figure of merit into the run, for ``mpdiag compare``; also after recording."""
        self._losses.note_metric(name, float(value), higher_is_better=higher_is_better)

    def adopt(self, models: Mapping[str, Adopted], optimizers: Sequence[Optimizer]) -> None:
        """Watch further models and optimizers from now on, in the midst of a training.

        Args:
            models: By the prefix of their names; each the model and what is wrapped around it.
            optimizers: Optimizers that are not watched yet.
        """
        observer = self._observer
        if observer is None:
            return
        try:
            for prefix, (model, wrapper) in models.items():
                self._subjects.adopt(prefix, model, wrapper)
            for optimizer in optimizers:
                self._counts[id(optimizer)] = self.step
            self._optimizers.extend(optimizers)
            self._scalers.adopt(optimizers)
            self._looked_for_scalers = False
            observer.adopt([model for model, _ in models.values()], optimizers)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.failed("watching another model", error)

    def name_models(self, names: Mapping[int, str]) -> None:
        """Note what a script calls its models: names by ``id`` of the model."""
        self._subjects.name_models(names)

    def forgo_operations(self, reason: str) -> None:
        """Record no operations from now on; those of earlier steps stay, and so does the reason."""
        if self._operations == 0:
            return
        self._operations, self._operation_reason = 0, reason
        observer = self._observer
        if observer is not None and observer.operations is not None:
            observer.operations.begin(self.step, wanted=False)
            observer.operations = None

    def enter(self, module: torch.nn.Module) -> None:
        """Let calls of a part of a model count as forward passes: its loop calls it alone."""
        if self._observer is not None:
            self._observer.enter(module)

    def call_began(self, module: torch.nn.Module, args: Any) -> None:
        """A module is being called, and the hook that would tell of it came too late."""
        if self._observer is not None:
            self._observer.before_forward(module, args)

    # -- the course of training (called by the observer) -------------------------------------------

    def forward_began(self) -> None:
        """With no optimizer to tell, a new forward pass of the model begins a new step."""
        if not self._optimizers and (self._backwards or self._begun_forwards):
            self.end_step()
        self._begun_forwards += 1

    def backward_reached(self) -> None:
        """A gradient arrived in the present step."""
        observer = self._observer
        if observer is not None:
            self._backwards.add(observer.micro)
        if not self._looked_for_scalers and self._optimizers:
            # By now a scaler of this loop exists, and its ``step`` is still to come.
            self._looked_for_scalers = True
            self._scalers.find()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer stepped, or a scaler skipped its step."""
        self._scalers.optimizer_stepped(optimizer)
        self._note_fused_scale(optimizer)
        self._counts[id(optimizer)] += 1
        if self._counts[id(optimizer)] <= self.step + (1 if self._ending else 0):
            return
        if in_backward():  # an optimizer in backward: the others of this step are still to come
            if not self._ending:
                self._ending = True
                torch.autograd.Variable._execution_engine.queue_callback(self.end_step)
            return
        observer = self._observer
        if observer is not None and any(n <= self.step for n in self._counts.values()):
            observer.step_due = True  # others may step yet; the next forward pass tells
            return
        self.end_step()

    def forward_after_step(self) -> None:
        """A forward pass begins, and the busiest optimizer has stepped since the last one."""
        self.end_step()

    def scaled_step_began(self, scale: torch.Tensor | None) -> None:
        """A GradScaler is about to step: the gradients of this step carry its scale."""
        if scale is not None:
            self._scale = scale

    def scaled_step_skipped(self, optimizer: Optimizer) -> None:
        """A GradScaler found an overflow and skipped the optimizer."""
        self._skipped = True
        self.optimizer_stepped(optimizer)

    def _note_fused_scale(self, optimizer: Optimizer) -> None:
        """A fused optimizer unscales inside ``step``, and skips there, too."""
        scale = getattr(optimizer, "grad_scale", None)
        observer = self._observer
        if scale is None or observer is None or not observer.recording:
            return
        observer.ledger.set_scale("weight_grad", self._scale)
        found = getattr(optimizer, "found_inf", None)
        if found is not None:
            self._skipped = found.detach().clone()

    def end_step(self) -> None:
        """End the present step and begin the next; for loops the recorder cannot see through."""
        observer = self._observer
        if observer is None:
            return
        watch, recorded = observer.operations, observer.recording
        ordinary = watch is None or not watch.wanted
        with self._governor:
            self._finish_step(observer)
        self._governor.step_ended(
            self.step, recorded=recorded, ordinary=ordinary, waits=observer.ledger.on_host
        )

    def _finish_step(self, observer: Observer) -> None:
        self._ending = False
        self._end_operations(observer)
        recorded = observer.recording
        try:
            if recorded:
                self._close_books(observer)
        except Exception as error:  # noqa: BLE001
            self._stop("ending a step", error)
        alone = len(self._optimizers) <= 1
        self._losses.step_ended(self.step, self._scale, self._skipped, alone=alone)
        self.step += 1
        self._begin_step()
        try:
            if (recorded or self._losses.due) and observer.active:
                self._write_what_is_due(observer)
        except OSError as error:
            self._stop("writing the run folder", error)
        except Exception as error:  # noqa: BLE001
            self._stop("ending a step", error)

    def _close_books(self, observer: Observer) -> None:
        """What the ledger must know before the step's number is used up."""
        if not self._optimizers or self.steps_recorded == 0:
            observer.note_weights()
        if observer.ledger.close_step(self.step, self._scale, self._skipped):
            self.steps_recorded += 1
        self._accumulating = len(self._backwards) > 1

    def silence(self) -> None:
        """Do nothing any more, and write nothing: this process is a copy of the one that records."""
        observer, self._observer = self._observer, None
        self._losses.forget()
        if observer is not None:
            observer.active = observer.recording = False
            if observer.operations is not None:
                observer.operations.silence()

    def _write_what_is_due(self, observer: Observer) -> None:
        if observer.ledger.due or self._losses.due or self._silent_for_long():
            self._check_ownership(observer)
            observer.ledger.flush()
            self._losses.flush()
            self._write_meta(observer.ledger)
        else:
            observer.ledger.drain()

    def _quietly(self) -> AbstractContextManager[None]:
        """Around operations of our own."""
        watch = self._observer.operations if self._observer is not None else None
        return watch.quiet() if watch is not None else nullcontext()

    def _check_ownership(self, observer: Observer) -> None:
        """Nothing is written into a run that another process has begun here since.

        Raises:
            RunExists: If one has; all that waits for the disk is forgotten.
        """
        writer = self._writer
        if writer is None or not is_replaced(writer.folder, writer.rank, self._created):
            return
        self._writer = None
        observer.ledger.forget()
        self._losses.forget()
        message = f"another process has replaced the run in {self.folder}"
        raise RunExists(message)

    def _silent_for_long(self) -> bool:
        """One of several processes may be killed any time: its last word must not be old."""
        return self._world > 1 and time.monotonic() - self._written_at > WORD_SECONDS

    def _watch_operations(self) -> OperationWatch | None:
        """What records operations, unless nobody wants them, or a compiler has taken them over."""
        if self._operations == 0:
            return None
        compiled = [n.name for n in self._subjects.modules.values() if n.reason is not None]
        if compiled:
            self._operation_reason = "the model is compiled: record the eager one"
            return None
        names = self._subjects.names
        return OperationWatch(names, names, self._rank, self.failed)

    def _end_operations(self, observer: Observer) -> None:
        """Write the operations of the step, if they were recorded."""
        watch = observer.operations
        if watch is None or not watch.wanted:
            return
        try:
            found = watch.end()
            if any(o.phase == "backward" for o in found) and self._writer is not None:
                self._writer.append_operations(encode_operations(found))
                self._operation_steps.append(self.step)
        except Exception as error:  # noqa: BLE001 - training goes on, and so does the recording
            self.failed("writing operations", error)

    def _begin_step(self) -> None:
        self._backwards = set()
        self._begun_forwards = 0
        self._scale, self._skipped = 1.0, False
        if self._observer is not None:
            wanted = self._cadence.records(self.step, self.steps_recorded, self._governor.thin)
            wanted = wanted and self._observer.active
            self._observer.begin_step(self.step, wanted, self._accumulating)
            if self._observer.operations is not None:
                due = planned(self._operations, len(self._operation_steps), self.step)
                self._observer.operations.begin(self.step, wanted and due)

    # -- trouble -----------------------------------------------------------------------------------

    def failed(self, where: str, error: Exception) -> None:
        """Note a failure; the first one is said aloud. Memory running out ends the recording."""
        first = not self.failures
        if len(self.failures) < _MAX_FAILURES:
            text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            self.failures.append({"step": self.step, "where": where, "error": text})
        if first:
            _say(
                f"recording into {self.folder} failed at step {self.step} in {where} "
                f"({self.failures[0]['error']}); training goes on, the record is incomplete"
            )
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) and self._observer is not None:
            self._observer.ledger.drop_step()
            self._observer.active = self._observer.recording = False

    def _stop(self, where: str, error: Exception) -> None:
        """Give up recording for good."""
        self.failed(where, error)
        self._state = "failed"
        self._stop_observing()

    def _stop_observing(self) -> None:
        self._losses.forget()
        if self._observer is not None:
            self._observer.ledger.drop_step()
            self._observer.detach()
            self._scalers.release()

    # -- meta.json ---------------------------------------------------------------------------------

    def _write_meta(self, ledger: Ledger | None = None) -> None:
        if self._writer is None:
            return
        self._written_at = time.monotonic()
        rows = list(self._subjects.rows())
        self._writer.write_meta(
            {
                **describe_training(self._subjects.roots),
                "state": self._state,
                "created": self._created,
                "updated": now(),
                "rank": self._rank,
                "world_size": self._world,
                "script": self._script,
                "optimizers": [describe_optimizer(o) for o in self._optimizers],
                "cadence": {
                    "every": self._cadence.every,
                    "max_steps": self._cadence.max_steps,
                    **self._governor.to_json(),
                    **self._filters,
                },
                "steps_seen": self.step,
                "steps_recorded": ledger.steps_written if ledger is not None else 0,
                "rows": ledger.rows_written if ledger is not None else 0,
                "operations": {
                    "steps": self._operation_steps,
                    "reason": self._operation_reason,
                },
                "coverage": self._subjects.coverage(rows),
                "failures": self.failures,
                "verdict": None,
            }
        )
        if rows != self._table:
            self._writer.write_modules(rows)
            self._table = rows


def _say(message: str) -> None:
    """Warn once, in whatever way gets through: a warning turned into an error must not escape."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        print(f"mpdiag: {message}", file=sys.stderr)
