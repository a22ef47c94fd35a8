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

from mpdiag.display.wording import counted
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
from mpdiag.recording.compiled import NO_OPERATIONS
from mpdiag.recording.contract import ContractWatch, optimizers_of
from mpdiag.recording.failures import Failures, HookGuard
from mpdiag.recording.grad_scaler import ScalerWatch
from mpdiag.recording.gradient_sums import GradientSums
from mpdiag.recording.growth import LayerGrowth
from mpdiag.recording.ledger import Ledger
from mpdiag.recording.lifecycle import carry_through, live
from mpdiag.recording.losses import LossLog
from mpdiag.recording.matrix_products import MatrixProducts
from mpdiag.recording.observer import Observer
from mpdiag.recording.operations import OperationWatch
from mpdiag.recording.run_folder import Audience, Described, RecordingOptions, RunFolder
from mpdiag.recording.state_shadow import StateShadow
from mpdiag.recording.step_clock import StepClock
from mpdiag.recording.step_tap import StepTap
from mpdiag.recording.trace import TraceWatch, checked
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
    run: str | os.PathLike[str] = "",
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
    blocks: bool = False,
    trace: bool | Sequence[int] = False,
) -> "Recorder":
    """Record a training; use it as a context manager around the loop.

    Each recorded step holds the activations and activation gradients of every module, and the
    weights, weight gradients and weight updates of every parameter. Each of these is a histogram of
    powers of two. Recording does not change losses, weights or random state by a single bit.

    Args:
        model: A module, a list of modules, or a mapping of names to modules.
        optimizer: The optimizer, a list of optimizers, or None without an optimizer.
        run: The run folder to write: a path, or a URL that fsspec supports.
        every: Record every N-th step. Default: the first 20 to 200 steps (see ``budget``), then one
            step in 20. When an optimizer joins, first steps or gets parameters, 20 steps more.
        include: A regular expression: record only modules and parameters with a matching name.
        exclude: A regular expression: leave out modules and parameters with a matching name.
        max_steps: Stop recording after this many recorded steps; training continues.
        budget: The share of step time that recording may take. The recorder measures itself: it
            records all of the first 200 steps while it stays within the budget. If recording has cost
            10 seconds after the first step and exceeds the budget, it records 2, 4, 8 … times fewer
            steps. With None, or with ``every``, recording does not adapt.
        operations: In how many steps to record every operation too, with its inputs and outputs, its
            module and its line of code. Default: steps 0, 10, 100, 125, 157 … (each a quarter later),
            and steps in which a layer's largest output, the number of its outputs or of zeros among
            them has grown fourfold, within the budget. A number records the first of these steps at
            any cost; 0 records none. If several optimizers step in turn, this many steps of each, and
            the first step after one joins. Only the first evaluation of a closure is recorded.
        overwrite: Replace a run that is already in the folder.
        fp32: Record in FP32: switch the training's own ``torch.autocast`` and FSDP's policy off, and
            convert its half-precision weights, inputs and optimizer states. Weights and states get
            their dtype back when recording stops; FSDP's policy does not. Without it the recording
            of a half-precision training says that it is not of FP32.
        copy_budget: Bytes per device for copies of weights from before a step. Default: a quarter of
            the memory that is free at the first recorded step. If a parameter's copy does not fit,
            updates of the same blocks of it are recorded in each step, and its rows say so.
        blocks: Record the operands of matrix products, too, in steps with recorded operations:
            what MXFP8, MXFP4, NVFP4 and FP8 with block scales would make of them.
        trace: Record values at fixed positions for ``mpdiag diff`` in these steps; True means steps 0
            and 1. The first of them runs once more at its end, on other memory, to measure rounding.

    Raises:
        UsageError: If an argument has the wrong type or value.
        RunExists: If the folder holds a run and ``overwrite`` is False.
    """
    if not os.fspath(run):
        raise UsageError(
            "record(model, optimizer, run) has no run folder: name it as the third argument, after "
            "the optimizer, or None without one"
        )
    optimizers = optimizers_of(optimizer)
    cadence = Cadence(every, max_steps, budget)
    if operations is not None and (type(operations) is not int or operations < 0):
        raise UsageError(f"operations must be a number of steps, 0 or more, not {operations!r}")
    if blocks and operations == 0:
        raise UsageError("blocks=True records in the steps of operations: leave operations=0 out")
    only = Fp32Only(logger.info) if fp32 else None
    return Recorder(
        model,
        optimizers,
        place(run),
        RecordingOptions(
            cadence, include, exclude, overwrite, operations, trace=checked(trace), blocks=blocks
        ),
        precision=PrecisionWatch(off=fp32, only=dict if only is None else only.to_json),
        fp32=only,
        copies=WeightCopies(copy_budget),
    )


def _why_no_operations(about: Subjects) -> tuple[str, str] | None:
    """Why a model shows not all of its operations, and what to do; None for one that does."""
    known = about.modules.values()
    if any(named.compiled for named in known):
        return NO_OPERATIONS
    if any(isinstance(named.module, torch.jit.ScriptModule) for named in known):
        return "the model is TorchScript, which shows few of its operations", NO_OPERATIONS[1]
    return None


def _warn_of_no_start(folder: AnyPath) -> None:
    logger.warning(
        "nothing was recorded into %s, because the recorder was never started: write `with "
        "mpdiag.record(...):` around the training loop",
        folder,
    )


class Recorder:
    """A recording in progress. Call ``mpdiag.record`` to make one.

    Args:
        model: The model, or several.
        optimizers: The optimizers that step it.
        folder: The run folder.
        options: The options of ``mpdiag.record``.
        precision: Notes operations that are not in FP32.
        fp32: Keeps the training in FP32 while it is recorded.
        setters: Notes who gives parameters their dtype. Default: from the start of the recording.
        copies: Copies parameters before a step.
        clock: A monotonic clock, in seconds.

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
        tell = None if precision is None or rank else precision.tell  # of a command
        self._failures = Failures(folder, self._clock, tell)
        failed = self._failures.note
        names = self._subjects.names
        products = MatrixProducts(rank) if options.blocks else None
        trace = TraceWatch(options.trace, self._subjects.parameters, rank, failed)
        watch = OperationWatch(names, names, rank, failed, products, trace)
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
        trace.writer = writer
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
            traced=trace.wants,
            exact=world == 1,
        )
        described = Described(
            options, self._subjects, optimizers, world, governor, steps, precision, trace
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
    ) -> "_Parts":
        governor, operations = described.governor, described.operations
        about, optimizers, clock = self._subjects, self._optimizers, self._clock
        guard = HookGuard(clock, governor, watch, self._failures)
        copied = CopiedParameters()
        scalers = ScalerWatch(clock, ledger, optimizers)
        inside = StepTap(about.parameters, self._failures.note)
        weights = WeightObserver(
            about, optimizers, copied, ledger, guard, copies, inside, described.trace
        )
        observer = Observer(
            about, copied, ledger, described.precision, guard, operations.forgo, described.trace
        )
        shadow = StateShadow(optimizers, self._failures.note)
        sums = GradientSums(about.parameters, guard)
        values = ValueWatch(about, optimizers, (inside, sums), self._failures.note)
        contract = ContractWatch(
            about,
            optimizers,
            copied.wrappers,
            described.world,
            shadow,
            values,
            described.precision,
            self._failures.note,
            self._setters,
        )
        folder = RunFolder(
            writer, ledger, self._losses, scalers, clock, self._failures, described, contract
        )
        # A step's operations are written before anything of ours may count as one, and the folder,
        # which closes the ledger's step, comes last.
        clock.attach(
            (
                *(scalers, operations, weights, described.trace, sums, observer, shadow, values),
                *(contract, folder),
            ),
            GovernedPace(described.options.cadence, governor, ledger, operations),
        )
        return _Parts(
            governor, ledger, watch, operations, scalers, copied, weights, observer, folder
        )

    def __repr__(self) -> str:
        state = self.state
        if state == "recording" and not self._clock.running:
            state = "not started"
        return (
            f"<Recorder of {str(self.folder)!r}: {state}, {counted(self.step, 'step')}, "
            f"{self.steps_recorded} recorded>"
        )

    @property
    def state(self) -> str:
        """As ``meta.json`` has it, where that could be written."""
        return "failed" if self._parts is None else self._parts.folder.state

    @property
    def step(self) -> int:
        """Number of the current step, from 0."""
        return self._clock.number

    @property
    def steps_recorded(self) -> int:
        """Steps recorded so far."""
        return 0 if self._parts is None else self._parts.ledger.steps_closed

    @property
    def optimizer_steps(self) -> list[tuple[str, int]]:
        """Each optimizer's type and its number of steps."""
        return [(type(o).__name__, self._clock.steps_of(o).taken) for o in self._optimizers]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Errors of the recording: dicts with step, where and error; empty if there were none."""
        return self._failures.found

    # -- life --------------------------------------------------------------------------------------

    def __enter__(self) -> "Recorder":  # noqa: PYI034 - typing.Self is Python 3.11's
        """Start recording."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop recording. The training's exceptions pass through, and the run stays readable."""
        if kind is None or (kind is SystemExit and not getattr(error, "code", None)):
            self.close()
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def start(self, missed: int = 0) -> "Recorder":
        """Place the hooks and write the first ``meta.json``.

        Args:
            missed: Steps that the training took before this call; they count as not recorded.
        """
        parts = self._parts
        if parts is None or self._clock.running or parts.folder.state != "recording":
            return self
        self._forget_start()
        if not (self._subjects.modules or self._subjects.parameters):
            logger.warning("recording into %s: %s", self.folder, self._subjects.nothing_chosen())
        mine = set(map(id, self._subjects.roots))
        for other in live:
            if isinstance(other, Recorder) and not mine.isdisjoint(map(id, other._subjects.roots)):
                words = (
                    "the model is being recorded into %s, too: each recording takes its own time"
                )
                logger.warning("recording into %s: " + words, self.folder, other.folder)
        if reason := _why_no_operations(self._subjects):
            parts.operations.refuse(*reason)
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
        """Stop recording and finish the run folder. A second call does nothing.

        A Ctrl-C during this call is raised after the folder is finished.
        """
        parts = self._parts
        if parts is not None and self._clock.running:
            carry_through(lambda again: self._close(parts, state, again=again))

    def _close(self, parts: "_Parts", state: str, *, again: bool) -> None:
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
        """Close from another thread, while the training's thread waits in a call of torch.

        Rows that were read from the device are written first: it may wait for other ranks forever.
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
        """Stop without writing: this process is a fork of the one that records."""
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
        """End the step and begin the next one, for loops that the recorder does not recognize."""
        self._clock.end_step()

    def log_metric(self, name: str, value: float, *, higher_is_better: bool = True) -> None:
        """Log a metric into the run, for ``mpdiag compare``; also after closing."""
        self._losses.note_metric(name, float(value), higher_is_better=higher_is_better)

    def adopt(self, models: Mapping[str, Adopted], optimizers: Sequence[Optimizer]) -> None:
        """Record more models and optimizers from now on, during a training.

        Args:
            models: The prefix of layer names to the model and its wrapper (DDP, FSDP or None).
            optimizers: Optimizers that are not recorded yet.
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
        """Name the models as the script does: ``id`` of each model to its name."""
        self._subjects.name_models(names)

    def show_to(self, audience: Audience) -> None:
        """Show the progress to ``audience`` between two steps, as often as it asks for it."""
        if self._parts is not None:
            self._parts.ledger.take_encoded()
            self._parts.folder.audience = audience

    def forgo_operations(self, reason: str, fix: str) -> None:
        """Record no more operations. Earlier ones stay, and the run holds reason and fix."""
        if self._parts is not None:
            self._parts.operations.forgo(reason, fix)

    def enter(self, module: torch.nn.Module) -> None:
        """Count calls of this submodule as forward passes, because the loop calls it directly."""
        if self._parts is not None and self._clock.running:
            self._parts.observer.enter(module)


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
