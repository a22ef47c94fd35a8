"""A group of trainings to compare: a run, a folder of runs (seeds), or a stored baseline."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpdiag.analysis.comparison.models import KnownModel
from mpdiag.analysis.run_statistics import read_statistics
from mpdiag.errors import DamagedRun, InputError, NewerSchema, RunNotFound
from mpdiag.files.atomic import write_json
from mpdiag.files.documents import read_document
from mpdiag.files.paths import AnyPath, is_remote, place
from mpdiag.runs.run import META, Run, list_runs, open_run
from mpdiag.runs.training_log import FILE, FINAL_LOSS, TrainingLog, read_log
from mpdiag.tracing.conditions import FIRST_RATE
from mpdiag.tracing.fingerprint import ModelFingerprint

BASELINE_VERSION = 1
KIND = "mpdiag baseline"
_CURVE = 200
_MOST_SEEDS = 30
_COUNTS = ("steps_taken", "steps_recorded", "evaluations", FIRST_RATE)
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
        margins: The largest difference that does not matter, by metric, where the run knows it.
        folder: Its resolved path; empty in a baseline.
        turns: Steps of its log in a round of its optimizers, which an early version's recording logs as
            one; 1 unless several take turns in a training by a plan that was recorded, too.
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
    margins: Mapping[str, float] = field(default_factory=dict)
    folder: str = ""
    turns: int = 1


@dataclass(frozen=True)
class SeedGroup:
    """Trainings that differ only by their seed.

    Attributes:
        name: What it is called.
        trainings: At least one.
        fp32_seeds: FP32 trainings of one workload that show how far seeds spread, one a seed: the
            group's own and, of a single one, those in the same folder. Empty where the group has
            others, or fewer than two are known.
        path: The resolved path that was read; empty where none was.
    """

    name: str
    trainings: tuple[SeedTraining, ...]
    fp32_seeds: tuple[SeedTraining, ...] = ()
    path: str = ""

    @property
    def model(self) -> KnownModel:
        """What is known of the model: of the first training that knows its parameters' names."""
        known = (t.model for t in self.trainings if t.model.fingerprint is not None)
        return next(known, self.trainings[0].model)


def training_alone(run: Run) -> SeedGroup:
    """A run by its log alone: not what it recorded of its layers, nor the seeds beside it."""
    return SeedGroup(run.name, (_trained(run, layers=False),))


def read_group(path: str | os.PathLike[str]) -> SeedGroup:
    """Read a run folder, a folder of run folders, or a baseline file.

    Raises:
        InputError: If there is nothing to compare, or it cannot be read.
    """
    where = place(path)
    if where.is_file():
        return _read_baseline(where)
    if (where / META).is_file() or not where.is_dir():
        run = open_run(where)
        trained = _trained(run)
        beside = tuple(_other_seeds(run))
        seeds = (trained, *beside) if beside and not trained.diverged else ()
        return SeedGroup(str(where), (trained,), seeds, os.path.realpath(path))
    found = list_runs(where)
    runs = [item.run for item in found if item.run and (item.folder / FILE).is_file()]
    if not runs:
        problems = [item.problem for item in found if item.problem]
        raise RunNotFound(
            problems[0] if problems else f"{where} holds no run with a {FILE}: train with run=…"
        )
    read = ((run, _trained(run)) for run in runs)
    pairs = sorted(read, key=lambda pair: (pair[1].seed or 0, pair[1].name))
    trainings = tuple(training for _, training in pairs)
    return SeedGroup(str(where), trainings, _fp32_seeds(pairs), os.path.realpath(path))


def _fp32_seeds(pairs: Sequence[tuple[Run, SeedTraining]]) -> tuple[SeedTraining, ...]:
    """Those of a folder's trainings that did not diverge, if all are FP32 of one workload."""
    workload = _workload(pairs[0][0])
    if not all(_in_fp32(run) and _workload(run) == workload for run, t in pairs if not t.diverged):
        return ()
    found = {t.seed: t for _, t in pairs if t.seed is not None and not t.diverged}
    return tuple(found.values()) if len(found) > 1 else ()


def _other_seeds(run: Run) -> Iterator[SeedTraining]:
    """FP32 trainings of the same workload beside a run, one for each other seed."""
    if is_remote(run.folder) or not _in_fp32(run) or _seed(run) is None:
        return
    known, workload = {None, _seed(run)}, _workload(run)
    for item in list_runs(run.folder.resolve().parent):
        other = item.run
        if other is None or _seed(other) in known or not _in_fp32(other):
            continue
        if _workload(other) != workload or not (other.folder / FILE).is_file():
            continue
        try:
            training = _trained(other, layers=False)
        except InputError:
            continue
        if not training.diverged:
            known.add(training.seed)
            yield training
        if len(known) > _MOST_SEEDS + 1:
            return


def _in_fp32(run: Run) -> bool:
    """Whether a run that ended was no training by a plan, or one at O0."""
    about = run.meta.get("training") or {"level": "O0"}
    return run.meta.get("state") == "complete" and about.get("level") == "O0"


def _workload(run: Run) -> list[Any]:
    """What trainings of one workload share: script, model, length and the optimizers' settings."""
    settings = [
        {name: value for name, value in optimizer.items() if name not in _COUNTS}
        for optimizer in run.meta.get("optimizers") or []
    ]
    return [*map(run.meta.get, ("script", "model", "steps_seen")), settings]


def _seed(run: Run) -> int | None:
    seeds = run.meta.get("seeds") or {}
    seed = seeds.get("torch") if isinstance(seeds, dict) else None
    return seed if type(seed) is int else None


def _trained(run: Run, *, layers: bool = True) -> SeedTraining:
    log = read_log(run.folder)
    metrics = {m.metric: m.value for m in log.metrics}
    higher = {m.metric: m.higher_is_better for m in log.metrics}
    final = log.final_loss
    if final is not None:
        metrics.setdefault(FINAL_LOSS, final)
        higher.setdefault(FINAL_LOSS, False)
    diverged = _diverged(run, log)
    if not metrics and not diverged:
        message = f"{run.folder / FILE} holds neither losses nor metrics: log some to compare"
        raise DamagedRun(message)
    return SeedTraining(
        run.name,
        _seed(run),
        metrics,
        higher,
        log.losses,
        len(log.skipped),
        _tops(run) if layers and run.rows() else {},
        diverged,
        KnownModel.of_run(run),
        {n: v for n, v in (run.meta.get("margins") or {}).items() if isinstance(v, int | float)},
        os.path.realpath(run.folder),
        _turns(run),
    )


def _turns(run: Run) -> int:
    """See ``SeedTraining.turns``; a recording of today logs a loss for each optimizer's step."""
    if "training" not in run.meta:
        return 1
    taken: list[int] = [o.get("steps_taken") or 0 for o in run.meta.get("optimizers") or []]
    optimizers, most = sum(n > 0 for n in taken), max(taken, default=0)
    if optimizers < 2:
        return 1
    seen: int = run.meta.get("steps_seen") or 0
    return max(1, min(optimizers, round(seen / most)))


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
            "trainings": [_stored(t) for t in side.trainings],
            "fp32_seeds": [_stored(replace(t, losses={}, layers={})) for t in side.fp32_seeds],
        },
    )


def _stored(t: SeedTraining) -> dict[str, Any]:
    return {
        "name": t.name,
        "seed": t.seed,
        "metrics": {k: v if np.isfinite(v) else str(v) for k, v in t.metrics.items()},
        "higher_is_better": dict(t.higher_is_better),
        "losses": _thinned(t.losses),
        "skipped": t.skipped,
        "layers": [[*key, value] for key, value in t.layers.items()],
        "diverged": t.diverged,
        "margins": dict(t.margins),
        "turns": t.turns,
        "model": {
            "type": t.model.type,
            "parameters": t.model.parameters,
            "fingerprint": t.model.fingerprint and t.model.fingerprint.to_json(),
        },
    }


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
        trainings = tuple(map(_read_training, document["trainings"]))
        seeds = tuple(map(_read_training, document.get("fp32_seeds") or ()))
    except (*_UNREADABLE, RecursionError, OverflowError) as error:
        raise DamagedRun(
            f"{path} is not a readable baseline ({error}): write it again; "
            "to compare traces, use mpdiag profile B --against A"
        ) from error
    if not trainings:
        raise DamagedRun(f"{path} holds no training: write it again")
    return SeedGroup(str(document.get("name", path)), trainings, seeds, os.path.realpath(path))


def _read_training(t: Mapping[str, Any]) -> SeedTraining:
    model = t.get("model") or {}  # an earlier version's baseline knows nothing of it
    found = model.get("fingerprint")
    return SeedTraining(
        str(t["name"]),
        t["seed"] if type(t["seed"]) is int else None,
        {str(k): float(v) for k, v in t["metrics"].items()},
        {str(k): bool(v) for k, v in t["higher_is_better"].items()},
        {int(s): float(v) for s, v in t["losses"]},
        int(t["skipped"]),
        {(str(kind), str(name)): float(v) for kind, name, v in t["layers"]},
        t.get("diverged") is True,
        KnownModel(
            ModelFingerprint.from_json(found) if found else None,
            str(model.get("type") or ""),
            int(model.get("parameters") or 0),
        ),
        {str(k): float(v) for k, v in (t.get("margins") or {}).items()},
        turns=max(1, int(t.get("turns") or 1)),
    )
