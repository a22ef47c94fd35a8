"""What was made of a run later, each a JSON document in its folder.

``comparison.json``
    how trainings by a plan ended beside the recording they were compared with, and by which decisions
    they were trained, so that a later analysis knows whether the plan it makes was tried; ``earlier``
    holds the comparisons by other decisions, the newest first;
``profile.json``
    the document that ``mpdiag profile --json`` prints;
``probe.json``
    the losses of a short training by a plan, and of the same steps in FP32; ``earlier`` as above;
``search.json``
    what a search for the smallest FP32 set tried;
``sensitivity.json``
    the error each operation causes when it alone runs in a narrow format::

        {"schema_version": 1, "format": "fp16", "scale": 64.0, "operations": [
          {"module": "head", "op": "softmax", "calls": 1, "output_error": 0.0003,
           "loss_error": 0.0001, "gradient_error": 0.021, "gradient_cosine": 0.9998,
           "worst_gradient": "head.weight", "estimate": 0.004, "finite": true}]}

    An error is relative, narrow against FP32. One that is infinite or not known is null, and
    ``finite`` is false where the loss or a gradient was not finite.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpdiag.errors import DamagedRun, DamagedSearch, NewerSchema, RunNotFound
from mpdiag.files.atomic import write_json
from mpdiag.files.documents import converted, read_document
from mpdiag.files.paths import AnyPath
from mpdiag.runs.run import META

COMPARISON, PROFILE, PROBE = "comparison.json", "profile.json", "probe.json"
SEARCH, SENSITIVITY = "search.json", "sensitivity.json"
SCHEMA_VERSION = 1
"""Of each of these documents."""
_KEPT = 20
"""Comparisons, and probes, by different decisions that a run keeps."""
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError)


def _refuse_newer(path: AnyPath, version: object) -> None:
    if isinstance(version, int) and version > SCHEMA_VERSION:
        message = f"{path} was written by a newer mpdiag (schema {version}): upgrade to read it"
        raise NewerSchema(message)


@dataclass(frozen=True)
class StoredComparison:
    """What a comparison said of trainings by a plan.

    Attributes:
        against: Name of the trained side.
        decisions: Fingerprint of the decisions it was trained by, see ``PrecisionPlan.digest``.
        verdict: ``equivalent``, ``different`` or ``inconclusive``.
        metrics: In words, one a metric: ``accuracy .991 beside .994``.
        seeds: Trainings on the trained side.
        answer: What one seed shows: ``as FP32 (one seed)``; the verdict where there are several. An
            earlier comparison has none.
    """

    against: str
    decisions: str
    verdict: str
    metrics: tuple[str, ...] = ()
    seeds: int = 1
    answer: str = ""


def write_comparison(folder: AnyPath, comparison: StoredComparison) -> None:
    """Write it into a run folder, over an earlier one of trainings by the same decisions.

    Raises:
        OSError: If it cannot be written.
    """
    write_before_earlier(folder / COMPARISON, asdict(comparison))


def write_before_earlier(path: AnyPath, document: Mapping[str, Any]) -> None:
    """Write what was made by some ``decisions``; what the file held by others goes to ``earlier``.

    Raises:
        OSError: If it cannot be written.
    """
    others = [d for d in read_with_earlier(path) if d.get("decisions") != document["decisions"]]
    earlier = [{k: v for k, v in d.items() if k != "schema_version"} for d in others[: _KEPT - 1]]
    write_json(path, {"schema_version": SCHEMA_VERSION, **document, "earlier": earlier})


def read_with_earlier(path: AnyPath) -> list[dict[str, Any]]:
    """What ``write_before_earlier`` wrote, the newest first; [] where nothing can be read."""
    try:
        document = read_document(path)
    except _DAMAGE:
        return []
    earlier = document.pop("earlier", None) if isinstance(document, dict) else None
    stored = [document, *(earlier if isinstance(earlier, list) else ())]
    return [one for one in stored if isinstance(one, dict)]


def read_comparison(folder: AnyPath, decisions: str = "") -> StoredComparison | None:
    """The last comparison that a run folder keeps; None if there is none that can be read.

    Args:
        folder: The run.
        decisions: Only of trainings by these decisions, see ``PrecisionPlan.digest``.
    """
    kept = filter(None, map(_comparison, read_with_earlier(folder / COMPARISON)))
    return next((c for c in kept if decisions in ("", c.decisions)), None)


def _comparison(stored: Any) -> StoredComparison | None:
    try:
        against, decisions, verdict = (stored[n] for n in ("against", "decisions", "verdict"))
        metrics = tuple(stored["metrics"])
        if not all(isinstance(text, str) for text in (against, decisions, verdict, *metrics)):
            return None
        answer = str(stored.get("answer") or verdict)
        return StoredComparison(against, decisions, verdict, metrics, int(stored["seeds"]), answer)
    except _DAMAGE:
        return None


def add_to_meta(folder: AnyPath, **facts: Any) -> None:
    """Say more in a finished run's ``meta.json``.

    Args:
        folder: The run.
        facts: ``margins``: how much of a metric's difference does not matter, by metric, in its own
            unit; ``made_for``: the command that recorded it for itself.

    Raises:
        OSError: If the file cannot be read or written.
        ValueError: If it is not JSON.
    """
    write_json(folder / META, {**read_document(folder / META), **facts})


_TEXTS = (
    *("name", "verdict", "instruction", "dtype", "op", "module", "cause", "fix"),
    *("kernel", "phase"),
)


def read_profile(folder: AnyPath) -> dict[str, Any]:
    """Read a run's ``profile.json``.

    Raises:
        RunNotFound: If the run has none.
        DamagedRun: If it cannot be read.
        NewerSchema: If a newer version wrote it.
    """
    path = folder / PROFILE
    try:
        document = read_document(path)
    except FileNotFoundError:
        message = f"{folder} has no {PROFILE}: write one with mpdiag profile --json > {path}"
        raise RunNotFound(message) from None
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path} is damaged ({str(error).splitlines()[0]}): profile again"
        raise DamagedRun(message) from error
    lists = isinstance(document, dict) and all(
        isinstance(rows := document.get(name, []), list)
        and all(isinstance(row, dict) for row in rows)
        and all(isinstance(row.get(text), str | None) for row in rows for text in _TEXTS)
        for name in ("kernels", "operations", "findings")
    )
    if not lists:
        raise DamagedRun(f"{path} is not a profile: profile again with mpdiag profile --json")
    _refuse_newer(path, document.get("schema_version"))
    return dict(document)


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
    path = folder / SEARCH
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
    except _DAMAGE as error:
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


@dataclass(frozen=True)
class OperationSensitivity:
    """One operation of one module, all its calls of a step together in the format.

    Attributes:
        module, op: The module, and the operation in it.
        calls: How often it ran in the step.
        output_error, loss_error, gradient_error: Relative error of the model's output, the loss and
            all weight gradients as one vector; None where infinite or not known.
        gradient_cosine: Between those gradients and FP32's.
        worst_gradient: The weight whose gradient has the largest error.
        estimate: What one backward pass predicted (``sensitivity/estimated.py``), a share of the
            loss; None where a value leaves the range.
        finite: Whether loss and gradients were finite.
    """

    module: str
    op: str
    calls: int
    output_error: float | None
    loss_error: float | None
    gradient_error: float | None
    gradient_cosine: float | None
    worst_gradient: str | None
    estimate: float | None
    finite: bool


@dataclass(frozen=True)
class Sensitivities:
    """All operations of a step, in the order of their first calls.

    Attributes:
        format: The format they ran in, one at a time.
        scale: The loss scale of their gradients.
        operations: One entry for each.
    """

    format: str
    scale: float
    operations: tuple[OperationSensitivity, ...]

    def save(self, run: AnyPath) -> None:
        """Write ``sensitivity.json`` into a run folder."""
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / SENSITIVITY, {"schema_version": SCHEMA_VERSION, **asdict(self)})


def read_sensitivities(run: AnyPath) -> Sensitivities | None:
    """Read a run's ``sensitivity.json``; None if it has none.

    Raises:
        DamagedRun: If it cannot be read.
        NewerSchema: If a newer version wrote it.
    """
    path = run / SENSITIVITY
    try:
        document = read_document(path)
        _refuse_newer(path, converted(document["schema_version"], int))
        json.dumps(document, allow_nan=False)  # 1e999 is JSON, and is infinite once read
        return converted(document, Sensitivities)
    except FileNotFoundError:
        return None
    except _DAMAGE as error:
        message = f"{path} is damaged ({str(error).splitlines()[0]}): measure again or delete it"
        raise DamagedRun(message) from error


def by_weight(rows: Sequence[OperationSensitivity]) -> list[OperationSensitivity]:
    """Most sensitive first: what was not finite, then by the error of the gradients."""
    return sorted(rows, key=lambda row: (row.finite, -or_infinite(row.gradient_error)))


def or_infinite(value: float | None) -> float:
    """A figure of a document, in which null stands for infinity."""
    return math.inf if value is None else value
