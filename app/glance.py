"""What a list says of a run without analyzing it: from the small files that lie in its folder.

An analysis takes half a second; a glance at a folder takes a few milliseconds. So a list of runs shows
the verdict of the plan that ``analyze`` kept there, and says "not analyzed" where none was kept.
"""

import math
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpdiag.errors import MpdiagError
from mpdiag.files.documents import read_document
from mpdiag.plan import FILE as PLAN
from mpdiag.plan import PrecisionPlan, Verdict
from mpdiag.runs.results import PROFILE, read_comparison
from mpdiag.runs.training_log import FILE as LOG
from mpdiag.runs.training_log import Metric, TrainingLog, read_log

POINTS = 60
"""Losses that a sparkline is drawn from."""
LARGEST = 4 << 20
"""Bytes of a log or a profile beyond which a list does not read it: it would take a second."""


@dataclass(frozen=True)
class PlanGlance:
    """What a stored plan decided of its loss scale, and what it was called.

    Attributes:
        verdict: Its verdict.
        target: The format it is for, by name.
        need: How sure it is that a loss scale is needed, as ``LossScalePlan`` has it.
        scale: The recommended loss scale.
    """

    verdict: Verdict
    target: str
    need: str
    scale: float

    @classmethod
    def of(cls, plan: PrecisionPlan) -> "PlanGlance":
        """What a list says of a plan."""
        scale = plan.loss_scale
        return cls(plan.verdict, plan.aim, scale.need, scale.recommended)


@dataclass(frozen=True)
class Glance:
    """What the files of one run say at a glance.

    Attributes:
        size: Bytes of all its files.
        losses: At most ``POINTS`` of its finite losses, medians over equal parts of the training.
        last_loss: The last loss that was logged; it may be infinite or NaN.
        final_loss: As ``mpdiag compare`` judges it.
        steps: Steps in its log; None without a log.
        skipped: Steps that were skipped; None without a log.
        metrics: Its last value of each metric.
        stopped: Why the training stopped early, if the log says so.
        plan: The plan that lies in the folder.
        compared: Of a recording: the run beside it that ``mpdiag compare`` judged, and the verdict, if
            that run still follows the same plan.
        tensor_cores: Share of kernel time on Tensor Cores, by the profile that lies there.
        unread: Names of files that could not be read, or are too large for a list.
    """

    size: int = 0
    losses: tuple[float, ...] = ()
    last_loss: float | None = None
    final_loss: float | None = None
    steps: int | None = None
    skipped: int | None = None
    metrics: tuple[Metric, ...] = ()
    stopped: str = ""
    plan: PlanGlance | None = None
    compared: tuple[str, str] | None = None
    tensor_cores: float | None = None
    unread: tuple[str, ...] = field(default=())


def read_glance(folder: Path) -> Glance:
    """Look into a run folder; what cannot be read is named in ``unread``, and nothing raises."""
    unread: list[str] = []
    log = _log(folder, unread)
    losses = [s.loss for s in log.steps if s.loss is not None] if log else []
    stops = [str(note["stopped"]) for note in log.notes if note.get("stopped")] if log else []
    return Glance(
        size=_size(folder),
        losses=sparkline(losses),
        last_loss=losses[-1] if losses else None,
        final_loss=log.final_loss if log else None,
        steps=len(log.steps) if log else None,
        skipped=len(log.skipped) if log else None,
        metrics=tuple({m.metric: m for m in log.metrics}.values()) if log else (),
        stopped=stops[-1] if stops else "",
        plan=_plan(folder, unread),
        compared=_compared(folder),
        tensor_cores=_tensor_cores(folder, unread),
        unread=tuple(unread),
    )


def sparkline(losses: Sequence[float], points: int = POINTS) -> tuple[float, ...]:
    """The medians of the finite losses in at most so many equal parts, in order."""
    if not losses:
        return ()
    number = min(points, len(losses))
    ends = [len(losses) * i // number for i in range(number + 1)]
    medians = (_median(losses[a:b]) for a, b in pairwise(ends))
    return tuple(m for m in medians if m is not None)


def _median(values: Iterable[float]) -> float | None:
    known = sorted(v for v in values if math.isfinite(v))
    return known[len(known) // 2] if known else None


def _size(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(map(_size_of_file, folder.rglob("*")))


def _size_of_file(path: Path) -> int:
    """Bytes of a file; 0 of anything else, and of a file that has vanished meanwhile."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _is_small(path: Path, unread: list[str]) -> bool:
    """Whether a file is there and not too large for a list."""
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError:
        size = None
    if size is not None and size > LARGEST:
        unread.append(path.name)
    return size is not None and size <= LARGEST


def _log(folder: Path, unread: list[str]) -> TrainingLog | None:
    if not _is_small(folder / LOG, unread):
        return None
    try:
        return read_log(folder)
    except (MpdiagError, OSError):
        unread.append(LOG)
        return None


def _document(path: Path, unread: list[str]) -> dict[str, Any]:
    """A JSON object; {} where there is none that can be read."""
    if not _is_small(path, unread):
        return {}
    try:
        document = read_document(path)
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        unread.append(path.name)
        return {}
    return document


def _plan(folder: Path, unread: list[str]) -> PlanGlance | None:
    document = _document(folder / PLAN, unread)
    scale, verdict = document.get("loss_scale"), document.get("verdict")
    if isinstance(verdict, dict):
        known = Verdict(verdict.get("level") or "expected", str(verdict.get("text") or ""))
    elif isinstance(verdict, str):
        known = Verdict.of_sentence(verdict)
    else:
        return None
    if not isinstance(scale, dict) or not isinstance(scale.get("recommended"), (int, float)):
        return None
    return PlanGlance(
        verdict=known,
        target=str(document.get("target") or ""),
        need=str(scale.get("need") or "unknown"),
        scale=float(scale["recommended"]),
    )


def _compared(folder: Path) -> tuple[str, str] | None:
    stored = read_comparison(folder)
    if stored is None or stored.seeds != 1:  # several trainings were judged, none of them alone
        return None
    try:
        followed = PrecisionPlan.load(folder.resolve().parent / stored.against / PLAN)
    except (MpdiagError, OSError):
        return None
    return (stored.against, stored.answer) if followed.digest() == stored.decisions else None


def _tensor_cores(folder: Path, unread: list[str]) -> float | None:
    share = _document(folder / PROFILE, unread).get("tensor_core_fraction")
    return float(share) if isinstance(share, (int, float)) and math.isfinite(share) else None
