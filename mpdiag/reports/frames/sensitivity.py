"""Operations by what a narrow format does to them: measured where that is known, estimated else.

Three sources, the best that the run folder holds: ``sensitivity.json`` (each operation was run in the
format and compared), ``search.json`` (a backward pass estimated each, and trainings decided), and the
recording itself (what rounding its values costs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from mpdiag.analysis.operations.rounding_error import operation_errors, rounding_error
from mpdiag.errors import DamagedSearch
from mpdiag.files.documents import read_document
from mpdiag.numerics.autocast_lists import LISTS
from mpdiag.numerics.formats import FORMATS, FP16
from mpdiag.reports.frames.operations import lines_of
from mpdiag.reports.words import layer_name
from mpdiag.runs.sensitivity import by_weight, read_sensitivities

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.files.paths import AnyPath
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.reports.frames.operations import Lines

SEARCH = "search.json"
OUTSIDE = "(outside)"
"""The module of what is computed outside of all, as ``training/sites.py`` names it."""
Source = Literal["measured", "searched", "recorded"]
_LISTED = "the operation policy (level O1) computes it in FP32"
MUST, MAY, OPEN = "must stay in FP32", "may be narrow", "not decided"
Key = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Operations, the most sensitive first.

    Attributes:
        source: What the ranking rests on.
        format: The narrow format's name.
        scale: The loss scale of gradients; None where the source does not say.
        frame: ``module``, ``operation``; ``value``, which ranks (infinite where a value leaves the
            range); ``trained`` (what trainings decided, empty where none did), ``plan`` (why the
            plan keeps it in FP32), ``line``; and what else the source knows.
        value: What ``value`` is, in words.
        by_operation: False where modules stand for their operations, which were not recorded.
    """

    source: Source
    format: str
    scale: float | None
    frame: pd.DataFrame
    value: str
    by_operation: bool = True


def ranking(folder: AnyPath, analysis: Analysis) -> Ranking:
    """Rank a run's operations by the best source in its folder.

    Raises:
        InputError: If a stored result is damaged or of a newer schema.
    """
    operations = analysis.run.operations()
    lines = lines_of(operations)
    measured, trained = read_sensitivities(folder), read_search(folder)
    decisions = trained.decisions if trained is not None else {}
    fmt = FP16 if analysis.target.needs_tensor_scale else analysis.target
    scale = analysis.plan.loss_scale.recommended
    if measured is not None:
        rows = [
            {
                "module": row.module,
                "operation": row.op,
                "value": math.inf if not row.finite else _infinite(row.gradient_error),
                "loss error": row.loss_error,
                "output error": row.output_error,
                "gradient cosine": row.gradient_cosine,
                "worst gradient": row.worst_gradient,
                "estimate": _infinite(row.estimate),
            }
            for row in by_weight(measured.operations)
        ]
        words = "relative error of all weight gradients"
        frame = _frame(rows, decisions, analysis, lines)
        return Ranking("measured", measured.format, measured.scale, frame, words)
    if trained is not None and trained.weights:
        rows = [
            {"module": module, "operation": op, "value": weight}
            for (module, op), weight in trained.weights.items()
        ]
        frame = _frame(rows, decisions, analysis, lines)
        words = "change of the loss, as a share of it"
        return Ranking("searched", fmt.name, None, frame, words)
    exponent = int(np.log2(scale))
    if operations:
        rows = [
            {
                "module": error.module or "",
                "operation": error.op,
                "value": error.worst,
                "forward": error.forward,
                "backward": error.backward,
                "line": f"{error.where}: {error.text}" if error.text else error.where,
            }
            for error in operation_errors(operations, fmt, exponent)
        ]
    else:
        rows = _layers(analysis, fmt, exponent)
    frame = _frame(rows, decisions, analysis, lines)
    words = "relative rounding error of a result"
    return Ranking("recorded", fmt.name, scale, frame, words, by_operation=bool(operations))


def _layers(analysis: Analysis, fmt: FloatFormat, exponent: int) -> list[dict[str, Any]]:
    """Where no operations were recorded: the outputs of modules, and their gradients."""
    kinds = {str(m["name"]): str(m["type"]) for m in analysis.run.modules()}
    errors: dict[str, dict[str, float]] = {}
    for kind, column, shift in (
        ("activation", "forward", 0),
        ("activation_grad", "backward", exponent),
    ):
        layers = analysis.layers.of_kind(kind)  # type: ignore[arg-type]
        for name, error in zip(
            layers.names, rounding_error(layers.histograms, fmt, shift), strict=True
        ):
            errors.setdefault(str(name), {})[column] = float(error)
    rows = [
        {
            "module": name,
            "operation": kinds.get(name, ""),
            "value": max(own.values()),
            "forward": own.get("forward"),
            "backward": own.get("backward"),
        }
        for name, own in errors.items()
    ]
    return sorted(rows, key=lambda row: -row["value"])


def _frame(
    rows: list[dict[str, Any]], decisions: Mapping[Key, str], analysis: Analysis, lines: Lines
) -> pd.DataFrame:
    """The common columns, and what must stay in FP32 by training on top."""
    choices = analysis.plan.fp32_operations
    kept = {(c.module, c.op): c.reason for c in choices}
    # A module chosen for its kind, such as a normalisation, is named by its type.
    whole = {c.module: c.reason for c in choices if c.evidence.get("type") == c.op}
    whole |= {c.module: c.reason for c in analysis.plan.fp32_modules}
    for row in rows:
        key = (row["module"], row["operation"])
        row["trained"] = decisions.get(key, decisions.get((row["module"], ""), ""))
        listed = _LISTED if LISTS.get(row["operation"]) == "fp32" else ""
        row["plan"] = kept.get(key) or whole.get(row["module"]) or listed
        inside = "" if row["module"] == OUTSIDE else row["module"]
        row.setdefault("line", lines.get((inside, row["operation"]), ""))
    rows = sorted(rows, key=lambda row: row["trained"] != MUST)
    first = ["module", "operation", "value", "line", "trained", "plan"]
    frame = pd.DataFrame(rows, columns=[*first, *(k for k in (rows or [{}])[0] if k not in first)])
    frame["value"] = frame["value"].astype(float)
    return frame


def _infinite(value: float | None) -> float:
    return math.inf if value is None else value


# -- what trainings decided ------------------------------------------------------------------------


@dataclass(frozen=True)
class Searched:
    """What a ``search.json`` says.

    Attributes:
        weights: The estimate of each candidate, heaviest first; infinite where a value overflows.
        decisions: What trainings decided about each.
        trainings: How many were made.
    """

    weights: Mapping[Key, float]
    decisions: Mapping[Key, str]
    trainings: int


def read_search(folder: AnyPath) -> Searched | None:
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
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        message = f"{path} is no readable search ({error}): delete it to begin anew"
        raise DamagedSearch(message) from error
    good = {fp32 for fp32, held, _ in probes if held}
    bad = {fp32 for fp32, held, _ in probes if not held}
    best = min(good, key=len, default=None)
    decisions = {key: _decide(key, best, bad) for key in weights}
    return Searched(weights, decisions, trainings)


def _decide(key: Key, best: frozenset[Key] | None, bad: set[frozenset[Key]]) -> str:
    """What the probes say of one candidate: the smallest set that held decides."""
    if best is None:
        return OPEN
    if key not in best:
        return MAY
    return MUST if best - {key} in bad else OPEN


# -- for a table -----------------------------------------------------------------------------------


def shown(found: Ranking) -> pd.DataFrame:
    """The ranking as a person reads it: names, and no column that is empty throughout."""
    frame = found.frame.copy()
    frame["module"] = [layer_name(str(name)) for name in frame["module"]]
    empty = [c for c in frame.columns if ((frame[c] == "") | frame[c].isna()).all()]
    label = FORMATS[found.format].label if found.format in FORMATS else found.format
    names = {
        "value": found.value,
        "trained": "by training",
        "plan": "why the plan keeps it in FP32",
        "forward": f"{label} error, forward",
        "backward": f"{label} error, backward",
    }
    return frame.drop(columns=empty).rename(columns=names)
