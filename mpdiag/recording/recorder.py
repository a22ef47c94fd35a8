"""``mpdiag.record``: watch an ordinary FP32 training and write what its numbers were like.

::

    with mpdiag.record(model, optimizer, "runs/ssd") as recorder:
        train()

The recorder puts the parts together, starts them and ends them::

    observer, weights       hooks: count tensors into the ledger, tell the clock what happens
    step clock              decides when a step begins and ends, and tells all others
    scalers, operations     the loss scale of a step; every operation of a few steps
    run folder              closes the ledger's step, writes what is due
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from mpdiag.errors import RunExists, UsageError
from mpdiag.files.paths import AnyPath, place
from mpdiag.recording.cadence import (
    BUDGET,
    SPARSE_EVERY,
    Cadence,
    GovernedPace,
    Governor,
    OperationSteps,
    Seconds,
)
from mpdiag.recording.contract import ContractWatch, optimizers_of
from mpdiag.recording.failures import Failures, HookGuard
from mpdiag.recording.grad_scaler import ScalerWatch
from mpdiag.recording.growth import LayerGrowth
from mpdiag.recording.ledger import Ledger
from mpdiag.recording.lifecycle import carry_through, live
from mpdiag.recording.losses import LossLog
from mpdiag.recording.observer import Observer
from mpdiag.recording.operations import OperationWatch
from mpdiag.recording.run_folder import Audience, Described, RecordingOptions, RunFolder
from mpdiag.recording.state_shadow import StateShadow
from mpdiag.recording.step_clock import StepClock
from mpdiag.recording.value_watch import ValueWatch
from mpdiag.recording.weights import CopiedParameters, WeightCopies, WeightObserver
from mpdiag.runs import provenance
from mpdiag.runs.writer import RunWriter
from mpdiag.tracing.dispatch import after_backward, in_backward
from mpdiag.tracing.dtype_setters import DtypeSetters
from mpdiag.tracing.fp32_only import Fp32Only
from mpdiag.tracing.names import Models, Subjects, subjects
from mpdiag.tracing.precision import PrecisionWatch

logger = logging.getLogger("mpdiag")

Adopted = tuple[torch.nn.Module, torch.nn.Module | None]
Optimizers = Optimizer | Sequence[Optimizer] | None


def record(
    model: Models,
    optimizer: Optimizers,
    run: str | os.PathLike[str],
    *,
    every: int | None = None,
    include: str | None = None,
    exclude: str | None = None,
    max_steps: int | None = None,
    budget: float | None = BUDGET,
    operations: int | None = None,
    overwrite: bool = False,
    fp32: bool = False,
    copy_budget: int | None = None,
) -> Recorder:
    """Record a training; use it as a context manager around the loop.

    Recorded per step: activations and activation gradients of every module, and weights, weight
    gradients and weight updates of every parameter, each as a histogram of powers of two. Losses,
    weights and random state stay bit for bit what they are without it.

    Args:
        model: A module, a list of modules, or a mapping of names to modules.
        optimizer: The optimizer, a list of them, or None where there is none.
        run: The run folder to write, a path or a URL that fsspec knows.
        every: Record each step divisible by this; default: the first 20 to 200 (see ``budget``),
            then one in each 20, and 20 more from where an optimizer joins, steps first or is given
            parameters.
        include: Regular expression: record only modules and parameters whose name it matches.
        exclude: Regular expression: leave out those whose name it matches.
        max_steps: Record so many steps, then let training go on alone.
        budget: Share of step time that recording may take. The recorder measures itself. It records
            all of the first 200 steps while it takes less. Once it has cost 10 seconds after the
            first step it records 2, 4, 8 … times fewer steps if it takes more. With None, or with
            ``every``, it does neither.
        operations: In how many steps to record every operation too: what it reads and writes, its
            module, its line of code. Default: in steps 0, 10 and 100, then in 125, 157 … (each a
            quarter later), and when a layer's largest output has passed four times what it was, as
            long as the budget allows it. A number records the first ones of these steps whatever they
            cost; 0 records none. Where several optimizers step one at a time, so many of each, and
            the first step from where one joins. Of a closure, its first evaluation is recorded.
        overwrite: Replace a run that lies in the folder already.
        fp32: Record in FP32: switch the training's own ``torch.autocast`` and FSDP's policy off, and
            convert its half-precision weights, inputs and optimizer states. Weights and states get
            their dtype back when recording stops; FSDP's policy does not. Without it the recording
            of a half-precision training says that it is not of FP32.
        copy_budget: Bytes that copies of weights from before a step may take on a device; default: a
            quarter of what is free there at the first recorded step. Of parameters whose copies do not
            fit, the updates of the same blocks are recorded in each step, and the rows say so.

    Raises:
        UsageError: If an argument makes no sense.
        RunExists: If the folder holds a run and ``overwrite`` is False.
    """
    optimizers = optimizers_of(optimizer)
    cadence = Cadence(every, max_steps, budget)
    if operations is not None and (type(operations) is not int or operations < 0):
        raise UsageError(f"operations must be a number of steps, 0 or more, not {operations!r}")
    only = Fp32Only(logger.info) if fp32 else None
    return Recorder(
        model,
        optimizers,
        place(run),
        RecordingOptions(cadence, include, exclude, overwrite, operations),
        precision=PrecisionWatch(off=fp32, only=dict if only is None else only.to_json),
        fp32=only,
        copies=WeightCopies(copy_budget),
    )


def _warn_of_no_start(folder: AnyPath) -> None:
    logger.warning(
        "nothing was recorded into %s, because the recorder was never started: write `with "
        "mpdiag.record(...):` around the training loop",
        folder,
    )


class Recorder:
    """A recording in progress; made by ``mpdiag.record``.

    Args:
        model: What to record.
        optimizers: The optimizers that step it.
        folder: The run folder.
        options: What is asked of it.
        precision: Notes what is not FP32.
        fp32: Keeps the training in FP32 while it is recorded.
        setters: Notes who gives parameters their dtype; default: from the start of recording on.
        copies: How parameters are copied before a step.
        clock: Seconds, monotonic.

    Attributes:
        folder: The run folder.
    """

    def __init__(
        self,
        model: Models | Subjects,
        optimizers: list[Optimizer],
        folder: AnyPath,
        options: RecordingOptions,
        *,
        precision: PrecisionWatch | None = None,
        fp32: Fp32Only | None = None,
        setters: DtypeSetters | None = None,
        copies: WeightCopies | None = None,
        clock: Seconds = time.perf_counter,
    ) -> None:
        rank, world = provenance.ranks()
        self.folder = folder
        self._fp32 = fp32
        self._setters = setters or DtypeSetters()
        self._subjects: Subjects = (
            model
            if isinstance(model, Subjects)
            else subjects(model, options.include, options.exclude)
        )
        self._optimizers = optimizers
        self._clock = StepClock(optimizers, in_backward, after_backward)
        self._failures = Failures(folder, self._clock)
        failed = self._failures.note
        names = self._subjects.names
        watch = OperationWatch(names, names, rank, failed)
        self._losses = LossLog(
            folder, self._clock, optimizers, watch.quiet, failed, active=rank == 0
        )
        self._parts: _Parts | None = None
        self._unstarted: weakref.finalize[..., Recorder] | None = None
        precision = precision or PrecisionWatch()
        precision.say = precision.say or self._warn_of_autocast
        precision.tell = precision.tell or logger.info
        try:
            writer = RunWriter(folder, rank=rank, world_size=world, overwrite=options.overwrite)
        except OSError as error:
            failed("opening the run folder", error)
            return
        budget = options.cadence.budget if options.cadence.every is None else None
        governor = Governor(budget, SPARSE_EVERY, clock)
        growth = LayerGrowth()
        steps = OperationSteps(
            watch,
            options.operations,
            writer,
            failed,
            optimizers,
            governor=governor,
            growth=growth,
            exact=world == 1,
        )
        described = Described(
            options, self._subjects, optimizers, world, governor, steps, precision
        )
        ledger = Ledger(writer, growth)
        self._parts = self._assembled(writer, described, watch, ledger, copies or WeightCopies())
        self._unstarted = weakref.finalize(self, _warn_of_no_start, folder)

    def _assembled(
        self,
        writer: RunWriter,
        described: Described,
        watch: OperationWatch,
        ledger: Ledger,
        copies: WeightCopies,
    ) -> _Parts:
        governor, operations = described.governor, described.operations
        about, optimizers, clock = self._subjects, self._optimizers, self._clock
        guard = HookGuard(clock, governor, watch, self._failures)
        copied = CopiedParameters()
        scalers = ScalerWatch(clock, ledger, optimizers)
        weights = WeightObserver(about, optimizers, copied, ledger, clock, watch, guard, copies)
        observer = Observer(about, copied, ledger, clock, watch, described.precision, guard)
        shadow = StateShadow(optimizers, self._failures.note)
        values = ValueWatch(about, optimizers, self._failures.note)
        contract = ContractWatch(
            about,
            optimizers,
            copied.wrappers,
            described.world,
            shadow,
            values,
            described.precision,
            self._failures.note,
            self._setters.of,
        )
        folder = RunFolder(
            writer, ledger, self._losses, scalers, clock, self._failures, described, contract
        )
        # A step's operations are written before anything of ours may count as one, and the folder,
        # which closes the ledger's step, comes last.
        clock.attach(
            (scalers, operations, weights, observer, shadow, values, contract, folder),
            GovernedPace(described.options.cadence, governor, ledger, operations),
        )
        return _Parts(
            governor, ledger, watch, operations, scalers, copied, weights, observer, folder
        )

    @property
    def step(self) -> int:
        """Number of the present step."""
        return self._clock.number

    @property
    def steps_recorded(self) -> int:
        """Steps recorded so far."""
        return 0 if self._parts is None else self._parts.ledger.steps_closed

    @property
    def optimizer_steps(self) -> list[tuple[str, int]]:
        """The type of each optimizer, and how often it has stepped."""
        return [(type(o).__name__, self._clock.steps_of(o).taken) for o in self._optimizers]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """What went wrong while recording, if anything: dicts of step, where and error."""
        return self._failures.found

    # -- life --------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:  # noqa: PYI034 - typing.Self is Python 3.11's
        """Start recording; see ``start``."""
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

    def start(self, missed: int = 0) -> Recorder:
        """Place the hooks and write the first ``meta.json``.

        Args:
            missed: Steps that took place before; they are counted as seen.
        """
        parts = self._parts
        if parts is None or self._clock.running or parts.folder.state != "recording":
            return self
        self._forget_start()
        if not (self._subjects.modules or self._subjects.parameters):
            logger.warning("recording into %s: %s", self.folder, self._subjects.nothing_chosen())
        if any(n.reason is not None for n in self._subjects.modules.values()):
            parts.operations.refuse("the model is compiled: record the eager one")
        try:
            self._setters.attach()
            if self._fp32 is not None:
                self._fp32.attach()
                self._fp32.settle(self._subjects.roots, self._optimizers, lasting=False)
            self._clock.start(missed)
            parts.ledger.prepare(
                p.device for root in self._subjects.roots for p in root.parameters()
            )
            parts.copied.search(self._subjects.roots)
            parts.weights.attach()
            parts.observer.attach()
            parts.scalers.find()
            self._clock.begin()
            parts.folder.write_meta()
            self._losses.attach()
        except RunExists:  # another process began here since: nothing of its run may be touched
            parts.folder.disown()
            self._clock.stop()
            raise
        except KeyboardInterrupt:  # no ``with`` block has been entered that would close this
            self.close("interrupted")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            parts.folder.give_up("starting", error)
        live.add(self)
        return self

    def close(self, state: str = "complete") -> None:
        """Stop recording and finish the run folder; doing so twice does no harm.

        A Ctrl-C that falls into it is raised when the folder is finished.
        """
        parts = self._parts
        if parts is not None and self._clock.running:
            carry_through(lambda again: self._close(parts, state, again=again))

    def _close(self, parts: _Parts, state: str, *, again: bool) -> None:
        """Close; ``again`` if it was interrupted somewhere before."""
        clock, ledger = self._clock, parts.ledger
        # A step that has not ended counts if a backward ran in it (there may be no optimizer), unless
        # it was broken off: then it may be half of one.
        if (state != "complete" and not clock.due) or again:
            ledger.drop_step()
        elif clock.due or clock.trained or (clock.recording and ledger.has("weight_grad")):
            clock.end_step()
        clock.close()
        clock.stop()
        self._losses.detach()
        live.discard(self)
        parts.folder.finish(state)
        if self._fp32 is not None:
            self._fp32.detach()
        self._setters.detach()
        clock.release()
        if parts.governor.changes:
            logger.warning("recording into %s: %s", self.folder, parts.governor.words())

    def rescue(self) -> None:
        """Close from another thread, while that of the training waits in a call of torch.

        What was read from a device is written first: the device may wait for other ranks for ever.
        """
        parts = self._parts
        if parts is None or not self._clock.running:
            return
        # The training's thread is in our code, and may be writing.
        while parts.governor.is_measuring:
            time.sleep(0.01)
        parts.ledger.write()
        self._close(parts, "interrupted", again=False)

    def silence(self) -> None:
        """Do nothing any more, and write nothing: this process is a copy of the one that records."""
        self._forget_start()
        self._clock.mute()
        self._clock.close()
        self._losses.forget()
        if self._parts is not None:
            self._parts.watch.silence()

    def _forget_start(self) -> None:
        """Say nothing of a recording that was never started: it was, or it is not ours to start."""
        if self._unstarted is not None:
            self._unstarted.detach()

    def _warn_of_autocast(self, dtype: str) -> None:
        logger.warning(
            "recording into %s: the training's own autocast is on (%s), so this does not record "
            "FP32 training; pass fp32=True to switch it off",
            self.folder,
            dtype,
        )

    # -- what a caller may say ---------------------------------------------------------------------

    def end_step(self) -> None:
        """End the present step and begin the next; for loops the recorder cannot see through."""
        self._clock.end_step()

    def log_metric(self, name: str, value: float, *, higher_is_better: bool = True) -> None:
        """Write a figure of merit into the run, for ``mpdiag compare``; also after recording."""
        self._losses.note_metric(name, float(value), higher_is_better=higher_is_better)

    def adopt(self, models: Mapping[str, Adopted], optimizers: Sequence[Optimizer]) -> None:
        """Record further models and optimizers from now on, while a training is under way.

        Args:
            models: By the prefix of their names; each the model and what is wrapped around it.
            optimizers: Optimizers that are not watched yet.
        """
        parts = self._parts
        if parts is None or not self._clock.running:
            return
        try:
            for prefix, (model, wrapper) in models.items():
                self._subjects.adopt(prefix, model, wrapper)
            self._optimizers.extend(optimizers)
            parts.scalers.adopt(optimizers)
            roots = [model for model, _ in models.values()]
            parts.observer.adopt(roots)
            parts.copied.search(roots)
            parts.weights.adopt(roots, optimizers)
            self._clock.adopt(optimizers)  # which may begin the step again, recorded
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._failures.note("watching another model", error)

    def name_models(self, names: Mapping[int, str]) -> None:
        """Note what a script calls its models: names by ``id`` of the model."""
        self._subjects.name_models(names)

    def show_to(self, audience: Audience) -> None:
        """Show somebody how the recording goes on, between two steps, as often as it asks for it."""
        if self._parts is not None:
            self._parts.ledger.take_encoded()
            self._parts.folder.audience = audience

    def forgo_operations(self, reason: str) -> None:
        """Record no operations from now on; those of earlier steps stay, and so does the reason."""
        if self._parts is not None:
            self._parts.operations.forgo(reason)

    def enter(self, module: torch.nn.Module) -> None:
        """Let calls of a part of a model count as forward passes: its loop calls it alone."""
        if self._parts is not None and self._clock.running:
            self._parts.observer.enter(module)

    def call_began(self, module: torch.nn.Module, args: Any) -> None:
        """A module is being called, and its forward hook was placed too late to say so."""
        if self._parts is not None and self._clock.running:
            self._parts.observer.before_forward(module, args)


@dataclass(frozen=True, eq=False)
class _Parts:
    """The parts of a recording that has a run folder to write."""

    governor: Governor
    ledger: Ledger
    watch: OperationWatch
    operations: OperationSteps
    scalers: ScalerWatch
    copied: CopiedParameters
    weights: WeightObserver
    observer: Observer
    folder: RunFolder
