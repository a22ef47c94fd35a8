"""``search.json``: what a search for the smallest FP32 set left in a run folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdiag.errors import DamagedSearch
from mpdiag.files.documents import read_document

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.files.paths import AnyPath

FILE = "search.json"
MUST, MAY, OPEN = "must stay in FP32", "safe in a narrow format", "not decided"
Key = tuple[str, str]
"""A module and one of its operations."""


@dataclass(frozen=True)
class StoredSearch:
    """What a ``search.json`` says.

    Attributes:
        weights: The estimate of each candidate, largest first; infinite where a value overflows.
        decisions: What trainings decided about each.
        trainings: How many were run.
    """

    weights: Mapping[Key, float]
    decisions: Mapping[Key, str]
    trainings: int


def read_search(folder: AnyPath) -> StoredSearch | None:
    """Read what a search left in a run folder; None if there was none.

    Raises:
        DamagedSearch: If it cannot be read.
    """
    path = folder / FILE
    try:
        document = read_document(path)
        weights = {
            (str(module), str(op)): math.inf if weight is None else float(weight)
            for module, op, weight in document["candidates"]
        }
        probes = [
            (frozenset((str(m), str(op)) for m, op in p["fp32"]), bool(p["good"]), p["metrics"])
            for p in document["probes"]
        ]
        trainings = len(document["reference"]) + sum(len(metrics) for *_, metrics in probes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        message = f"{path} is not a readable search ({error}): delete it to start again"
        raise DamagedSearch(message) from error
    good = {fp32 for fp32, held, _ in probes if held}
    bad = {fp32 for fp32, held, _ in probes if not held}
    best = min(good, key=len, default=None)
    decisions = {key: _decide(key, best, bad) for key in weights}
    return StoredSearch(weights, decisions, trainings)


def _decide(key: Key, best: frozenset[Key] | None, bad: set[frozenset[Key]]) -> str:
    """What the probes say of one candidate: the smallest set that held decides."""
    if best is None:
        return OPEN
    if key not in best:
        return MAY
    return MUST if best - {key} in bad else OPEN
