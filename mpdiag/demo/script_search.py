"""``mpdiag search -- script.py --metric NAME``: the smallest FP32 set of an unmodified script.

Every training is a process of its own. The first one in FP32 is recorded: its operations are searched,
and those whose recorded values leave the format, or come close to its ends, are tried first.
"""

import math
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.comparison.groups import SeedTraining, read_group
from mpdiag.analysis.operations.rules import called
from mpdiag.demo.search import given_plan, keep_plan, progress_line
from mpdiag.display.wording import did_you_mean
from mpdiag.errors import InputError, UsageError
from mpdiag.launching import probe
from mpdiag.launching.script import parse
from mpdiag.numerics.autocast_lists import LISTS, MOVES
from mpdiag.numerics.formats import FloatFormat, format_named
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.runs.operations import Operation, TensorRecord
from mpdiag.runs.results import add_to_meta
from mpdiag.runs.run import META, open_run
from mpdiag.runs.training_log import FINAL_LOSS
from mpdiag.sensitivity.fp32_search import Reference, SearchResult, search_trainings
from mpdiag.sensitivity.loss_estimate import Fp32Candidate

SEED = "{seed}"
"""Stands in a script's arguments for the seed of a training."""


def seeds_of(words: Sequence[str], seeds: int | None) -> int:
    """How many FP32 trainings to run: by default 5, and 2 of a script that is given no seed."""
    return seeds or (5 if any(SEED in word for word in words) else 2)


def search_script(
    words: Sequence[str],
    metric: str,
    run: Path,
    *,
    higher_is_better: bool = False,
    plan: Path | None = None,
    budget: float = math.inf,
    seeds: int | None = None,
) -> SearchResult:
    """Search a script; the plan is written into the run.

    Args:
        words: The script and its arguments, as after ``--``; ``{seed}`` in them becomes the seed.
        metric: As the script logs it with ``mpdiag.log_metric``; ``loss`` is its training loss.
        run: A folder that keeps recording and search, so that it can be resumed, and ``plan.json``.
        higher_is_better: Whether more is better, where the script's log does not say so.
        plan: The plan whose format and loss scale are used; default: of the recording.
        budget: Minutes, of which the recording has its part.
        seeds: Of FP32; see ``seeds_of``.

    Raises:
        InputError: If the script is not there or fails.
        UsageError: If it logs no such metric.
    """
    parse(words)
    began = time.monotonic()
    trainings = ScriptTrainings(tuple(words), metric, run)
    training = trainings.recorded()
    name, _ = trainings.value(training)  # refused before anything else is trained for it
    given = given_plan(plan) if plan is not None else analyze(run).plan
    if given.level != "O0":
        given = replace(given, level="O1")  # as a script is trained
    count = seeds_of(words, seeds)
    with progress_line() as tell:
        result = search_trainings(
            replace(trainings, plan=given),
            given,
            {"script": list(words), "metric": name},
            budget=max(budget - (time.monotonic() - began) / 60, 1e-3),
            run=run,
            seeds=range(count),
            probe_seeds=min(2, count),
            higher_is_better=higher_is_better or training.higher_is_better.get(name, False),
            on_progress=tell,
        )
    keep_plan(result, run)
    return result


@dataclass(frozen=True)
class ScriptTrainings:
    """Trainings of a script, in the form that the search expects.

    Attributes:
        words: The script and its arguments.
        metric: What decides.
        run: The recording of the first training in FP32.
        plan: Its format decides which operations come first.
    """

    words: tuple[str, ...]
    metric: str
    run: Path
    plan: PrecisionPlan = field(default_factory=PrecisionPlan)

    def reference(self, seed: int, *, ranks: bool) -> Reference:
        """See ``Trainings``; the recording is the first one, and ranks the operations."""
        if not ranks:
            began = time.monotonic()
            in_fp32 = replace(self.plan, level="O0", loss_scale=LossScalePlan())
            return Reference(self.by_plan(seed, in_fp32), time.monotonic() - began)
        run = open_run(self.run)
        created, updated = (datetime.fromisoformat(run.meta[at]) for at in ("created", "updated"))
        _, value = self.value(self.recorded())
        found = recorded_candidates(run.operations(), format_named(self.plan.target))
        return Reference(value, (updated - created).total_seconds(), found)

    def by_plan(self, seed: int, plan: PrecisionPlan) -> float:
        """See ``Trainings``."""
        with tempfile.TemporaryDirectory(prefix="mpdiag-search-") as place:
            run = Path(place) / "run"
            failure = probe.train_apart(plan, self._words(seed), run)
            if "without overflow" in failure:  # a constant that the format cannot hold
                return math.nan
            try:
                training = read_group(run).trainings[0]
            except InputError as error:
                raise InputError(f"the script failed: {failure or error}") from error
        if failure and not training.diverged:
            raise InputError(f"the script failed: {failure}")
        return self.value(training)[1]

    def recorded(self) -> SeedTraining:
        """The recording, which is made now unless there is one.

        Raises:
            InputError: If the script failed, or an earlier recording was broken off.
        """
        if not (self.run / META).is_file():
            command = ["record", "--out", str(self.run), "--", *self._words(0)]
            failure = probe.run_apart(command, self.run)
            if failure:
                raise InputError(f"the script failed while it was recorded: {failure}")
            add_to_meta(self.run, made_for="search")
        state = open_run(self.run).meta.get("state")
        if state != "complete":
            raise InputError(
                f"the recording in {self.run} is {state}, not complete: delete the folder, or name "
                "another one with --run"
            )
        return read_group(self.run).trainings[0]

    def value(self, training: SeedTraining) -> tuple[str, float]:
        """The metric's name, and its value in a training; NaN if it diverged.

        Raises:
            UsageError: If the script logs no such metric.
        """
        known = training.metrics
        name = FINAL_LOSS if self.metric == "loss" and "loss" not in known else self.metric
        if training.diverged:
            return name, math.nan
        if name not in known:
            raise UsageError(
                f"the script logged no metric {name!r}{did_you_mean(name, list(known))}: use --metric "
                f"loss, or add mpdiag.log_metric({name!r}, VALUE) to it and delete {self.run}"
            )
        return name, float(known[name])

    def _words(self, seed: int) -> list[str]:
        return [word.replace(SEED, str(seed)) for word in self.words]


def recorded_candidates(
    operations: Iterable[Operation], target: FloatFormat
) -> tuple[tuple[Fp32Candidate, float], ...]:
    """The operations that may have to stay in FP32, the most endangered first.

    What computes outside all modules is none, nor what only moves values or is in FP32 by the
    operation lists.

    Returns:
        Each with its weight: infinite where a value overflows, else by how close the values come to
        the format's ends.
    """
    found: dict[Fp32Candidate, float] = {}
    for op in operations:
        name = called(op)
        counted = [t for t in (*op.inputs, *op.outputs) if t.counted]
        if op.phase != "forward" or op.module is None or op.op in MOVES or not counted:
            continue
        if LISTS.get(name) == "fp32":
            continue
        candidate = Fp32Candidate(op.module, name)
        weight = max(_danger(tensor, target) for tensor in counted)
        found[candidate] = max(weight, found.get(candidate, 0.0))
    return tuple(sorted(found.items(), key=lambda item: -item[1]))  # ties keep the order of calls


def _danger(tensor: TensorRecord, target: FloatFormat) -> float:
    """The share of a tensor's values that underflow, plus its largest one over the format's."""
    values = tensor.histogram
    if int(values.overflow(target).upper) > 0:
        return math.inf
    lost = int(values.lost_to_zero(target).value) / max(1, int(values.nonzero))
    return lost + tensor.absmax / target.max
