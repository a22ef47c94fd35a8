"""The run folder of a recording: rows and losses written when they are due, and what ``meta.json`` says.

With ``overwrite`` another process may replace the run in the folder. What belongs to it is not
touched: before each write, this recording looks whether the folder is still its own.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from mpdiag.errors import RunExists
from mpdiag.files.paths import AnyPath, is_remote
from mpdiag.recording.compiled import graph_flops
from mpdiag.recording.failures import WRITING, Failures
from mpdiag.recording.step_clock import Step, StepClock, StepListener
from mpdiag.runs import provenance
from mpdiag.runs.answers import answers, half_precision
from mpdiag.runs.run import IN_BACKWARD, META, now
from mpdiag.tracing.conditions import FIRST_RATE
from mpdiag.tracing.dispatch import in_backward
from mpdiag.tracing.names import Subjects, type_name

if TYPE_CHECKING:
    import pyarrow as pa

    from mpdiag.recording.cadence import Cadence, Governor, OperationSteps
    from mpdiag.recording.contract import ContractWatch
    from mpdiag.recording.grad_scaler import ScalerWatch
    from mpdiag.recording.ledger import Ledger
    from mpdiag.recording.losses import LossLog
    from mpdiag.recording.trace import TraceWatch
    from mpdiag.runs.precision import PrecisionFacts
    from mpdiag.runs.training_log import TrainingStep
    from mpdiag.runs.writer import RunWriter
    from mpdiag.tracing.precision import PrecisionWatch

WRITE_SECONDS = 5.0
"""Each of several ranks writes what it has at least this often: a launcher may kill it any time."""
_RETRY_SECONDS = (1.0, 5.0, 25.0)
"""How long to wait after each failed write; after one more, the recording is given up."""
_HEAD = 4096
_CREATED = re.compile(rb'"created": "([^"]*)"')


@dataclass(frozen=True, eq=False)
class Progress:
    """How far a recording is, between two steps.

    Attributes:
        step: Steps seen.
        recorded: Steps recorded.
        tables: Rows that were encoded since the last time, with the schema of ``stats``.
        losses: The last ones that are known.
        facts: The precision, as it was read last; None before the first step has ended.
        autocast: Dtypes in which autocast was on.
    """

    step: int
    recorded: int
    tables: Sequence[pa.Table]
    losses: Sequence[TrainingStep]
    facts: PrecisionFacts | None = None
    autocast: Sequence[str] = ()


class Audience(Protocol):
    """Is shown how a recording goes on; what it does there, the training waits for."""

    def due(self) -> bool:
        """Whether to show it anything now."""

    def show(self, progress: Progress) -> None:
        """Look at what is known now."""


@dataclass(frozen=True)
class RecordingOptions:
    """What is asked of a recording.

    Attributes:
        cadence: Which steps to record.
        include: Regular expression of names to record.
        exclude: Regular expression of names to leave out.
        overwrite: Replace a run that lies in the folder already.
        operations: In how many steps to record operations, too; None: as many as the budget allows.
        trace: Which steps to trace.
        script: The script that trains, for ``meta.json``.
        blocks: Whether to record the operands of matrix products with operations.
    """

    cadence: Cadence
    include: str | None = None
    exclude: str | None = None
    overwrite: bool = False
    operations: int | None = 0
    trace: tuple[int, ...] = ()
    script: str | None = None
    blocks: bool = False


@dataclass(frozen=True, eq=False)
class Described:
    """What ``meta.json`` says of a recording, beside its progress."""

    options: RecordingOptions
    subjects: Subjects
    optimizers: Sequence[Optimizer]
    world: int
    governor: Governor
    operations: OperationSteps
    precision: PrecisionWatch
    trace: TraceWatch


class RunFolder(StepListener):
    """Closes the ledger's step when a step ends, and writes what is due.

    Args:
        writer: Writes the files.
        ledger: Gathers rows.
        losses: Gathers losses.
        scalers: Know the scale of a step.
        clock: Stopped when nothing can be written.
        failures: Where failures are noted.
        described: What ``meta.json`` says beside progress.
        contract: Reads what ``precision.json`` says.

    Attributes:
        state: ``recording``, or how it ended.
        audience: Whom to show how it goes on; None for nobody.
    """

    def __init__(
        self,
        writer: RunWriter,
        ledger: Ledger,
        losses: LossLog,
        scalers: ScalerWatch,
        clock: StepClock,
        failures: Failures,
        described: Described,
        contract: ContractWatch,
    ) -> None:
        self.state = "recording"
        self.audience: Audience | None = None
        self._writer: RunWriter | None = writer
        self._ledger = ledger
        self._losses = losses
        self._scalers = scalers
        self._clock = clock
        self._failures = failures
        self._described = described
        self._contract = contract
        self._facts: PrecisionFacts | None = None  # as they were written last
        self._created = now()
        self._written_at = time.monotonic()
        self._retries, self._retry_at = 0, 0.0
        self._ended: Step | None = None
        self._first_rates: dict[int, float | None] = {}  # by id of an optimizer
        self._settings: list[tuple[list[str], dict[str, Any]]] = []  # of their groups, with names
        self._in_backward: set[int] = set()  # ids of optimizers
        self._table: list[dict[str, Any]] | None = None  # of modules, as it was written last

    # -- steps -------------------------------------------------------------------------------------

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Note the settings of its first step: a schedule changes them later; and where it was."""
        if in_backward():
            self._in_backward.add(id(optimizer))
        if id(optimizer) not in self._first_rates:
            self._first_rates[id(optimizer)] = describe_optimizer(optimizer).get("lr")
            known, kind = self._described.subjects.parameters, {"type": type(optimizer).__name__}
            for group in optimizer.param_groups:
                names = [known[id(p)].name for p in group["params"] if id(p) in known]
                plain = {
                    k: str(v) for k, v in group.items() if isinstance(v, (int, float, str, tuple))
                }
                self._settings.append((names, kind | plain))

    def step_ended(self, step: Step) -> None:
        """Close the step's rows, and note its loss."""
        scale, skipped = self._scalers.scale, self._scalers.skipped
        if step.recorded:
            try:
                self._ledger.close_step(step.number, scale, skipped)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self.give_up("ending a step", error)
        self._losses.step_ended(step.number, scale, skipped)
        self._ended = step

    def step_began(self, _step: Step) -> None:
        """Write what the step before has left, if it is time to."""
        ended, self._ended = self._ended, None
        if ended is None or not self._clock.active:
            return
        try:
            if ended.recorded or self._losses.due:
                self._write_what_is_due()
        except OSError as error:
            self._try_again_later(error)
        except Exception as error:  # noqa: BLE001
            self.give_up("ending a step", error)
        if self.audience is not None and self.audience.due():
            self._show(self.audience)

    def _try_again_later(self, error: OSError) -> None:
        """Keep what could not be written for a later try, a few times: a network disk has hiccups."""
        if self._retries == len(_RETRY_SECONDS):
            self.give_up(f"{WRITING} the run folder", error)
            return
        self._retry_at = time.monotonic() + _RETRY_SECONDS[self._retries]
        self._retries += 1

    def _show(self, audience: Audience) -> None:
        """Show what is known; a failure there ends the showing, not the recording."""
        try:
            if self._ledger.on_host:  # where it is counted at once; else rows come as they are due
                self._ledger.drain(at_least=1)
            audience.show(
                Progress(
                    self._clock.number,
                    self._ledger.steps_closed,
                    self._ledger.take_encoded(),
                    self._losses.latest(),
                    self._contract.facts,
                    sorted(self._described.precision.autocast),
                )
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.audience = None
            self._failures.note("showing the recording", error)

    def give_up(self, where: str, error: Exception) -> None:
        """Note a failure after which nothing can be recorded, and stop the recording."""
        self._failures.note(where, error)
        self.state = "failed"
        self._losses.forget()
        self._ledger.drop_step()
        self._clock.stop()

    # -- writing -----------------------------------------------------------------------------------

    def _write_what_is_due(self) -> None:
        overdue = time.monotonic() - self._written_at > WRITE_SECONDS
        due = self._ledger.due or self._losses.due or (self._described.world > 1 and overdue)
        if due and time.monotonic() >= self._retry_at:
            self._check_ownership()
            self._ledger.flush()
            self._losses.flush()
            self.write_meta()
            self._retries = 0
        else:
            self._ledger.drain()

    def finish(self, state: str) -> None:
        """Write all that is left; doing it again does no harm."""
        if self.state == "recording":  # and did not have to stop before the training did
            self.state = state
        try:
            self._check_ownership()
            self._ledger.flush()
            if self.audience is not None:  # which judges the whole of it, whenever it last looked
                self._show(self.audience)
            self._losses.close()
        except Exception as error:  # noqa: BLE001 - Ctrl-C may have interrupted a count
            self._failures.note(f"{WRITING} the last statistics", error)
        if self.state == "complete" and self._failures.writing:
            self.state = "failed"  # the training is complete, its record is not
        try:
            if self._writer is not None:
                self._writer.sweep()
            self.write_meta()
        except Exception as error:  # noqa: BLE001
            self._failures.note("finishing the run folder", error)
            self.state = "failed"
            if self._writer is not None:
                changes = {"state": self.state, **self._counts()}
                self._writer.amend_meta(changes, self._failures.found)

    def disown(self) -> None:
        """Write nothing more: the folder holds another process's run."""
        self._writer = None
        self._losses.forget()
        self._ledger.forget()

    def _check_ownership(self) -> None:
        """Make sure that no other process has begun a run in the folder.

        Raises:
            RunExists: If one has; all that waits for the disk is forgotten.
        """
        writer = self._writer
        if writer is None or not is_replaced(writer.folder, writer.rank, self._created):
            return
        self.disown()
        raise RunExists(f"another process has replaced the run in {writer.folder}")

    def write_meta(self) -> None:
        """Write ``meta.json``, and the table of modules if it has changed."""
        if self._writer is None:
            return
        self._written_at = time.monotonic()
        about = self._described
        asked = about.options
        rows = list(about.subjects.rows())
        meta = {
            **describe_training(about.subjects.roots),
            "state": self.state,
            "created": self._created,
            "updated": now(),
            "rank": self._writer.rank,
            "world_size": about.world,
            "script": asked.script,
            "optimizers": [self._describe(o) for o in about.optimizers],
            "cadence": {
                "every": asked.cadence.every,
                "max_steps": asked.cadence.max_steps,
                **about.governor.to_json(),
                "include": asked.include,
                "exclude": asked.exclude,
            },
            **self._counts(),
            "operations": about.operations.to_json(),
            "blocks": about.operations.blocks_to_json(),
            **(
                {"trace": about.trace.to_json() | {"settings": self._settings}}
                if asked.trace
                else {}
            ),
            "precision": about.precision.to_json(about.subjects.roots),
            "coverage": about.subjects.coverage(rows, graph_flops),
            "failures": self._failures.found,
            "verdict": None,
        }
        facts = self._contract.facts
        half = half_precision(meta, rows, facts, about.operations.half_products)
        answered = [vars(answer) for answer in answers(half, meta)]
        self._writer.write_meta(meta | {"answers": answered})
        if rows != self._table:
            self._writer.write_modules(rows)
            self._table = rows
        if facts is not None and facts != self._facts:
            self._writer.write_precision(facts)
            self._facts = facts

    def _counts(self) -> dict[str, int]:
        return {
            "steps_seen": self._clock.number,
            "steps_recorded": self._ledger.steps_written,
            "rows": self._ledger.rows_written,
        }

    def _describe(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer, how often it stepped, in a recorded step too, and evaluated a closure."""
        steps = self._clock.steps_of(optimizer)
        return {
            **describe_optimizer(optimizer),
            FIRST_RATE: self._first_rates.get(id(optimizer)),
            "steps_taken": steps.taken,
            "steps_recorded": steps.recorded,
            "evaluations": steps.evaluations,
            **({IN_BACKWARD: True} if id(optimizer) in self._in_backward else {}),
        }


def is_replaced(folder: AnyPath, rank: int, created: str) -> bool:
    """Whether a rank's meta file belongs to another recording than the one created at this moment.

    Only its first lines are read. A folder that is gone was not replaced: writing will say so. At a
    URL this is not checked, as each look is a transfer.
    """
    meta = folder / META if rank == 0 else folder / "ranks" / f"rank{rank:05d}.json"
    if is_remote(meta):
        return False
    try:
        with meta.open("rb") as file:
            found = _CREATED.search(file.read(_HEAD))
    except OSError:
        return False
    return found is not None and found[1] != created.encode()


def describe_training(models: Sequence[nn.Module]) -> dict[str, Any]:
    """The models, and where and how the program runs that trains them.

    Args:
        models: At least one; a parameter that several hold counts once.
    """
    versions = provenance.versions()
    parameters = {id(p): p for model in models for p in model.parameters()}
    return {
        "mpdiag": versions.get("mpdiag", "unknown"),
        "argv": provenance.arguments(),
        "launcher": provenance.launcher(),
        "device": provenance.device(models[0]),
        "versions": versions,
        "seeds": {"torch": torch.initial_seed()},
        "model": {
            "type": ", ".join(type_name(model) for model in models),
            "parameters": sum(p.numel() for p in parameters.values()),
        },
    }


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """The type of an optimizer and the plain settings of its first group."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    settings = {
        name: value
        for name, value in group.items()
        if isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    }
    return {"type": type(optimizer).__name__, **settings}
