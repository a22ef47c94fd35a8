"""What a search knows so far, in one JSON file that is replaced as a whole after each training."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpdiag.errors import DamagedSearch, StateMismatch
from mpdiag.files.atomic import write_json
from mpdiag.files.documents import read_document
from mpdiag.sensitivity.ranking import Fp32Candidate

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Probe:
    """One question put to the training: does it hold with these in FP32, the rest narrow?

    Attributes:
        fp32: What stayed in FP32.
        metrics: One for each seed tried, until one failed; NaN where it diverged.
        good: Whether all of them were within FP32's spread.
        seconds: Wall time.
    """

    fp32: frozenset[Fp32Candidate]
    metrics: tuple[float, ...]
    good: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values; a training that diverged has the metric None."""
        return {
            "fp32": [[c.module, c.op] for c in sorted(self.fp32)],
            "metrics": [m if math.isfinite(m) else None for m in self.metrics],
            "good": self.good,
            "seconds": self.seconds,
        }


@dataclass
class SearchState:
    """Everything a search would have to do again if it were lost.

    Attributes:
        key: What is searched: plan, seeds, level; another search's file is refused.
        reference: FP32 metric and seconds, by seed.
        candidates: With their weights, heaviest first; empty until ranked.
        probes: In the order they were made.
    """

    key: dict[str, Any]
    path: Path | None = None
    reference: dict[int, tuple[float, float]] = field(default_factory=dict)
    candidates: list[tuple[Fp32Candidate, float]] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)

    def save(self) -> None:
        """Replace the file as a whole: a kill leaves the old one or the new one."""
        if self.path is None:
            return
        document = {
            "version": VERSION,
            "key": self.key,
            "reference": {str(s): [_number(x) for x in v] for s, v in self.reference.items()},
            "candidates": [[c.module, c.op, _number(w)] for c, w in self.candidates],
            "probes": [p.to_json() for p in self.probes],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, document)


def load_state(path: Path | None, key: dict[str, Any]) -> SearchState:
    """Go on where an earlier search stopped, or begin anew if there was none.

    Raises:
        DamagedSearch: If the file cannot be read.
        StateMismatch: If it belongs to another search.
    """
    if path is None or not path.is_file():
        return SearchState(key, path)
    try:
        document = read_document(path)
        same = document["version"] == VERSION and document["key"] == json.loads(json.dumps(key))
        state = SearchState(
            key,
            path,
            {int(s): (_float(m), _float(t)) for s, (m, t) in document["reference"].items()},
            [(Fp32Candidate(m, op), _float(w, math.inf)) for m, op, w in document["candidates"]],
            [
                Probe(
                    frozenset(Fp32Candidate(m, op) for m, op in p["fp32"]),
                    tuple(map(_float, p["metrics"])),
                    bool(p["good"]),
                    float(p["seconds"]),
                )
                for p in document["probes"]
            ],
        )
        if not all(p.metrics for p in state.probes):
            message = "a probe without metrics"
            raise ValueError(message)
    except (*_UNREADABLE, RecursionError, OverflowError) as error:
        message = f"{path} is no readable search ({error}): delete it to begin anew"
        raise DamagedSearch(message) from error
    if not same:
        message = (
            f"{path} belongs to another search (plan, seeds or level): delete it to begin anew"
        )
        raise StateMismatch(message)
    return state


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _float(value: float | None, otherwise: float = math.nan) -> float:
    return otherwise if value is None else float(value)
