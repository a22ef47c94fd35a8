"""The state of a search, in one JSON file that is replaced atomically after each training.

And whether a training is as good as FP32, given the spread of FP32 over seeds.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mpdiag.errors import DamagedSearch, StateMismatch, UsageError
from mpdiag.files.atomic import write_json
from mpdiag.files.documents import converted, finite, read_document
from mpdiag.files.paths import AnyPath
from mpdiag.numerics.distributions import t_quantile
from mpdiag.sensitivity.loss_estimate import Fp32Candidate

VERSION = 1


@dataclass(frozen=True)
class Probe:
    """One test: does training succeed with these operations in FP32 and the rest narrow?

    Attributes:
        fp32: The operations in FP32.
        metrics: One per seed, up to the first failure; NaN if it diverged.
        good: Whether all of them were within the spread of FP32 seeds.
        seconds: Wall time.
    """

    fp32: frozenset[Fp32Candidate]
    metrics: tuple[float, ...]
    good: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values; a training that diverged has the metric None."""
        return {
            "fp32": [[c.module, c.op] for c in sorted(self.fp32)],
            "metrics": finite(self.metrics),
            "good": self.good,
            "seconds": self.seconds,
        }


@dataclass
class SearchState:
    """The results of a search so far.

    Attributes:
        key: Identifies the search: plan, seeds, level; a file with another key is refused.
        reference: FP32 metric and seconds, by seed.
        candidates: With their weights, heaviest first; empty until ranked.
        probes: In the order they were made.
    """

    key: dict[str, Any]
    path: AnyPath | None = None
    reference: dict[int, tuple[float, float]] = field(default_factory=dict)
    candidates: list[tuple[Fp32Candidate, float]] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)

    def save(self) -> None:
        """Replace the file atomically: a kill leaves the old file or the new one."""
        if self.path is None:
            return
        document = {
            "version": VERSION,
            "key": self.key,
            "reference": {str(seed): finite(known) for seed, known in self.reference.items()},
            "candidates": [[c.module, c.op, finite(w)] for c, w in self.candidates],
            "probes": [p.to_json() for p in self.probes],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, document)


@dataclass(frozen=True)
class _Probe:
    fp32: list[tuple[str, str]]
    metrics: list[float | None]
    good: bool
    seconds: float


@dataclass(frozen=True)
class _SearchDocument:
    """``search.json`` as it is written."""

    version: int
    key: dict[str, Any]
    reference: dict[str, tuple[float | None, float | None]]
    candidates: list[tuple[str, str, float | None]]
    probes: list[_Probe]


def load_state(path: AnyPath | None, key: dict[str, Any]) -> SearchState:
    """Load the state of an earlier search, or start a new one if there is none.

    Raises:
        DamagedSearch: If the file cannot be read.
        StateMismatch: If it belongs to another search.
    """
    if path is None or not path.is_file():
        return SearchState(key, path)
    try:
        document = converted(read_document(path), _SearchDocument)
        state = SearchState(
            key,
            path,
            {int(s): (_float(m), _float(t)) for s, (m, t) in document.reference.items()},
            [(Fp32Candidate(m, op), _float(w, math.inf)) for m, op, w in document.candidates],
            [
                Probe(
                    frozenset(Fp32Candidate(m, op) for m, op in p.fp32),
                    tuple(map(_float, p.metrics)),
                    p.good,
                    p.seconds,
                )
                for p in document.probes
            ],
        )
        if not all(p.metrics for p in state.probes):
            raise ValueError("a probe without metrics")
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path} cannot be read as a search ({error}): delete it to start over"
        raise DamagedSearch(message) from error
    if document.version != VERSION or document.key != json.loads(json.dumps(key)):
        raise StateMismatch(
            f"{path} belongs to another search (plan, seeds or level): delete it to start over"
        )
    return state


def _float(value: float | None, otherwise: float = math.nan) -> float:
    return otherwise if value is None else float(value)


ALPHA = 0.01
LEAST = 0.01


@dataclass(frozen=True)
class SeedSpread:
    """The metrics of FP32 trainings that differ by seed only.

    Attributes:
        metrics: One per seed.
        higher_is_better: Whether more is better.
        bound: The worst metric that still counts as FP32's: one more FP32 seed would be worse with
            a chance of 1 % (a one-sided prediction interval of Student's t), but at least 1 %
            of the mean's size away.
    """

    metrics: tuple[float, ...]
    higher_is_better: bool
    bound: float

    def holds(self, metric: float) -> bool:
        """Whether a metric is as good as FP32's."""
        if not math.isfinite(metric):
            return False
        return metric >= self.bound if self.higher_is_better else metric <= self.bound

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {**asdict(self), "metrics": list(self.metrics)}


def spread_of(metrics: Sequence[float], *, higher_is_better: bool) -> SeedSpread:
    """The spread of the metrics of several FP32 seeds.

    Raises:
        UsageError: If there are fewer than two, or one is not finite.
    """
    if len(metrics) < 2:
        raise UsageError("a spread needs at least two FP32 seeds")
    if not all(map(math.isfinite, metrics)):
        raise UsageError("an FP32 training diverged: fix it before you change the format")
    mean, n = statistics.fmean(metrics), len(metrics)
    reach = t_quantile(1 - ALPHA, n - 1) * statistics.stdev(metrics) * math.sqrt(1 + 1 / n)
    reach = max(reach, LEAST * abs(mean))
    bound = mean - reach if higher_is_better else mean + reach
    return SeedSpread(tuple(map(float, metrics)), higher_is_better, bound)
