"""``training.jsonl``: the result of each step of a training, one JSON object a line.

::

    {"step": 12, "loss": 1.93, "scale": 1024.0, "skipped": false, "reason": "",
     "gradient_norm": 0.71, "memory_bytes": 812646400, "seconds": 0.081}
    {"metric": "mAP@0.5", "value": 0.846, "higher_is_better": true}

JSON knows no infinity and no NaN: they stand as the strings ``"inf"``, ``"-inf"`` and ``"nan"``. A
line is written at once. A killed process leaves whole lines and at most one torn one, the last, which
readers skip.
"""

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import chain
from typing import IO, Any, Protocol

from mpdiag.errors import DamagedRun, RunNotFound
from mpdiag.files.documents import converted, whole_characters
from mpdiag.files.paths import AnyPath, is_remote, place
from mpdiag.runs.provenance import announced_ranks

logger = logging.getLogger("mpdiag")

FILE = "training.jsonl"
RECORDED = {"source": "recording"}
"""First line of a log that a recording wrote of the training it watched."""
FINAL_LOSS = "final loss"
"""A metric that every log with losses has, and what it is."""
FINAL_WORDS = "mean loss of the last 5 % of the steps"
_MAX_LINE = 1 << 20


def final_loss(losses: Sequence[float]) -> float | None:
    """The mean of the last twentieth of some losses, of at least one; None without any."""
    last = losses[-max(1, len(losses) // 20) :]
    return sum(last) / len(last) if last else None


@dataclass(frozen=True)
class TrainingStep:
    """One step.

    Attributes:
        step: Its number, from 0.
        loss: The unscaled loss: the sum of what ``backward()`` was called on since the gradients
            were last cleared (of a closure, its first evaluation); None if it was not seen.
        scale: The loss scale of its gradients.
        skipped: Whether it was skipped.
        reason: Why.
        gradient_norm: Euclidean norm of the unscaled gradients, before clipping.
        memory_bytes: Largest memory in use so far, of the accelerator or of the process.
        seconds: Since the step before; None for the first.
    """

    step: int
    loss: float | None
    scale: float
    skipped: bool = False
    reason: str = ""
    gradient_norm: float | None = None
    memory_bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Metric:
    """A figure of merit on held-out data, after training."""

    metric: str
    value: float
    higher_is_better: bool = True


@dataclass(frozen=True)
class TrainingLog:
    """A whole ``training.jsonl``."""

    steps: tuple[TrainingStep, ...] = ()
    metrics: tuple[Metric, ...] = ()
    notes: tuple[dict[str, Any], ...] = field(default=())

    @property
    def skipped(self) -> tuple[TrainingStep, ...]:
        """The steps that were skipped."""
        return tuple(s for s in self.steps if s.skipped)

    def metric(self, name: str) -> Metric | None:
        """A metric by name, the last one written."""
        return next((m for m in reversed(self.metrics) if m.metric == name), None)

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step that was not skipped, as far as they were seen."""
        return {s.step: s.loss for s in self.steps if s.loss is not None and not s.skipped}

    @property
    def final_loss(self) -> float | None:
        """See ``final_loss``, of the steps that were not skipped."""
        return final_loss([loss for _, loss in sorted(self.losses.items())])

    def outcome(self, name: str) -> float | None:
        """The last value of a metric, ``FINAL_LOSS`` included; None if it has none."""
        logged = self.metric(name)
        own = self.final_loss if name == FINAL_LOSS else None
        return own if logged is None else logged.value


class Sink(Protocol):
    """Whatever writes a run and takes metrics for it."""

    def note_metric(self, name: str, value: float, *, higher_is_better: bool) -> None:
        """Write a metric."""


_sinks: list[tuple[int, Sink]] = []  # the process, and the last two that began to write a run in it


def announce(sink: Sink) -> None:
    """Make ``log_metric`` write to this sink from now on."""
    _sinks[:] = [*_sinks[-1:], (os.getpid(), sink)]


def withdraw(sink: Sink) -> None:
    """Make ``log_metric`` write to the sink that was announced before this one."""
    _sinks[:] = [(process, other) for process, other in _sinks if other is not sink]


def log_metric(name: str, value: float, *, higher_is_better: bool = True) -> None:
    """Log a metric, such as an accuracy, into the current run, for ``mpdiag compare``.

    The run is the one that began last in this process, even if it has ended. ``mpdiag record``,
    ``mpdiag train``, ``mpdiag.record`` and ``MixedPrecision(…, run=…)`` begin one. Without a run the
    call logs one warning and writes nothing, so you can leave the line in your script.

    Args:
        name: The metric's name. Use the same name in all trainings that you compare.
        value: A number, or a tensor of one element.
        higher_is_better: Whether a higher value is better.
    """
    if not _sinks and announced_ranks()[0] == 0:  # other ranks write no log
        _warn_of_no_run()
    for process, sink in _sinks[-1:]:
        if process == os.getpid():
            sink.note_metric(name, float(value), higher_is_better=higher_is_better)


@cache
def _warn_of_no_run() -> None:
    logger.warning(
        "log_metric wrote nothing, because no run has begun: start the script with `mpdiag record --` "
        "or `mpdiag train --`, or call it inside mpdiag.record()"
    )


class LogWriter:
    """Appends to a run's ``training.jsonl``; a failure never reaches the training that is logged.

    Args:
        folder: The run folder.
        failed: Called with the first failure, after which nothing more is written; default: warn.

    Attributes:
        failed: Whether there was one.
    """

    def __init__(
        self, folder: str | os.PathLike[str], failed: Callable[[OSError], None] | None = None
    ) -> None:
        self.path = place(folder) / FILE
        self._file: IO[str] | None = None
        self.failed = False
        self._tell = failed or self._warn

    def append(self, entry: TrainingStep | Metric | dict[str, Any]) -> None:
        """Write one line at once; after a failure, which is reported once, nothing more is written."""
        if self.failed:
            return
        document = entry if isinstance(entry, dict) else asdict(entry)
        text = json.dumps({k: _plain(v) for k, v in document.items()}, allow_nan=False)
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(text + "\n")
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def _open(self) -> IO[str]:
        """Open for appending; end the torn line that a killed process may have left."""
        torn = False
        if not is_remote(self.path) and self.path.exists() and self.path.stat().st_size:
            with self.path.open("rb") as file:
                file.seek(-1, 2)
                torn = file.read(1) != b"\n"
        file_ = self.path.open("a", encoding="utf-8")
        if torn:
            file_.write("\n")
        return file_

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:  # a remote file is sent only now
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self.failed:
            self.failed = True
            self._tell(error)

    def _warn(self, error: OSError) -> None:
        warnings.warn(
            f"cannot write {self.path} ({error.strerror or error}); training goes on without its log",
            RuntimeWarning,
            stacklevel=4,
        )


def is_recorded(folder: str | os.PathLike[str]) -> bool:
    """Whether a recording wrote the log in a run folder, and not a trainer."""
    try:
        return next(_lines(place(folder) / FILE))[1] == RECORDED
    except (StopIteration, DamagedRun, RunNotFound):
        return False


def read_log(folder: str | os.PathLike[str]) -> TrainingLog:
    """Read a run's ``training.jsonl``.

    Raises:
        RunNotFound: If the run has none.
        DamagedRun: If a line other than a torn last one cannot be read; the message names it.
    """
    path = place(folder) / FILE
    return _log_of(path, _lines(path))


def read_recorded(folder: str | os.PathLike[str]) -> tuple[TrainingStep, ...]:
    """The steps of a log that a recording wrote; () where a trainer did, or there is no log.

    Raises:
        DamagedRun: As ``read_log``.
    """
    path = place(folder) / FILE
    lines = _lines(path)
    try:
        first = next(lines)
    except (StopIteration, DamagedRun, RunNotFound):
        return ()
    return _log_of(path, chain([first], lines)).steps if first[1] == RECORDED else ()


def _log_of(path: AnyPath, lines: Iterable[tuple[int, dict[str, Any]]]) -> TrainingLog:
    steps: dict[int, TrainingStep] = {}
    metrics: list[Metric] = []
    notes: list[dict[str, Any]] = []
    for number, document in lines:
        entry = _entry(path, number, document)
        if isinstance(entry, TrainingStep):
            if entry.step == 0 and steps:  # another training, in the folder of an earlier one
                steps, metrics, notes = {}, [], []
            steps[entry.step] = entry  # a resumed training writes steps anew
        elif isinstance(entry, Metric):
            metrics.append(entry)
        else:
            notes.append(entry)
    return TrainingLog(tuple(steps[s] for s in sorted(steps)), tuple(metrics), tuple(notes))


def _entry(
    path: AnyPath, number: int, document: dict[str, Any]
) -> TrainingStep | Metric | dict[str, Any]:
    kind: type[TrainingStep | Metric] = TrainingStep if "step" in document else Metric
    if "alarm" in document or not {"step", "metric"} & set(document):  # an alarm names its step
        return document
    unknown = set(document) - {field.name for field in fields(kind)}
    try:
        if unknown:
            raise ValueError(f"there is no field {min(unknown)!r:.40}")
        named = {k: float(v) for k, v in document.items() if k in _FLOATS and v in _NAMED}
        return converted({**document, **named}, kind)
    except (TypeError, ValueError) as error:
        raise DamagedRun(_damaged(path, number, error)) from error


def _lines(path: AnyPath) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        if not is_remote(path) and path.exists() and not path.is_file():  # a pipe never ends
            raise DamagedRun(f"{path} is not a file: remove it")
        file = path.open("rb")
    except FileNotFoundError:
        raise RunNotFound(
            f"{path.parent} has no {FILE}, so no losses were logged: record the training, or give "
            "MixedPrecision a run="
        ) from None
    with file:
        number = 0
        while line := file.readline(_MAX_LINE):
            number += 1
            if not line.strip():
                continue
            try:
                document = whole_characters(json.loads(line), line)
            except (ValueError, RecursionError) as error:
                if _is_torn(line, file):
                    continue
                raise DamagedRun(_damaged(path, number, error)) from error
            if not isinstance(document, dict):
                raise DamagedRun(_damaged(path, number, ValueError("not an object")))
            yield number, document


def _is_torn(line: bytes, file: IO[bytes]) -> bool:
    """Whether a line was cut off by a kill: the last one, or one that a resumed training ended.

    Such a line began as ours do, and did not reach its closing brace.
    """
    cut = line.startswith(b"{") and not line.rstrip().endswith(b"}")
    return cut or (not line.endswith(b"\n") and not file.read(1))


_FLOATS = {"loss", "scale", "gradient_norm", "seconds", "value"}
_NAMED = {"inf", "-inf", "nan"}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _damaged(path: AnyPath, number: int, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{path} is damaged in line {number} ({reason}): remove that line to read the rest"
