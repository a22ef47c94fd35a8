"""A group of trainings to compare: a run, a folder of runs (seeds), or a stored baseline."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpdiag.analysis.comparison.models import KnownModel
from mpdiag.analysis.run_statistics import read_statistics
from mpdiag.errors import DamagedRun, NewerSchema, RunNotFound
from mpdiag.files.atomic import write_json
from mpdiag.files.documents import read_document
from mpdiag.files.paths import AnyPath, place
from mpdiag.runs.run import META, Run, list_runs, open_run
from mpdiag.runs.training_log import FILE, TrainingLog, read_log
from mpdiag.tracing.fingerprint import ModelFingerprint

BASELINE_VERSION = 1
KIND = "mpdiag baseline"
_CURVE = 200
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class SeedTraining:
    """One training of a group.

    Attributes:
        name: The run's name.
        seed: Its seed; None if it is not known.
        metrics: Value by metric.
        higher_is_better: Whether more is better, by metric.
        losses: Loss by step, skipped steps left out.
        skipped: Number of skipped steps.
        layers: log2 of the largest |x| by kind and name, where statistics were recorded.
        diverged: Whether its last loss was not finite, or it was stopped for steps that were not.
            Its metrics, if it has any, are of a model that no longer trains.
        model: What is known of its model.
    """

    name: str
    seed: int | None
    metrics: Mapping[str, float]
    higher_is_better: Mapping[str, bool]
    losses: Mapping[int, float] = field(default_factory=dict)
    skipped: int = 0
    layers: Mapping[tuple[str, str], float] = field(default_factory=dict)
    diverged: bool = False
    model: KnownModel = field(default_factory=KnownModel)


@dataclass(frozen=True)
class SeedGroup:
    """Trainings that differ only by their seed."""

    name: str
    trainings: tuple[SeedTraining, ...]

    @property
    def model(self) -> KnownModel:
        """What is known of the model: of the first training that knows its parameters' names."""
        known = (t.model for t in self.trainings if t.model.fingerprint is not None)
        return next(known, self.trainings[0].model)


def read_group(path: str | os.PathLike[str]) -> SeedGroup:
    """Read a run folder, a folder of run folders, or a baseline file.

    Raises:
        InputError: If there is nothing to compare, or it cannot be read.
    """
    where = place(path)
    if where.is_file():
        return _read_baseline(where)
    if (where / META).is_file() or not where.is_dir():
        return SeedGroup(str(where), (_trained(open_run(where)),))
    found = list_runs(where)
    runs = [item.run for item in found if item.run and (item.folder / FILE).is_file()]
    if not runs:
        problems = [item.problem for item in found if item.problem]
        raise RunNotFound(
            problems[0] if problems else f"{where} holds no run with a {FILE}: train with run=…"
        )
    trainings = sorted((_trained(run) for run in runs), key=lambda t: (t.seed or 0, t.name))
    return SeedGroup(str(where), tuple(trainings))


def _trained(run: Run) -> SeedTraining:
    log = read_log(run.folder)
    metrics = {m.metric: m.value for m in log.metrics}
    higher = {m.metric: m.higher_is_better for m in log.metrics}
    losses = {s.step: s.loss for s in log.steps if s.loss is not None and not s.skipped}
    if losses:
        last = [losses[s] for s in sorted(losses)[-max(1, len(losses) // 20) :]]
        metrics.setdefault("final loss", float(np.mean(last)))
        higher.setdefault("final loss", False)
    diverged = _diverged(run, log)
    if not metrics and not diverged:
        message = f"{run.folder / FILE} holds neither losses nor metrics: log some to compare"
        raise DamagedRun(message)
    seeds = run.meta.get("seeds") or {}
    seed = seeds.get("torch") if isinstance(seeds, dict) else None
    return SeedTraining(
        run.name,
        seed if type(seed) is int else None,
        metrics,
        higher,
        losses,
        len(log.skipped),
        _tops(run) if run.rows() else {},
        diverged,
        KnownModel.of_run(run),
    )


def _diverged(run: Run, log: TrainingLog) -> bool:
    """Whether a training ended with a loss that is not finite, or because too many steps were not."""
    if any("stopped" in note for note in log.notes):
        return True
    if not log.steps:
        return False
    last = log.steps[-1]
    broken = last.loss is not None and not math.isfinite(last.loss)
    return (broken and not last.skipped) or (
        run.meta.get("state") == "failed" and (broken or last.skipped)
    )


def _tops(run: Run) -> dict[tuple[str, str], float]:
    """log2 of the largest |x| by kind and name."""
    layers = read_statistics(run).layers()
    tops = layers.histograms.absmax
    return {
        (str(kind), str(name)): float(np.log2(top))
        for kind, name, top in zip(layers.kinds, layers.names, tops, strict=True)
        if top > 0 and np.isfinite(top)
    }


def save_baseline(side: SeedGroup, path: str | os.PathLike[str]) -> None:
    """Store a group as one small JSON file, for comparisons in CI."""
    write_json(
        place(path),
        {
            "kind": KIND,
            "schema_version": BASELINE_VERSION,
            "name": side.name,
            "trainings": [
                {
                    "name": t.name,
                    "seed": t.seed,
                    "metrics": {k: v if np.isfinite(v) else str(v) for k, v in t.metrics.items()},
                    "higher_is_better": dict(t.higher_is_better),
                    "losses": _thinned(t.losses),
                    "skipped": t.skipped,
                    "layers": [[*key, value] for key, value in t.layers.items()],
                    "diverged": t.diverged,
                    "model": {
                        "type": t.model.type,
                        "parameters": t.model.parameters,
                        "fingerprint": t.model.fingerprint and t.model.fingerprint.to_json(),
                    },
                }
                for t in side.trainings
            ],
        },
    )


def _thinned(losses: Mapping[int, float]) -> list[list[float | str]]:
    steps = sorted(losses)
    kept = steps[:: max(1, len(steps) // _CURVE)]
    return [[s, losses[s] if np.isfinite(losses[s]) else str(losses[s])] for s in kept]


def _read_baseline(path: AnyPath) -> SeedGroup:
    try:
        document: Any = read_document(path)
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise DamagedRun(
                f"{path} is not a baseline: write one with mpdiag compare A B -o baseline.json"
            )
        if document.get("schema_version") != BASELINE_VERSION:
            raise NewerSchema(f"{path} was written by a newer mpdiag: upgrade mpdiag to read it")
        trainings = tuple(
            SeedTraining(
                str(t["name"]),
                t["seed"] if type(t["seed"]) is int else None,
                {str(k): float(v) for k, v in t["metrics"].items()},
                {str(k): bool(v) for k, v in t["higher_is_better"].items()},
                {int(s): float(v) for s, v in t["losses"]},
                int(t["skipped"]),
                {(str(kind), str(name)): float(v) for kind, name, v in t["layers"]},
                t.get("diverged") is True,
                _stored_model(t.get("model") or {}),
            )
            for t in document["trainings"]
        )
    except (*_UNREADABLE, RecursionError, OverflowError) as error:
        raise DamagedRun(
            f"{path} is not a readable baseline ({error}): write it again; "
            "to compare traces, use mpdiag profile B --against A"
        ) from error
    if not trainings:
        raise DamagedRun(f"{path} holds no training: write it again")
    return SeedGroup(str(document.get("name", path)), trainings)


def _stored_model(stored: Mapping[str, Any]) -> KnownModel:
    """What a baseline knows of a model; an earlier version's knows nothing."""
    found = stored.get("fingerprint")
    return KnownModel(
        ModelFingerprint.from_json(found) if found else None,
        str(stored.get("type") or ""),
        int(stored.get("parameters") or 0),
    )
