"""``comparison.json``: how trainings by a plan ended beside the recording they were compared with.

``mpdiag compare`` leaves it in the recording's folder. It says by which decisions the other side was
trained, so that a later analysis knows whether the plan it makes is the one that was tried.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mpdiag.files.atomic import write_json
from mpdiag.files.documents import read_document

if TYPE_CHECKING:
    from mpdiag.files.paths import AnyPath

FILE = "comparison.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class StoredComparison:
    """What a comparison said of trainings by a plan.

    Attributes:
        against: Name of the trained side.
        decisions: Fingerprint of the decisions it was trained by, see ``PrecisionPlan.digest``.
        verdict: ``equivalent``, ``different`` or ``inconclusive``.
        metrics: In words, one a metric: ``accuracy .991 beside .994``.
        seeds: Trainings on the trained side.
    """

    against: str
    decisions: str
    verdict: str
    metrics: tuple[str, ...] = ()
    seeds: int = 1


def write_comparison(folder: AnyPath, comparison: StoredComparison) -> None:
    """Write it into a run folder, over an earlier one.

    Raises:
        OSError: If it cannot be written.
    """
    write_json(folder / FILE, {"schema_version": SCHEMA_VERSION, **asdict(comparison)})


def read_comparison(folder: AnyPath) -> StoredComparison | None:
    """What a comparison left in a run folder; None if there is none that can be read."""
    try:
        document = read_document(folder / FILE)
        return StoredComparison(
            against=_text(document["against"]),
            decisions=_text(document["decisions"]),
            verdict=_text(document["verdict"]),
            metrics=tuple(_text(line) for line in document["metrics"]),
            seeds=int(document["seeds"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        message = f"{value!r} is no text"
        raise TypeError(message)
    return value
