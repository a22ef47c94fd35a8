"""One step of several ranks side by side: who computes longest, and who waits for whom.

Ranks of one run meet in their collectives, so a step takes about as long on each. The slowest rank
is the one with the most time outside of exposed collectives (computing, copying or idle): the others
wait for it inside of theirs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mpdiag.errors import UsageError
from mpdiag.files.documents import finite
from mpdiag.tensorcores.summary import milliseconds
from mpdiag.tensorcores.timeline.sweep import Timeline, Window
from mpdiag.tensorcores.trace_profile import Profile

SCHEMA_VERSION = 1
ALIKE = 0.2
"""Share of kernels' names that two ranks of one run have in common at least (pipeline stages differ)."""
APART_US = 60e6
"""How far apart two ranks of one run may have been recorded, beyond ten times their length."""
_RANK = re.compile(r"rank[_\-.]?(\d{1,6})", re.IGNORECASE)


@dataclass(frozen=True)
class RankStep:
    """A step of one rank.

    Attributes:
        rank: Its number.
        trace: Its file.
        step: The step; the whole trace where no rank's steps are marked.
        tensor_core_fraction: Share of the trace's kernel time on Tensor Cores.
    """

    rank: int
    trace: str
    step: Window
    tensor_core_fraction: float

    @property
    def own_us(self) -> float:
        """Time outside of exposed collectives."""
        return self.step.wall_us - self.step.exposed_us

    def to_json(self) -> dict[str, Any]:
        """An entry of ``ranks``."""
        step = self.step
        return {
            "rank": self.rank,
            "trace": self.trace,
            "wall_us": step.wall_us,
            "own_us": self.own_us,
            "compute_us": step.compute_us,
            "collective_us": step.collective_us,
            "exposed_collective_us": step.exposed_us,
            "overlapped_collective_us": max(0.0, step.collective_us - step.exposed_us),
            "idle_us": step.idle_us,
            "tensor_core_fraction": self.tensor_core_fraction,
        }


@dataclass(frozen=True)
class RankComparison:
    """One step of several ranks.

    Attributes:
        step: Its name; "" for the whole traces.
        ranks: By number.
        world_size: How many ranks the run has; None where the traces do not say.
    """

    step: str
    ranks: tuple[RankStep, ...]
    world_size: int | None

    @property
    def slowest(self) -> RankStep:
        """The rank with the most time outside of exposed collectives."""
        return max(self.ranks, key=lambda r: r.own_us)

    @property
    def lead_us(self) -> float:
        """How much longer the slowest is busy than the median rank."""
        return self.slowest.own_us - median(r.own_us for r in self.ranks)

    @property
    def bound(self) -> float:
        """The speed-up of the step if the slowest were as fast as the median, at most."""
        wall = max(r.step.wall_us for r in self.ranks)
        kept = wall - self.lead_us
        return wall / kept if kept > 0 else float("inf")

    @property
    def verdict(self) -> str:
        """What the ranks say, in one sentence."""
        slow, given = self.slowest, len(self.ranks)
        of = f"{given} of {self.world_size} ranks" if self.world_size else f"{given} ranks"
        where = f"step {self.step}" if self.step else "the whole traces"
        if not any(r.step.collective_us for r in self.ranks):
            return f"{of}, {where}: no collective ran, so no rank waits for another"
        return (
            f"{of}, {where}: rank {slow.rank} is the slowest, with {milliseconds(slow.own_us)} outside "
            f"of exposed collectives, {milliseconds(self.lead_us)} more than the median rank "
            f"(at most {self.bound:.2f}×)"
        )

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag profile --json`` for several ranks."""
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "step": self.step or None,
            "world_size": self.world_size,
            "slowest": self.slowest.rank,
            "lead_us": self.lead_us,
            "bound": finite(self.bound),
            "ranks": [r.to_json() for r in self.ranks],
            "findings": [],
        }


def compare_ranks(profiles: Sequence[Profile]) -> RankComparison:
    """One step that all ranks recorded: the usual one of the slowest trace.

    Args:
        profiles: One for each rank, in any order.

    Raises:
        UsageError: If they are not of one run, or share no step.
    """
    ranks = {p.path: _rank(p) for p in profiles}
    _refuse_mixes(profiles, ranks)
    timelines = {p.path: _timeline(p) for p in profiles}
    names = [[step.name for step in t.steps] for t in timelines.values()]
    if not any(names):
        chosen = {path: timeline.whole for path, timeline in timelines.items()}
        return _comparison("", profiles, ranks, chosen)
    common = set(names[0]).intersection(*names[1:])
    first = names[0][0] if names[0] else ""
    later = [n for n in names[0] if n in common and n != first] or [
        n for n in names[0] if n in common
    ]
    if not later:
        raise UsageError("the traces share no step: record the same steps on every rank")
    lengths = {n: max(_step(t, n).wall_us for t in timelines.values()) for n in later}
    name = sorted(later, key=lambda n: lengths[n])[(len(later) - 1) // 2]
    chosen = {path: _step(timeline, name) for path, timeline in timelines.items()}
    return _comparison(name, profiles, ranks, chosen)


def _comparison(
    step: str, profiles: Sequence[Profile], ranks: dict[str, int], chosen: dict[str, Window]
) -> RankComparison:
    steps = [
        RankStep(ranks[p.path], p.path, chosen[p.path], p.fraction("tensor_core")) for p in profiles
    ]
    size = next((p.world_size for p in profiles if p.world_size), None)
    return RankComparison(step, tuple(sorted(steps, key=lambda r: r.rank)), size)


def _step(timeline: Timeline, name: str) -> Window:
    return next(step for step in timeline.steps if step.name == name)


def _timeline(profile: Profile) -> Timeline:
    if profile.timeline is None:
        raise UsageError(
            f"{profile.path} does not say when its kernels ran, so its steps cannot be compared"
        )
    return profile.timeline


def _rank(profile: Profile) -> int:
    """The rank that recorded a trace: by the trace itself, else by its file's name."""
    if profile.rank is not None:
        return profile.rank
    found = _RANK.search(Path(profile.path).name)
    if found is None:
        raise UsageError(
            f"{profile.path} does not say which rank recorded it: name the files rank0.json, "
            "rank1.json and so on"
        )
    return int(found[1])


def _refuse_mixes(profiles: Sequence[Profile], ranks: dict[str, int]) -> None:
    """Refuse traces that cannot be of one run, in one sentence."""
    first = profiles[0]
    seen: dict[int, str] = {}
    for profile in profiles:
        rank = ranks[profile.path]
        if rank in seen:
            message = f"{seen[rank]} and {profile.path} are both of rank {rank}: name one of them"
            raise UsageError(message)
        seen[rank] = profile.path
        why = _unlike(first, profile)
        if why:
            raise UsageError(f"{first.path} and {profile.path} are not of one run: {why}")


def _unlike(a: Profile, b: Profile) -> str:
    """Why two traces are not of one run; "" where nothing speaks against it."""
    sizes = {p.world_size for p in (a, b) if p.world_size}
    if len(sizes) > 1:
        return f"one has {a.world_size} ranks, the other {b.world_size}"
    if (a.timeline is None or not a.timeline.steps) != (b.timeline is None or not b.timeline.steps):
        return "only one of them marks its steps"
    names = [{k.name for k in p.kernels} for p in (a, b)]
    both = names[0] & names[1]
    if len(both) < ALIKE * min(map(len, names)):
        return f"they have {len(both)} of {len(names[0] | names[1])} kernels in common"
    if a.timeline is not None and b.timeline is not None:
        early, late = sorted((a.timeline.whole, b.timeline.whole), key=lambda w: w.start_us)
        apart = late.start_us - early.end_us
        if apart > APART_US + 10 * max(early.wall_us, late.wall_us):
            return f"they were recorded {apart / 60e6:,.0f} minutes apart"
    return ""
