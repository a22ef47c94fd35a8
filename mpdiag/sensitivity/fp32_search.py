"""``search_fp32``: the smallest set of operations that must stay in FP32, proven by training.

::

    def build(seed):                        # a fresh training, set up like yours
        torch.manual_seed(seed)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())

        def train(mp):                      # your loop, which returns the metric
            for x, y in batches(seed):
                with mp.autocast():
                    loss = loss_fn(model(x), y)
                mp.step(loss)
            return evaluate(model)

        return model, optimizer, train

    result = mpdiag.search_fp32(build, plan, budget=30)
    result.plan.save("plan.json")

First FP32 is trained with several seeds: their spread defines what counts as good, and the first
seed ranks the operations. Then a few emulated trainings at the plan's loss scale decide.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer

from mpdiag.errors import TrainingDiverged, UsageError
from mpdiag.files.documents import finite
from mpdiag.files.paths import place
from mpdiag.numerics.autocast_lists import LISTS
from mpdiag.plan import Fp32Choice, PrecisionPlan
from mpdiag.sensitivity.loss_estimate import Fp32Candidate, RankingTrainer, candidates_of
from mpdiag.sensitivity.search_state import Probe, SearchState, SeedSpread, load_state, spread_of
from mpdiag.training.options import Backend, PrecisionOverrides
from mpdiag.training.trainer import MixedPrecision

if TYPE_CHECKING:
    Build = Callable[[int], tuple[nn.Module, Optimizer, "Train"]]

Train = Callable[[MixedPrecision], float]
Answer = Literal["none", "found", "unfinished", "impossible"]
OnProgress = Callable[[str, int, int], None]
"""Called with the current activity, the number of trainings so far, and the size of the best set."""

SCHEMA_VERSION = 1
STATE_FILE = "search.json"
EVERYTHING_LOW = tuple(sorted(op for op, rule in LISTS.items() if rule == "fp32"))


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        answer: ``none``: nothing needs to stay in FP32; ``found``: this set must, and no subset
            suffices; ``unfinished``: the budget ended; this set suffices, if a set does at all, but
            may be too large; ``impossible``: not even all candidates suffice.
        fp32: The set; empty where no training has shown a set to suffice.
        plan: The plan with the set in it, each operation with its evidence; where no set is known to
            suffice, the plan as it was given.
        spread: The metrics of the FP32 seeds.
        probes: All trainings that tested a set.
        candidates: Number of operations that were considered.
        seconds: Time of all trainings, including FP32.
        references: How many FP32 trainings were run.
        seeds: How many are wanted.
        sufficient: Whether trainings have shown that the set suffices.
    """

    answer: Answer
    fp32: tuple[Fp32Candidate, ...]
    plan: PrecisionPlan
    spread: SeedSpread | None
    probes: tuple[Probe, ...]
    candidates: tuple[tuple[Fp32Candidate, float], ...]
    seconds: float
    references: int = 0
    seeds: int = 0
    sufficient: bool = True

    @property
    def trainings(self) -> int:
        """How many trainings tested a set."""
        return sum(len(probe.metrics) for probe in self.probes)

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag search --json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "answer": self.answer,
            "fp32": [{"module": c.module, "op": c.op} for c in self.fp32],
            "reference": None if self.spread is None else self.spread.to_json(),
            "probes": [p.to_json() for p in self.probes],
            "candidates": [
                {"module": c.module, "op": c.op, "weight": finite(w)} for c, w in self.candidates
            ],
            "seconds": self.seconds,
            "sufficient": self.sufficient,
            "trainings": {
                "fp32": self.references,
                "fp32_wanted": self.seeds,
                "sets": len(self.probes),
                "of_sets": self.trainings,
            },
            "plan": self.plan.to_json(),
        }


class Trainings(Protocol):
    """How a search trains: in this process, or a script in processes of its own."""

    def reference(self, seed: int, *, ranks: bool) -> Reference:
        """Train in FP32; with ``ranks`` the operations are ranked, too."""

    def by_plan(self, seed: int, plan: PrecisionPlan) -> float:
        """The metric of a training by a plan; NaN if it diverged."""


@dataclass(frozen=True)
class Reference:
    """A training in FP32.

    Attributes:
        metric: What it reached.
        seconds: Wall time.
        candidates: Operations that may have to stay in FP32 and their weights, largest first; empty
            where they were not ranked.
    """

    metric: float
    seconds: float
    candidates: tuple[tuple[Fp32Candidate, float], ...] = ()


class _OutOfBudget(Exception):
    """The budget does not allow another training."""


def search_fp32(
    build: Build,
    plan: PrecisionPlan,
    *,
    budget: float = math.inf,
    run: str | os.PathLike[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    probe_seeds: int = 2,
    higher_is_better: bool = True,
    lists: bool = True,
    backend: Backend = "auto",
    on_progress: OnProgress | None = None,
) -> SearchResult:
    """Find the smallest set of operations that must stay in FP32.

    Args:
        build: A function that takes a seed and returns a new model, its optimizer, and a function
            that trains with a ``MixedPrecision`` and returns the metric.
        plan: The plan for level, format and loss scale. Its own FP32 operations are ignored.
        budget: Minutes. A training starts only if it should end within the budget, by the time of
            earlier ones. Then the best answer so far is returned.
        run: A folder, as a path or a URL, for ``search.json``. A second call with the same folder
            continues the search.
        seeds: Seeds of the FP32 trainings.
        probe_seeds: Number of seeds that each set is tested with. The first failure ends the test.
        higher_is_better: Whether a higher metric is better.
        lists: Whether the operation policy's lists apply. If so, only operations that they leave in
            the narrow format are searched. If not, everything outside the set is narrow.
        backend: As for ``MixedPrecision``.
        on_progress: Called before each training.

    Raises:
        UsageError: If an argument has the wrong type or value, or FP32 training diverges.
        StateMismatch: If the folder holds another search.
    """
    return search_trainings(
        _Built(build, _bare(plan), lists, backend),
        plan,
        {"lists": lists},
        budget=budget,
        run=run,
        seeds=seeds,
        probe_seeds=probe_seeds,
        higher_is_better=higher_is_better,
        on_progress=on_progress,
    )


def search_trainings(
    trainings: Trainings,
    plan: PrecisionPlan,
    key: Mapping[str, Any],
    *,
    budget: float,
    run: str | os.PathLike[str] | None,
    seeds: Sequence[int],
    probe_seeds: int,
    higher_is_better: bool,
    on_progress: OnProgress | None,
) -> SearchResult:
    """The search of ``search_fp32``, whatever trains; ``key`` tells it from others of the same plan."""
    _check(plan, budget, seeds, probe_seeds)
    known = {
        "plan": _bare(plan).digest(),
        "seeds": list(seeds),
        "probe_seeds": probe_seeds,
        "higher_is_better": higher_is_better,
        **key,
    }
    state = load_state(None if run is None else place(run) / STATE_FILE, known)
    search = _Search(trainings, plan, state, budget, probe_seeds, on_progress)
    return search.run(seeds, higher_is_better=higher_is_better)


def _check(plan: PrecisionPlan, budget: float, seeds: Sequence[int], probe_seeds: int) -> None:
    if not budget > 0:
        raise UsageError(f"budget must be a number of minutes above 0, not {budget!r}")
    if len(set(seeds)) != len(seeds) or len(seeds) < 2:
        raise UsageError("seeds must be two or more different numbers: the limit is their spread")
    if not 1 <= probe_seeds <= len(seeds):
        raise UsageError(f"probe_seeds must lie between 1 and {len(seeds)}, the number of seeds")
    if plan.level == "O0":
        raise UsageError("the plan's level is O0 (all FP32), so there is nothing to search")


def _bare(plan: PrecisionPlan) -> PrecisionPlan:
    return replace(plan, fp32_operations=(), fp32_modules=())


@dataclass(frozen=True)
class _Built:
    """Trainings in this process, as ``search_fp32`` takes them; the plan has no choices of its own."""

    build: Build
    plan: PrecisionPlan
    lists: bool
    backend: Backend

    def reference(self, seed: int, *, ranks: bool) -> Reference:
        """See ``Trainings``."""
        began = time.monotonic()
        model, optimizer, train = self.build(seed)
        if not ranks:
            with MixedPrecision(model, optimizer, self.plan, level="O0") as trainer:
                metric = _finish(train, trainer)
            return Reference(metric, time.monotonic() - began)
        scale = self.plan.loss_scale
        ranking = RankingTrainer(
            model, optimizer, self.plan, scale.init_scale if scale.method != "none" else 1.0
        )
        with ranking:
            metric = _finish(train, ranking)
        whole_modules = self.lists and self.plan.level in ("O2", "O3")
        found = candidates_of(ranking.weights, lists=self.lists, whole_modules=whole_modules)
        return Reference(metric, time.monotonic() - began, tuple(found))

    def by_plan(self, seed: int, plan: PrecisionPlan) -> float:
        """See ``Trainings``."""
        model, optimizer, train = self.build(seed)
        options = narrow_options(plan, lists=self.lists)
        with MixedPrecision(model, optimizer, plan, backend=self.backend, **options) as trainer:
            return _finish(train, trainer)


class _Search:
    def __init__(
        self,
        trainings: Trainings,
        plan: PrecisionPlan,
        state: SearchState,
        budget: float,
        probe_seeds: int,
        on_progress: OnProgress | None,
    ) -> None:
        self._trainings = trainings
        self._given = plan
        self._plan = _bare(plan)
        self._state = state
        self._until = time.monotonic() + 60 * budget
        self._probe_seeds = probe_seeds
        self._tell = on_progress or (lambda *_: None)
        self._known = {p.fp32: p for p in state.probes}
        self._best: frozenset[Fp32Candidate] | None = None
        self._spread: SeedSpread | None = None

    def run(self, seeds: Sequence[int], *, higher_is_better: bool) -> SearchResult:
        state = self._state
        try:
            self._reference(seeds)
            metrics = [state.reference[s][0] for s in seeds]
            self._spread = spread_of(metrics, higher_is_better=higher_is_better)
            ranked = [c for c, _ in state.candidates]
            found = find_smallest(ranked, self._good, self._note)
        except _OutOfBudget:
            return self._result("unfinished", self._best, len(seeds))
        if found is None:
            return self._result("impossible", None, len(seeds))
        return self._result("found" if found else "none", found, len(seeds))

    # -- trainings ---------------------------------------------------------------------------------

    def _reference(self, seeds: Sequence[int]) -> None:
        """Train in FP32 with each seed; the first seed ranks the operations."""
        state = self._state
        for seed in seeds:
            if seed in state.reference and (state.candidates or seed != seeds[0]):
                continue
            self._need_time([t for _, t in state.reference.values()])
            self._say(f"FP32, seed {seed}")
            trained = self._trainings.reference(seed, ranks=seed == seeds[0])
            if seed == seeds[0]:
                state.candidates = list(trained.candidates)
            state.reference[seed] = (trained.metric, trained.seconds)
            state.save()

    def _good(self, fp32: frozenset[Fp32Candidate]) -> bool:
        """Whether training succeeds with these operations in FP32; each set is trained only once."""
        known = self._known.get(fp32)
        if known is not None:
            return known.good
        assert self._spread is not None
        took = [t for _, t in self._state.reference.values()]
        took += [p.seconds / len(p.metrics) for p in self._state.probes]
        metrics: list[float] = []
        began = time.monotonic()
        for seed in list(self._state.reference)[: self._probe_seeds]:
            self._need_time(took)
            self._say(f"{len(fp32)} of {len(self._state.candidates)} in FP32, seed {seed}")
            metrics.append(self._train(seed, fp32))
            if not self._spread.holds(metrics[-1]):
                break
        good = all(map(self._spread.holds, metrics))
        probe = Probe(fp32, tuple(metrics), good, time.monotonic() - began)
        self._known[fp32] = probe
        self._state.probes.append(probe)
        self._state.save()
        return good

    def _train(self, seed: int, fp32: frozenset[Fp32Candidate]) -> float:
        plan = replace(
            self._plan,
            fp32_operations=tuple(Fp32Choice(c.op, c.module) for c in sorted(fp32) if c.op),
            fp32_modules=tuple(Fp32Choice("", c.module) for c in sorted(fp32) if not c.op),
        )
        return self._trainings.by_plan(seed, plan)

    def _need_time(self, took: Sequence[float]) -> None:
        """Stop unless a training as long as the longest so far would end in time."""
        if time.monotonic() + max(took, default=0.0) > self._until:
            raise _OutOfBudget

    # -- telling -----------------------------------------------------------------------------------

    def _say(self, what: str) -> None:
        best = len(self._state.candidates) if self._best is None else len(self._best)
        self._tell(what, len(self._state.probes), best)

    def _note(self, better: frozenset[Fp32Candidate]) -> None:
        if self._best is None or len(better) < len(self._best):
            self._best = better

    def _result(
        self, answer: Answer, found: frozenset[Fp32Candidate] | None, seeds: int
    ) -> SearchResult:
        """The result; ``found`` is a set that trainings have shown to suffice, None without one."""
        state = self._state
        ranked = [c for c, _ in state.candidates]
        chosen = () if found is None else tuple(c for c in ranked if c in found)
        seconds = sum(t for _, t in state.reference.values()) + sum(p.seconds for p in state.probes)
        plan = self._plan if answer == "impossible" else self._given
        if found is not None:
            choices = [self._choice(c, found, answer) for c in chosen]
            plan = replace(
                self._plan,
                fp32_operations=tuple(c for c in choices if c.op),
                fp32_modules=tuple(c for c in choices if not c.op),
            )
        return SearchResult(
            answer,
            chosen,
            plan,
            self._spread,
            tuple(state.probes),
            tuple(state.candidates),
            seconds,
            len(state.reference),
            seeds,
            found is not None,
        )

    def _choice(
        self, c: Fp32Candidate, found: frozenset[Fp32Candidate], answer: Answer
    ) -> Fp32Choice:
        """The plan's entry for an operation: how training went with it in FP32 and without."""
        whole, less = self._known.get(found), self._known.get(found - {c})
        spread = self._spread
        evidence: dict[str, Any] = {
            "metrics_with": [] if whole is None else finite(whole.metrics),
            "metrics_without": [] if less is None else finite(less.metrics),
            "fp32_metrics": [] if spread is None else list(spread.metrics),
            "bound": None if spread is None else spread.bound,
            "trainings": sum(len(p.metrics) for p in self._state.probes),
            "estimate": finite(dict(self._state.candidates)[c]),
        }
        if answer == "unfinished":
            reason = (
                "training succeeds with it in FP32; the time budget ended before mpdiag could try "
                "training without it"
            )
        elif less is not None and not all(map(math.isfinite, less.metrics)):
            reason = "training diverges without it and succeeds with it"
        elif less is not None and spread is not None:
            reason = (
                f"without it the metric is {less.metrics[-1]:.4g}, outside the FP32 seeds' spread "
                f"(limit {spread.bound:.4g}); with it training succeeds"
            )
        else:
            reason = "it is in the smallest set with which training succeeds"
        return Fp32Choice(c.op, c.module, reason, evidence)


def narrow_options(plan: PrecisionPlan, *, lists: bool) -> dict[str, Any]:
    """How ``MixedPrecision`` trains a set: by the plan's level, or with everything else narrow.

    Args:
        plan: Its level applies if the lists do.
        lists: Whether the operation policy's lists apply.
    """
    if lists:
        return {"level": plan.level}
    overrides = PrecisionOverrides(operation_casts=True, low_operations=EVERYTHING_LOW)
    return {"level": "O2", "overrides": overrides}


def _finish(train: Train, trainer: MixedPrecision) -> float:
    """The metric of a training; NaN if it diverged or an operation refused the format."""
    try:
        with warnings.catch_warnings():  # drift warnings are expected here
            warnings.simplefilter("ignore", RuntimeWarning)
            return float(train(trainer))
    except TrainingDiverged:
        return math.nan
    except RuntimeError as error:
        if "without overflow" in str(error):  # a constant that the format cannot hold
            return math.nan
        raise


T = TypeVar("T")


def find_smallest(
    ranked: Sequence[T],
    good: Callable[[frozenset[T]], bool],
    on_better: Callable[[frozenset[T]], None] = lambda _: None,
) -> frozenset[T] | None:
    """A good subset from which no element can be removed, found with few tests.

    A test is a whole training, so their number is what counts. Candidates come ranked, the most
    suspicious first; if the ranking is right, the answer is a short prefix. Each needed candidate is
    found by bisection: the last element of the shortest good prefix is always needed. So m needed
    candidates among n cost about 2·m·log2(n) tests instead of n, and fewer if the ranking is good. This
    is delta debugging that exploits the order.

    Sources: Zeller and Hildebrandt, *Simplifying and Isolating Failure-Inducing Input* (2002), for
    1-minimality; Junker, *QuickXplain* (2004), for required sets that grow.

    Args:
        ranked: Candidates without repetition, those most likely needed first.
        good: Whether a subset suffices. Adding elements should not hurt: a superset of a good set
            counts as good. It may be called twice with the same set, and may raise to end the search.
        on_better: Called with every good set as soon as it is known, each smaller than the last.

    Returns:
        The empty set if nothing is needed; None if not even all candidates suffice.
    """
    needed: frozenset[T] = frozenset()
    rest = list(ranked)
    while True:
        length = _shortest_prefix(rest, needed, good, on_better)
        if length is None:
            return None
        if length == 0:
            break
        needed |= {rest[length - 1]}
        rest = rest[: length - 1]
    return _without_spare(needed, ranked, good, on_better)


def _shortest_prefix(
    items: Sequence[T],
    held: frozenset[T],
    good: Callable[[frozenset[T]], bool],
    on_better: Callable[[frozenset[T]], None],
) -> int | None:
    """Length of the shortest prefix that is good together with ``held``; None if none is.

    The length is doubled from 0 first, because the answer is expected near the front.
    """

    def passes(length: int) -> bool:
        part = held | frozenset(items[:length])
        answer = good(part)
        if answer:
            on_better(part)
        return answer

    if passes(0):
        return 0
    bad, length = 0, 1
    while True:
        length = min(length, len(items))
        if length == bad:
            return None
        if passes(length):
            break
        bad, length = length, 2 * length
    while length - bad > 1:
        middle = (bad + length) // 2
        if passes(middle):
            length = middle
        else:
            bad = middle
    return length


def _without_spare(
    found: frozenset[T],
    ranked: Sequence[T],
    good: Callable[[frozenset[T]], bool],
    on_better: Callable[[frozenset[T]], None],
) -> frozenset[T]:
    """Remove what is not needed, in case a larger set did hurt somewhere on the way."""
    if not found:
        return found
    for item in reversed(ranked):
        if item in found and good(found - {item}):
            found -= {item}
            on_better(found)
    return found
