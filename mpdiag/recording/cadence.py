"""Which steps are recorded, and how much rarer they become when recording costs too much.

After the dense beginning, of the training and of each phase in it, one step in each stratum of
``SPARSE_EVERY`` steps is recorded, at an offset hashed from the stratum's number. Equal distances
would hide what a training does in turn: of two tasks that alternate, every 20th step shows one. The
offsets depend on nothing but the step, so a recording can be repeated and ranks agree, and no random
state is touched. Offsets are hashed for a block of strata at once, and hashed again until the block
holds every phase of every period of up to 16 steps. Any 2,000 steps hold a whole block of 1,000, so
they hold every such phase, too.

A recorded step costs its own time c, an ordinary one takes p. With one step in n recorded the share
is c / (n p), so a budget b asks for n ≥ c / (b p). The cadence is thinned by powers of two alone:
of two neighbouring strata one is left out, which one is hashed, too. A thinner cadence records some of
the steps that a denser one records, never others, so that ranks which thin at different moments still
share their steps.

A training's dense beginning lasts longer where recording is cheap: up to step ``CHEAP_STEPS``, and no
longer than recording takes less than its budget.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from mpdiag.display.wording import percent
from mpdiag.errors import UsageError
from mpdiag.numerics.periods import covers_periods
from mpdiag.recording.step_clock import Step, StepListener
from mpdiag.runs import block_operands
from mpdiag.runs.answers import half_products
from mpdiag.runs.operations import encode

if TYPE_CHECKING:  # a script finds torch unloaded, as it would under plain Python
    from torch.optim import Optimizer

    from mpdiag.recording.growth import LayerGrowth
    from mpdiag.recording.ledger import Ledger
    from mpdiag.recording.operations import OperationWatch
    from mpdiag.runs.writer import RunWriter

Seconds = Callable[[], float]
DENSE_STEPS = 20
CHEAP_STEPS = 200
"""The dense beginning ends here at the latest."""
SPARSE_EVERY = 20
STRATA = 50
"""Strata of a block, whose offsets are hashed together: 1,000 steps."""
BUDGET = 0.02
ALLOWANCE = 10.0
"""Seconds that a recording may cost after its first step before anything is thinned."""
OPERATIONS_ALLOWANCE = 5.0
"""Seconds that steps with operations may take, after the first step, before they must fit the budget."""
_WINDOW = 8
_PLAIN_WINDOW = 32
_LARGEST = 1 << 20
_SECOND_OPERATIONS, _THIRD_OPERATIONS = 10, 100


@dataclass(frozen=True)
class Cadence:
    """A rule that picks steps.

    Attributes:
        every: Record exactly the steps divisible by this. None: the first ``DENSE_STEPS`` steps,
            where training changes most, or more of them (see ``budget``), then one in each stratum of
            ``SPARSE_EVERY`` steps; and the first of each phase that begins later.
        max_steps: Stop after so many recorded steps; None: never.
        budget: Share of step time that recording may take. Below it the first ``CHEAP_STEPS`` steps
            are all recorded, above it steps are left out. None: neither. With ``every`` it does not
            apply.
    """

    every: int | None = None
    max_steps: int | None = None
    budget: float | None = BUDGET

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        for name in ("every", "max_steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
        budget: object = self.budget  # callers without a type checker pass anything
        if budget is not None and (
            isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1
        ):
            message = f"budget must be a share of step time, over 0 and up to 1, not {budget!r}"
            raise UsageError(message)

    def records_in_phase(self, rounds: int, recorded: int, thin: int = 1) -> bool:
        """Whether to record a step so many rounds after a phase began, whatever its number is.

        Args:
            rounds: How many, from 0.
            recorded: How many steps were recorded before.
            thin: As for ``records``.
        """
        return self.may_add(recorded) and 0 <= rounds <= DENSE_STEPS and rounds % thin == 0

    def may_add(self, recorded: int) -> bool:
        """Whether steps outside ``records`` may be recorded, after ``recorded`` steps."""
        return self.every is None and not self.is_over(recorded)

    def is_over(self, recorded: int) -> bool:
        """Whether recording ends after ``recorded`` steps."""
        return self.max_steps is not None and recorded >= self.max_steps

    def records(self, step: int, recorded: int, thin: int = 1, *, dense: bool = False) -> bool:
        """Whether to record this step (0 is the first), after ``recorded`` recorded ones.

        Args:
            step: Its number.
            recorded: How many were recorded before.
            thin: Record this many times fewer steps; an explicit ``every`` is not thinned.
            dense: Whether the dense beginning goes on with this step.
        """
        if self.max_steps is not None and recorded >= self.max_steps:
            return False
        if self.every is not None:
            return step % self.every == 0
        if step < DENSE_STEPS:
            return step % thin == 0
        if dense:
            return True
        stratum, offset = divmod(step, SPARSE_EVERY)
        block, place = divmod(stratum, STRATA)
        return offset == _block_offsets(block)[place] and _survives(stratum, thin)


@lru_cache(maxsize=8)
def _block_offsets(block: int) -> tuple[int, ...]:
    """Offsets of a block of strata, such that its steps hold every phase of every short period."""
    for attempt in count():
        offsets = tuple(byte * SPARSE_EVERY >> 8 for byte in _hash("offsets", block, attempt))
        # Phases of the block's own steps: the first step of a block only turns them round.
        if covers_periods(SPARSE_EVERY * i + offset for i, offset in enumerate(offsets)):
            return offsets
    raise AssertionError  # pragma: no cover


def _survives(stratum: int, thin: int) -> bool:
    """Whether a stratum is the one of its ``thin`` neighbours that is recorded still."""
    level = 1
    while thin >> level:
        if stratum & 1 != _hash("half", level, stratum >> 1)[0] & 1:
            return False
        stratum >>= 1
        level += 1
    return True


def _hash(what: str, *numbers: int) -> bytes:
    """``STRATA`` bytes that look random and are the same on every machine."""
    return blake2b(repr((what, *numbers)).encode(), digest_size=STRATA).digest()


class Governor:
    """Measures recording; says how long its cadence is dense, and by which factor it must be thinned.

    Args:
        budget: Share of step time that recording may take; None measures and changes nothing.
        every: Of so many steps one is recorded, unthinned.
        clock: Seconds, monotonic.

    Attributes:
        thin: The factor, a power of two; 1 thins nothing.
        spent: Seconds that recording took so far.
        elapsed: Seconds of all steps so far, recording included.
        changes: When the factor changed: dicts of ``step`` (from which on), ``every`` (of so many
            steps one is recorded) and ``cost`` (a recorded step's own time over an ordinary step's).
        dense_until: The step with which the dense beginning ended; None while it lasts. On an
            accelerator it pauses from ``DENSE_STEPS`` on, until plain steps have shown the cost.
    """

    def __init__(
        self, budget: float | None, every: int, clock: Seconds = time.perf_counter
    ) -> None:
        self.thin = 1
        self.spent = 0.0
        self.elapsed = 0.0
        self.changes: list[dict[str, Any]] = []
        self.dense_until: int | None = None
        self._dense_reason = f"the first {DENSE_STEPS} steps are always recorded"
        self._judged, self._is_dense = 0, False
        self._ordinary, self._ordinary_spent = 0.0, 0.0  # seconds of ordinary steps but the first
        self._waits = True
        self._budget = budget
        self._every = every
        self._clock = clock
        self._depth = 0
        self._began = 0.0
        self._step_began = clock()
        self._spent_before = 0.0
        self._first = 0.0  # what recording took in the first step
        self._steps = 0
        self._operations = 0.0  # what steps in which operations were recorded took, as a whole
        self._dear = {False: 0.0, True: 0.0}  # the last one of these, without and with its effects
        self._plain: deque[float] = deque(maxlen=_PLAIN_WINDOW)
        self._recorded: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    # -- measuring ---------------------------------------------------------------------------------

    @property
    def is_measuring(self) -> bool:
        """Whether recording is at work right now."""
        return self._depth > 0

    def __enter__(self) -> None:
        """What follows is recording, not training; of nested ones the outermost counts."""
        if self._depth == 0:
            self._began = self._clock()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Recording ends, and its time is added."""
        self._depth -= 1
        if self._depth == 0:
            self.spent += max(0.0, self._clock() - self._began)

    def step_ended(
        self, step: int, *, recorded: bool, ordinary: bool, waits: bool, effects: bool = False
    ) -> None:
        """Note a step's duration, and thin if need be.

        Args:
            step: The number of the step that begins now.
            recorded: Whether the one that ended was recorded.
            ordinary: Whether that was the usual record, without operations.
            waits: Whether the host waits for what it computes. An accelerator works on after a hook
                has returned: there, recorded steps are also compared with the others as wholes.
            effects: Whether it was run again besides, to see what rounding its operations does.
        """
        now = self._clock()
        seconds, own = max(0.0, now - self._step_began), self.spent - self._spent_before
        self._step_began, self._spent_before = now, self.spent
        self._steps += 1
        self.elapsed += seconds
        self._waits = waits
        if self._steps == 1:  # it compiles, imports and allocates, once
            self._first = own
        if self._steps == 1:
            return
        if not ordinary:
            self._operations += seconds
            self._dear[effects] = seconds
            return
        self._ordinary += seconds
        self._ordinary_spent += own
        if not recorded:
            self._plain.append(seconds)
            return
        self._recorded.append((seconds, own))
        if self._budget is not None and self.spent - self._first > ALLOWANCE:
            self._adjust(step, self._budget, waits)

    def affords_operations(self, *, effects: bool) -> bool:
        """Whether recording stays inside its budget with one more step of operations.

        It is taken to cost as much as the last one did.

        Args:
            effects: Whether it is run again besides; that costs several times as much.
        """
        cost = self._dear[effects]
        return (
            self._budget is None
            or self._operations + cost <= OPERATIONS_ALLOWANCE
            or self.spent - self._first + cost <= self._budget * self.elapsed
        )

    def is_dense(self, step: int) -> bool:
        """Whether the dense beginning goes on with this step, at or after ``DENSE_STEPS``.

        It goes on while recording takes less than the budget, and never again once it has ended. Asked
        about the same step again, as a round of several optimizers does, the answer stays.
        """
        if self._budget is None or step < DENSE_STEPS:
            return False
        if self.dense_until is None and step != self._judged:
            self._judged, self._is_dense = step, self._goes_on(step, self._budget)
        return self._is_dense

    def to_json(self) -> dict[str, Any]:
        """For ``meta.json``: what was thinned, all seconds, and those that recording took."""
        dense = {"until": self.dense_until, "reason": self._dense_reason}
        return {
            "budget": self._budget,
            "dense": None if self._budget is None else dense,
            "thinned": self.changes,
            "seconds": round(self.elapsed, 3),
            "seconds_recording": round(self.spent, 3),
        }

    def words(self) -> str:
        """What was left out, as a sentence; call it only once something was."""
        first, last = self.changes[0], self.changes[-1]
        share = self.spent / max(self.elapsed, 1e-9)
        return (
            f"a recorded step costs as much as {last['cost']:.2g} steps, so from step "
            f"{first['step']} on fewer were recorded, at last one in {last['every']}; recording "
            f"took at least {percent(share, 1)} of the time, the first step and those with all "
            f"operations included (budget={self._budget:g}; every=N is never thinned)"
        )

    # -- deciding ----------------------------------------------------------------------------------

    def _goes_on(self, step: int, budget: float) -> bool:
        share = self._share()
        if share is None:
            self._dense_reason = "it is not known yet what recording costs"
            return False
        cheap = share < budget
        self._dense_reason = (
            f"recording took {percent(share, 1)} of the time of usual steps, "
            f"{'within' if cheap else 'over'} its budget of {percent(budget, 0)}"
        )
        if cheap and step < CHEAP_STEPS:
            return True
        self.dense_until = step if self._is_dense else DENSE_STEPS
        return False

    def _share(self) -> float | None:
        """Recording's share of the time of ordinary steps so far; None while it is unknown."""
        if self._ordinary <= 0.0:
            return None
        share = self._ordinary_spent / self._ordinary
        if self._waits:
            return share
        if len(self._plain) < _WINDOW or not self._recorded:
            return None
        whole = median(seconds for seconds, _ in self._recorded)
        return max(share, (whole - median(self._plain)) / whole) if whole > 0.0 else None

    def _adjust(self, step: int, budget: float, waits: bool) -> None:
        plain = median(self._plain or [seconds - own for seconds, own in self._recorded])
        cost = fmean(own for _, own in self._recorded)
        if not waits and self._plain:
            cost = max(cost, median(seconds for seconds, _ in self._recorded) - plain)
        if plain <= 0.0:
            return
        needed = cost / plain / budget / self._every
        thin = 1
        while thin < min(needed, _LARGEST):
            thin *= 2
        # Back only where it clearly suffices, so that a cost near an edge does not swing.
        if thin > self.thin or (thin < self.thin and 1.5 * needed <= thin):
            self.thin = thin
            self.changes.append(
                {"step": step, "every": self._every * thin, "cost": round(cost / plain, 4)}
            )


class GovernedPace:
    """The pace of a recording: a cadence, thinned by a governor that measures every step's turn.

    Args:
        cadence: Which steps to record.
        governor: By which factor to thin them.
        ledger: Knows how many steps were recorded.
        operations: A step in which these are recorded is no measure of others. Without ``every``
            the step from which on they are due is recorded, too.
    """

    def __init__(
        self, cadence: Cadence, governor: Governor, ledger: Ledger, operations: OperationSteps
    ) -> None:
        self._cadence = cadence
        self._governor = governor
        self._ledger = ledger
        self._operations = operations

    def wants(self, step: int) -> bool:
        """Whether to record the step of this number."""
        closed, cadence, governor = self._ledger.steps_closed, self._cadence, self._governor
        return (
            cadence.records(step, closed, governor.thin, dense=governor.is_dense(step))
            or (cadence.may_add(closed) and self._operations.ask_for(step))
            or (not cadence.is_over(closed) and self._operations.is_traced(step))
        )

    def wants_in_phase(self, rounds: int) -> bool:
        """Whether to record the step of this number in a phase."""
        return self._cadence.records_in_phase(
            rounds, self._ledger.steps_closed, self._governor.thin
        )

    @contextmanager
    def turn(self, ended: Step) -> Iterator[None]:
        """Measure what it costs to end a step and to begin the next one."""
        ordinary, effects = not self._operations.recording, self._operations.with_effects
        with self._governor:
            yield
        self._governor.step_ended(
            ended.number + 1,
            recorded=ended.recorded,
            ordinary=ordinary,
            waits=self._ledger.on_host,
            effects=effects,
        )


def next_operations(last: int) -> int:
    """The step from which on operations are recorded again: 0, 10, 100, then a quarter later each time.

    Early steps show what initial weights do, later ones what training has made of them. Wherever a
    training of more than 100 steps ends, one of them lies in its last fifth.

    Args:
        last: The step in which they were recorded last; -1 before the first.
    """
    if last < 0:
        return 0
    if last < _SECOND_OPERATIONS:
        return _SECOND_OPERATIONS
    return max(_THIRD_OPERATIONS, -(-5 * last // 4))


class OperationSteps(StepListener):
    """Picks the steps whose operations are recorded, and writes them.

    They are due at the steps of ``next_operations``, and as soon as a layer has grown beyond what they
    showed (``growth.py``). From the fourth time on they wait until the budget has room for them, and a
    step is run again only where it has room for that, too; unless their number was asked for. A step in
    which a layer has grown shows values alone: what rounding does is compared between planned steps.

    Where optimizers step one at a time, as in a GAN, a step of one shows a part of the training: each
    time operations are due, they are recorded until every optimizer has stepped. Those of the first
    step of a phase are recorded beside the planned ones.

    Args:
        watch: Records them.
        count: How many times to record so; None: as often as the budget allows.
        writer: Writes them.
        failed: Told what failed.
        optimizers: All of the training; the list may grow.
        governor: Knows what the budget allows.
        growth: Knows whether a layer has grown.
        traced: Whether a step is traced, which needs its operations.
        exact: Ask for the very step from which on they are due. Ranks, which measure their budgets
            apart, must not: they share the steps that they record.

    Attributes:
        steps: Those written.
        block_steps: Those of them with operands of matrix products, if these were asked for.
        half_products: Dtypes of half precision in which the training's own code multiplies.
        reason: Why none, or no more, are recorded; empty if there is no reason.
        fix: What to do about the reason.
        with_effects: Whether the present step is run again at its end, if its operations are recorded.
    """

    def __init__(
        self,
        watch: OperationWatch,
        count: int | None,
        writer: RunWriter,
        failed: Callable[[str, Exception], None],
        optimizers: Sequence[Optimizer] = (),
        *,
        governor: Governor,
        growth: LayerGrowth,
        traced: Callable[[int], bool] = lambda _step: False,
        exact: bool = True,
    ) -> None:
        self.steps: list[int] = []
        self.block_steps: list[int] = []
        self.half_products: set[str] = set()
        self.reason = self.fix = ""
        self._watch = watch
        self._blocks = watch.products
        self._count = count
        self._writer = writer
        self._failed = failed
        self._optimizers = optimizers
        self._governor = governor
        self._growth = growth
        self._traced = traced
        self._only_traced = False  # what is recorded now is not due besides
        self._exact = exact
        self.with_effects = True
        self._number = 0  # of the present step, or of the one that begins
        self._last = -1  # planned step in which every optimizer had been seen
        self._planned = True  # what is recorded now, or was recorded last
        self._done = 0  # of ``count``
        self._tries = 0  # steps recorded since then
        self._opening = False  # the first step of a phase is still to be recorded
        self._missing: set[int] = set()  # optimizers that have not stepped since then
        watch.usable = count != 0

    @property
    def recording(self) -> bool:
        """Whether the present step's operations are recorded."""
        return self._watch.wanted

    def ask_for(self, step: int) -> bool:
        """Whether a step should be recorded for its operations' sake, though it need not be.

        Args:
            step: The number of its round: where several optimizers take turns, no step is asked for.
        """
        return self._exact and step == self._number and self._watch.usable and self._due()

    def is_traced(self, step: int) -> bool:
        """Whether a step is recorded for its trace; ``step`` as for ``ask_for``."""
        return step == self._number and self._traced(step)

    def _due(self) -> bool:
        """Whether operations are recorded in the present step, if it is."""
        return self._tries > 0 or self._is_planned() or self._has_grown()

    def _is_planned(self) -> bool:
        if self._count is not None and self._done >= self._count:
            return False
        due = self._number >= next_operations(self._last)
        return due and (self._early or self._governor.affords_operations(effects=False))

    def _has_grown(self) -> bool:
        asks = self._growth.passed and self._count is None and self._last >= _SECOND_OPERATIONS
        return asks and self._governor.affords_operations(effects=False)

    @property
    def _early(self) -> bool:
        """Whether planned operations of the present step are recorded whatever they cost."""
        return self._count is not None or self._last < _THIRD_OPERATIONS

    def refuse(self, reason: str, fix: str) -> None:
        """Record none at all, for this reason."""
        if self._count != 0:
            self.reason, self.fix, self._watch.usable = reason, fix, False

    def forgo(self, reason: str, fix: str) -> None:
        """Record none from now on; those of earlier steps stay."""
        if self._count == 0:
            return
        self._count, self.reason, self.fix = 0, reason, fix
        self._watch.stop()

    def step_began(self, step: Step) -> None:
        """Whether this step's operations are recorded."""
        self._opening |= step.opens
        self._number = step.number
        if self._tries == 0:
            self._planned = self._is_planned()
        due = step.recorded and self._count != 0 and (self._opening or self._due())
        self._only_traced = not due and step.recorded and self._traced(step.number)
        due = due or self._only_traced
        self.with_effects = self._opening or (
            self._planned and (self._early or self._governor.affords_operations(effects=True))
        )
        self._watch.begin(
            step.number, due, effects=self.with_effects, measured=not self._only_traced
        )
        if self._tries == 0:
            self._missing = {id(o) for o in self._optimizers}

    def forward_began(self) -> None:
        """Record from here on."""
        self._watch.resume()

    def evaluation_ended(self) -> None:
        """One evaluation of a closure shows what the others do; a search along a line makes dozens."""
        self._watch.rest()

    def step_ended(self, step: Step) -> None:
        """Write the operations of the step, if they were recorded."""
        self._number = step.number + 1
        if not self._watch.wanted:
            return
        try:
            left_alone, found = self._watch.left_backward, self._watch.end()
            if self._only_traced:
                return
            if found and (left_alone or any(o.phase == "backward" for o in found)):
                self._writer.append_part("operations", encode(found))
                operands = self._watch.operands()
                if operands:
                    self._writer.append_part("blocks", block_operands.encode(operands))
                    self.block_steps.append(step.number)
                self.half_products.update(half_products(found).values())
                self.steps.append(step.number)
                self._growth.operations_recorded(step.number)
                self._note_written(step.number)
        except Exception as error:  # noqa: BLE001 - training goes on, and so does the recording
            self._failed("writing operations", error)
            self._opening = False  # the next planned step tries again, and none before it
            self._growth.operations_recorded(step.number)
            self._note_done(step.number)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """One optimizer less to wait for."""
        if self._watch.wanted:
            self._missing.discard(id(optimizer))

    def _note_written(self, step: int) -> None:
        """Wait for further optimizers, but not for one that hardly ever steps."""
        if self._opening:
            self._opening = False
            return
        self._tries += 1
        if not self._missing or self._tries >= len(self._optimizers):
            self._note_done(step)

    def _note_done(self, step: int) -> None:
        self._done, self._tries = self._done + 1, 0
        if self._planned:
            self._last = step

    def stopped(self) -> None:
        """Record no operations any more."""
        self._watch.stop()

    def to_json(self) -> dict[str, Any]:
        """For ``meta.json``: the steps, why there are no others, and what to do for others."""
        return {"steps": self.steps, "reason": self.reason, "fix": self.fix}

    def blocks_to_json(self) -> dict[str, Any] | None:
        """For ``meta.json``: the same of operands, and what has none; None if not asked for."""
        if self._blocks is None:
            return None
        unseen = list(self._blocks.unseen.values())
        return {"steps": self.block_steps, "reason": self.reason, "not_recorded": unseen}
