"""``mpdiag diff``: the first module and operation where two runs part beyond rounding.

Steps are judged one after another, each from its inputs over the forward and the backward pass to the
gradients and updates. From the second traced step on the weights differ by what came before: the
spreads of that step grow with how far the weights are apart, and no further than ``_USUAL`` times what
the tensors before it show, for as long as that is small beside the values. After that nothing can be
said.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from posixpath import commonpath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.difference.alignment import Edit, Pair, aligned, renamed, whole_batches
from mpdiag.analysis.difference.lower_formats import fp8_side, lower_formats
from mpdiag.analysis.difference.pieces import Layout, layout_of, matched, shared
from mpdiag.analysis.difference.sides import Steps, Tensor
from mpdiag.analysis.difference.tolerance import (
    FACTOR,
    Apart,
    apart,
    distance,
    roundoff,
    size_of,
    spread,
    typical,
)
from mpdiag.files.documents import finite
from mpdiag.numerics.autocast_lists import MOVES
from mpdiag.numerics.trimmed import DROPPED, MANY, is_few, trimmed_rms

SCHEMA_VERSION = 1
_TOO_FAR = 0.5
"""Tolerance beside the size of a tensor from which on nothing can be said of it."""
_USUAL = 32.0
"""How many times further apart than most tensors before it in its step weights may take a tensor."""
_ENOUGH = 8
"""Tensors before it from which that is known."""
_CLEAR = 0.1
"""Relative uncertainty of a gradient from which on nothing is said of an element's update."""
_LATER = 3.0
"""How many times further than the first step's twin shows a later step's may come apart."""
_FOLLOWS = 8.0
"""Relative error of an update for each of its gradient: of moments, roots and quotients together."""
_SEEN = 4.0
"""How many times further than in the root mean square a single gradient may be apart."""
_FEWEST = 4
"""Elements with clear gradients of which an update is judged, at least."""
_INITIAL = 1000
"""Operations by which a pass before the training may have computed initial weights."""
_TIMES = 4.0
"""How many times as large as the other side's a first update may be, beside its gradient."""
_CHANCE = 2.0
"""Ratio of difference to tolerance that few values may reach by chance."""
_TURNED = 4
"""Where choices were turned, one value in this many is left out: all those of a row go along."""
_ONE_MAY = 0.1
"""Signs that rounding turns on average from which on one of them may turn."""
_PLAIN = 30.0
"""Ratio of difference to tolerance from which on what is made of a tensor would show it."""
_MIXED = 4.0
"""By how much less rows that were turned move another row than they move a mean."""

_Key = tuple[str, "int | None"]
"""A parameter and a rank."""


@dataclass(frozen=True)
class Judged:
    """A tensor of both sides, judged.

    Attributes:
        pair: The tensor.
        step: The step.
        rank: Of the furthest apart; None where ranks hold it together, or there is one.
        apart: How far apart, and what rounding explains.
        possible: How far rounding may have taken it at most, beside its size.
        whole: Whether rounding explains its largest differences, too.
        few: Whether rounding explains all but its largest differences, of one value in eight.
        passed: Whether it differs, and nothing that is made of it does.
    """

    pair: Pair
    step: int
    rank: int | None
    apart: Apart
    possible: float = 0.0
    whole: bool = True
    few: bool = False
    passed: bool = False

    @property
    def widened(self) -> Judged:
        """The same, with all that weights may have moved it in its tolerance."""
        tolerance = max(self.apart.tolerance, self.possible)
        return replace(self, apart=replace(self.apart, tolerance=tolerance))


@dataclass(frozen=True)
class Culprit:
    """Where two runs part.

    Attributes:
        module, op, phase, file, line, code, rank, step: Where; ``op`` is the operation, or what parts.
        kind: Of the tensor, see ``TraceRow``.
        name: Of the parameter, if it is one.
        difference, tolerance: Beside the tensor's size.
        fp8: The side that has FP8's values there alone, ``A`` or ``B``; else empty.
    """

    module: str | None
    op: str
    phase: str
    file: str
    line: int
    code: str
    rank: int | None
    step: int
    kind: str
    name: str
    difference: float
    tolerance: float
    fp8: str = ""

    def to_json(self) -> dict[str, Any]:
        """All of it; an infinite figure is null."""
        document: dict[str, Any] = finite(vars(self))
        return document


@dataclass(frozen=True)
class RunDifference:
    """Where two runs part, or that they agree.

    Attributes:
        first: Where; None where they agree.
        judged: Every tensor compared, in order.
        edits: Operations that one side has alone, of the first step.
        last_step: The last step about which something can be said; None where there is none.
        cut_off: The step from which on nothing can be said, though both traced it; None without one.
        before: How many tensors come before ``first``, and agree.
        missing: What was not compared, and why.
        environment: What differs of versions, devices and seeds.
        settings: What differs of the optimizers' settings.
    """

    first: Culprit | None
    judged: Sequence[Judged]
    edits: Sequence[Edit]
    last_step: int | None
    cut_off: int | None
    before: int
    missing: Sequence[str] = ()
    environment: Sequence[str] = ()
    settings: Sequence[str] = ()

    @property
    def agree(self) -> bool | None:
        """Whether the runs agree up to rounding; None where nothing could be compared."""
        if self.first is not None:
            return False
        return True if any(j.pair.certain for j in self.judged) else None

    @property
    def coarse(self) -> Judged | None:
        """The first tensor of a forward pass that rounding alone may change by half of its size."""
        first = [j for j in self.judged if j.pair.certain and j.step == self.judged[0].step]
        far = (j for j in first if j.apart.tolerance > _TOO_FAR and j.pair.a.phase == "forward")
        return next(far, None)

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag diff --json``."""
        certain, coarse = [j.apart for j in self.judged if j.pair.certain], self.coarse
        ratios = [apart.ratio for apart in certain]
        different = [apart.ratio for apart in certain if apart.difference]
        return {
            "schema_version": SCHEMA_VERSION,
            "agree": self.agree,
            "first": None if self.first is None else self.first.to_json(),
            "compared": {
                "tensors": len(ratios),
                "different": len(different),
                "agreed_before": self.before,
                "last_step": self.last_step,
                "cannot_say_from": self.cut_off,
                "largest_ratio": finite(max(ratios, default=0.0)),
                "median_ratio": finite(float(np.median(different or [0.0]))),
            },
            "edits": [
                {
                    "module": e.module,
                    "phase": e.phase,
                    "op": e.op,
                    "side": e.side,
                    "count": len(e.tensors),
                    "file": e.tensors[0].file,
                    "line": e.tensors[0].line,
                }
                for e in self.edits
            ],
            "coarse": coarse and {"module": coarse.pair.b.module, "op": coarse.pair.b.name},
            "environment": list(self.environment),
            "settings": list(self.settings),
            "not_compared": list(self.missing),
        }


def difference(a: Steps, b: Steps) -> RunDifference:
    """Compare two runs, step by step.

    Args:
        a: The traced steps of one.
        b: Those of the other.
    """
    a = renamed(a, b)
    judged: list[Judged] = []
    edits: list[Edit] = []
    shared = [step for step in a if step in b]
    history = _Gradients()
    before: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())
    last = cut_off = None
    for number, step in enumerate(shared):
        ours, theirs = whole_batches(a[step], b[step])
        pairs, found = aligned(ours, theirs)
        kept = _carried(before[0], ours) | _carried(before[1], theirs)
        pairs = [replace(p, carried={id(p.a), id(p.b)} <= kept) for p in pairs]
        before = ours, theirs
        edits = edits or found
        layout = layout_of(pairs)
        later = bool(number or step)
        ulps = _weights_apart(pairs, history.possible)
        # Initial weights that are further apart have a fault, which excuses nothing.
        rounded = ulps <= FACTOR * _initial(1.0, 1.0)
        moved = _Moved(ulps if later or rounded else 0.0)
        signs = _Signs({t.order: t.reads for t in ours if t.phase == "forward"})
        shown = [  # a compiled side shows none
            [t.order for t in side if t.kind == "operation" and t.name not in MOVES]
            for side in (ours, theirs)
        ]
        raw = list(_judged(pairs, step, layout, shown, moved, history, signs, later=later))
        edited = any(e.inside for e in found)
        edited |= any(p.a.code != p.b.code for p in pairs if p.a.module is not None)
        some = _without_effect(raw, raw, (ours, theirs), edited=edited)
        place, explained = _first(some), False
        if place is not None and some[place].pair.a.kind == "weight":
            some = _weights_where_read(some, ours)
            place = _first(some)
        if later and place is not None:
            wide = [j.widened for j in raw]
            wide = _without_effect(wide, raw, (ours, theirs), edited=edited)
            explained = _first(wide) != place
            if explained:  # a fault behind it may move more than that
                some, place = wide, _first(wide)
        given = place is not None and some[place].pair.a.kind == "input"  # not made of weights
        if later and not given and ((explained and place is None) or _beyond_judgement(some)):
            cut_off = step
            break
        judged += some
        last = step
        if place is not None:
            place, everywhere = _off(some, place, layout)
            first = _culprit(some[place], (ours, theirs, found), _known(some))
            first = replace(first, module=None, name="") if everywhere else _lone(first, found)
            earlier = judged[: len(judged) - len(some) + place]
            agreeing = sum(j.pair.certain and j.apart.ratio <= 1.0 for j in earlier)
            return RunDifference(first, judged, edits, last, None, agreeing)
    return RunDifference(None, judged, edits, last, cut_off, sum(j.pair.certain for j in judged))


def _judged(
    pairs: Sequence[Pair],
    step: int,
    layout: Layout,
    shown: Sequence[Sequence[int]],
    moved: _Moved,
    history: _Gradients,
    signs: _Signs,
    *,
    later: bool,
) -> Iterable[Judged]:
    """Every pair of a step, judged; ``later`` than the training's first one, weights are apart."""
    before: dict[_Key, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    returned = False
    coarsest = [0.0, 0.0]  # what is made of BF16 is no finer in FP32
    lower = lower_formats(pairs)
    for pair in pairs:
        a, b = pair.a, pair.b
        epsilon = [lower.get(id(t), roundoff(t.dtype, t.operand_format)) for t in (a, b)]
        coarsest = [max(both) for both in zip(coarsest, epsilon, strict=True)]
        # Where it comes from was not traced, as of a model that runs in eval mode first.
        given = a.kind == "operation" and a.phase == "forward" and not (a.reads or b.reads)
        given &= max(coarsest) > max(epsilon)
        twins = [None if given or id(t) in lower else t.spread for t in (a, b)]
        # Data is exact but for a conversion. Compiled, another model may have made it.
        exact = a.kind == "weight" or (a.kind == "input" and not (a.reads or b.reads))
        exact &= not (returned and a.module and epsilon[0] and epsilon[1])
        depth = max(map(bisect, shown, (a.order - 1, b.order - 1)))
        fine = min(max(epsilon), roundoff("float32")) if a.kind in ("weight", "input") else 0.0
        drift, furthest = moved.of(a, b)
        if pair.carried or (a.kind == "weight" and later):
            before |= {(a.name, rank): (x[0], y[0]) for rank, x, y, _ in matched(a, b, layout)}
            continue  # what the steps before have left
        for rank, ours, theirs, numel in matched(a, b, layout):
            key = a.name, rank
            size = size_of(ours[0], theirs[0]) if ours[0].size else typical(ours, theirs, numel)
            if a.kind == "weight":
                before[key] = ours[0], theirs[0]
            if a.kind == "updated_weight":
                if key in before:
                    found = history.update(key, (a, b), before[key], (ours[0], theirs[0]))
                    if found is not None:
                        yield Judged(pair, step, rank, found)
                continue
            chosen = size * _of_turned(pair, ours[0].size)
            far = spread(twins, size, 0 if given else depth, coarsest)
            far = far or later * size * max(epsilon)  # equal weights round alike, later ones do not
            far *= _LATER if later else 1.0
            moves = math.hypot(far, chosen, drift, size * signs.turned(a, None in twins))
            room = size * max(epsilon) * (a.dtype != b.dtype) if exact else moves
            room = max(room, _initial(size, fine) if a.kind == "weight" else size * fine)
            if a.kind == "weight_grad":
                history.note(key, ours[0], theirs[0], FACTOR * room)
            rows = pair.rows and pair.turned >= 1 / MANY
            found = apart(ours, theirs, room, numel, _TURNED if rows else DROPPED)
            found = replace(found, tolerance=0.0) if fp8_side(pair, found.difference) else found
            signs.apart[a.order] = min(found.difference, found.tolerance)
            if pair.certain and not exact:
                moved.note(found.difference * size)
            most = found.tolerance * (size or 1.0)
            whole = distance(ours[0], theirs[0], MANY + 1) <= most
            few = (
                not (exact or None in twins) and distance(ours[0], theirs[0], DROPPED // 2) <= most
            )
            reach = 0.0 if exact else FACTOR * furthest / (size or 1.0)
            yield Judged(pair, step, rank, found, reach, whole, few)
        returned |= a.kind == "output"


def _initial(size: float, epsilon: float) -> float:
    """How far rounding may have moved initial weights that a pass before the training computed."""
    return spread((None, None), size, _INITIAL, [epsilon])


def _of_turned(pair: Pair, values: int) -> float:
    """What turned choices move of a tensor, beside its size.

    A mean over rows moves by the share of those turned. Rows that were turned are left out, and move
    others by little, as in attention. Gradients of weights are sums over rows, of independent signs.
    """
    if not pair.rows:
        return math.sqrt(pair.turned)
    return pair.turned / _MIXED if values >= MANY else pair.turned


class _Gradients:
    """What is known of gradients so far, of each rank's by itself: the updates follow from them.

    Attributes:
        possible: By parameter and rank, how far rounding may have moved weights: a root mean square.
    """

    def __init__(self) -> None:
        self.possible: dict[_Key, float] = {}
        self._apart: dict[_Key, NDArray[np.float64]] = {}
        self._seen: dict[_Key, float] = {}
        self._present: dict[_Key, NDArray[np.float64]] = {}
        self._larger: dict[_Key, float] = {}  # how many times one side's is

    def note(self, key: _Key, a: NDArray[np.float64], b: NDArray[np.float64], room: float) -> None:
        """A parameter's gradient on both sides, and its tolerance."""
        self._apart[key] = self._apart.get(key, 0.0) + np.abs(a - b) + room
        self._seen[key] = self._seen.get(key, 0.0) + size_of(a - b)
        self._present[key] = np.abs(a)
        least, most = sorted((size_of(a), size_of(b)))
        self._larger[key] = most / least if least and np.isfinite([a, b]).all() else math.inf

    def update(
        self,
        key: _Key,
        sides: tuple[Tensor, Tensor],
        before: tuple[NDArray[np.float64], NDArray[np.float64]],
        after: tuple[NDArray[np.float64], NDArray[np.float64]],
    ) -> Apart | None:
        """Compare a parameter's update where its gradient is clear, or by its size the first time."""
        ours, theirs = after[0] - before[0], after[1] - before[1]
        present = self._present.get(key)
        if present is None or present.shape != ours.shape or not ours.size:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            unclear = self._apart[key] / present
            doubt = _SEEN * self._seen[key] / present
            room = np.abs(ours) * _FOLLOWS * unclear
        # An optimizer may follow the sign of a gradient alone, which then is any.
        doubt = np.where(np.isnan(doubt), 0.0, np.minimum(doubt, 1.0))
        moved = float(np.sqrt(np.mean(np.square(2.0 * doubt * ours))))
        self.possible[key] = self.possible.get(key, 0.0) + moved
        clear = np.isfinite(unclear) & (unclear < _CLEAR)
        epsilon = max(roundoff(t.dtype) for t in sides)
        rounded = FACTOR * epsilon * np.abs(after[0])
        if clear.sum() < min(_FEWEST, clear.size):
            later = sides[0].step > 0  # it follows the gradients of steps before, too
            return None if later else self._sizes(key, ours, theirs, size_of(rounded))
        room += rounded
        size = size_of(ours[clear], theirs[clear]) or 1.0
        tolerance = size_of(room[clear])
        return Apart(trimmed_rms((ours - theirs)[clear]) / size, tolerance / size)

    def _sizes(
        self, key: _Key, a: NDArray[np.float64], b: NDArray[np.float64], rounded: float
    ) -> Apart | None:
        """Compare how large two updates are; None where a gradient is zero or not finite."""
        least, most = sorted((size_of(a), size_of(b)))
        if not (most and self._larger[key] < math.inf):
            return None
        lost = 1.0 - 1.0 / (_TIMES * self._larger[key]) + rounded / most
        return Apart(1.0 - least / most, lost)


class _Signs:
    """How far signs that rounding turns in ReLUs move gradients: a twin turns none if finer, or few.

    Args:
        reads: Of each tensor of the forward pass, by ``order``.
    """

    def __init__(self, reads: Mapping[int, Sequence[int]]) -> None:
        self.apart: dict[int, float] = {}  # by rounding, beside the size of a tensor, by ``order``
        self._reads, self._moved = reads, 0.0

    def turned(self, t: Tensor, finer: bool) -> float:
        """How far that moves a tensor, beside its size; to be asked in the order of the pass."""
        read = (i for i in t.reads if i in self._reads and t.name == "threshold_backward")
        behind = (self.apart.get(i, 0.0) for one in read for i in (one, *self._reads[one]))
        # Normal values apart by a share d of their size differ in sign in d / π of them. Half pass.
        share, values = max(behind, default=0.0) / math.pi, max(math.prod(t.shape), 1)
        if _ONE_MAY <= share * values < (math.inf if finer else MANY / math.pi):
            self._moved = max(self._moved, math.sqrt(2.0 * max(share, 1.0 / values)))
        return self._moved


class _Moved:
    """How far weights that are apart move the tensors of a step, one after another.

    A twin moves each value by one ulp of its own format, which may be coarser than the weights'.

    Args:
        ulps: How far they are apart, in ulps of the side that has them in the finer format.
    """

    def __init__(self, ulps: float) -> None:
        self._ulps = ulps
        self._spread = 0.0  # of the tensor at hand
        self._seen: list[float] = []  # how far tensors are apart beside their spread, sorted
        self._roundoffs = {"weight": [0.0, 0.0], "computed": [0.0, 0.0]}  # the largest so far

    def note(self, difference: float) -> None:
        """How far the tensor at hand is apart."""
        if 0.0 < difference < math.inf and self._spread:
            insort(self._seen, difference / self._spread)

    def of(self, a: Tensor, b: Tensor) -> tuple[float, float]:
        """How far that moves a tensor, and at most: as in the twin, for each ulp of the weights."""
        for side, t in enumerate((a, b)):
            found = self._roundoffs["weight" if t.kind == "weight" else "computed"]
            if t.kind in ("weight", "operation", "output"):
                found[side] = max(found[side], roundoff(t.dtype, t.operand_format))
        held = min(self._roundoffs["weight"])
        each = [
            (max(1.0, computed / held) if held else 1.0, t.spread)
            for t, computed in zip((a, b), self._roundoffs["computed"], strict=True)
            if t.spread is not None
        ]
        coarser, moved = min(each, default=(1.0, 0.0))  # the finer side shows the weights' share
        self._spread = moved / coarser
        usual = self._seen[len(self._seen) // 2] if len(self._seen) >= _ENOUGH else math.inf
        return min(self._ulps, _USUAL * usual) * self._spread, self._ulps * self._spread


def _carried(before: Sequence[Tensor], step: Sequence[Tensor]) -> set[int]:
    """Inputs that the step before has returned, as the state of a recurrent layer, by ``id``."""
    returned = {(t.shape, t.pieces[0].values.tobytes()) for t in before if t.kind == "output"}
    given = (t for t in step if t.kind == "input" and not t.reads and roundoff(t.dtype))
    return {id(t) for t in given if (t.shape, t.pieces[0].values.tobytes()) in returned}


def _weights_apart(pairs: Sequence[Pair], possible: Mapping[_Key, float]) -> float:
    """How far the weights are apart, or may be, in ulps: those of the parameter furthest apart.

    A bias is added to products of its module's weights, so its ulps are of these if they are larger:
    those of keys have no gradient but rounding, which Adam makes as large as any other.
    """
    furthest = 0.0
    far = dict(sorted((name, moved) for (name, _), moved in possible.items()))  # the largest
    kept = [p for p in pairs if p.a.kind == "weight" or p.carried]
    held = [(p, *shared(p.a.pieces[0], p.b.pieces[0])) for p in kept]
    weights = [(p, a, b) for p, (a, _), (b, _) in held]
    sizes = dict(sorted((p.a.module, size_of(a)) for p, a, _ in weights))  # the largest
    for pair, a, b in weights:
        epsilon = min(roundoff(pair.a.dtype), roundoff(pair.b.dtype))
        if epsilon and a.shape == b.shape and a.any():
            seen = float(np.sqrt(np.mean(np.square(a - b))))
            added = "bias" in pair.a.name.rpartition(".")[2]
            size = sizes[pair.a.module] if added else size_of(a)
            ulps = max(seen, far.get(pair.a.name, 0.0)) / (epsilon * size)
            furthest = max(furthest, ulps)
    return furthest


def _beyond_judgement(judged: Sequence[Judged]) -> bool:
    """Whether rounding may by now have moved most tensors of a step as far as they are large."""
    found = [j for j in judged if j.pair.a.kind not in ("weight", "input", "updated_weight")]
    lost = sum(max(j.apart.tolerance, j.possible) > _TOO_FAR for j in found)
    return bool(found) and 2 * lost > len(found)


def _first(judged: Sequence[Judged]) -> int | None:
    """The first one beyond rounding; of a doubtful one only where the next certain one is, too."""
    waiting: int | None = None
    for i, one in enumerate(judged):
        if one.apart.ratio > 1.0:
            waiting = i if waiting is None else waiting
            if one.pair.certain and not _by_chance(one):
                return waiting
        elif one.pair.certain:
            # Gradients of a sum or mean, all of one value, show nothing of the forward pass, nor does
            # what the backward pass computes of inputs alone, as a softmax.
            t, values = one.pair.a, one.pair.a.pieces[0].values
            silent = (values == values[:1]).all() or (t.kind == "operation" and not t.from_loss)
            waiting = waiting if t.phase == "backward" and silent else None
    return None


def _weights_where_read(judged: list[Judged], step: Sequence[Tensor]) -> list[Judged]:
    """Weights that differ, put where they are first read: a pass before may have computed them.

    It computes vectors. If a matrix differs, it was drawn otherwise, and weights stay first.
    """
    beyond = {id(j): j.pair.a for j in judged if j.pair.a.kind == "weight" and j.apart.ratio > 1.0}
    if any(sum(n > 1 for n in t.shape) > 1 for t in beyond.values()):
        return judged
    shown = [t for t in step if t.phase == "forward" and t.kind in ("operation", "output")]

    def place(one: Judged) -> float:
        t, inside = one.pair.a, f"{one.pair.a.module or ' '}."  # of the model, all would be inside
        if t.phase != "forward":
            return math.inf
        if t.kind == "input" and not (t.module or t.reads):
            return -math.inf
        if id(one) not in beyond:
            return t.order
        read = (s.order for s in shown if t.order in s.reads or f"{s.module}.".startswith(inside))
        return min(read, default=0)

    return sorted(judged, key=place)


def _by_chance(one: Judged) -> bool:
    """Whether a tensor may be beyond rounding because its twin came near: few values show a twin."""
    return (
        is_few(one.pair.a.pieces[0].values)
        and one.apart.ratio <= _CHANCE
        and one.pair.a.kind not in ("weight", "input", "updated_weight")
    )


def _without_effect(
    judged: Sequence[Judged],
    raw: Sequence[Judged],
    sides: Sequence[Sequence[Tensor]],
    *,
    edited: bool,
) -> list[Judged]:
    """Some tensors that differ are not certainly the same ones if nothing that is made of them differs.

    So it is of sums, summands of a sum that agrees, and what is apart at few positions, which a twin
    shows badly. If modules were edited, they may hand on something else, or exchange axes: so it is of
    what is further apart than could remain hidden, too. A loss that does not agree shows them all.

    Args:
        judged: The tensors of a step.
        raw: The same, without what weights may have moved in their tolerances.
        sides: The step on both sides.
        edited: Whether their modules' code is another one.
    """
    far = [j for j in judged if j.apart.ratio > 1.0]
    found = [j for j in far if j.pair.certain]
    beyond = {id(t) for j in found for t in (j.pair.a, j.pair.b)}
    known = _known(judged) - {id(t) for j in far for t in (j.pair.a, j.pair.b)}
    plain = {"forward"} if edited and all(map(_losses, sides)) else set()
    plain |= {"backward"} if plain and _as_steep(judged, sides) else set()
    computed = [j for j in found if "weight" not in j.pair.a.kind]
    few = {id(t) for j in computed if j.few for t in (j.pair.a, j.pair.b)}
    computed = [j for j in computed if j.pair.a.dtype == j.pair.b.dtype]  # a lower format does less
    clear = {id(j.pair) for j in raw if j.apart.ratio > _PLAIN and j.pair.a.phase in plain}
    other = (j for j in computed if id(j.pair) in clear)
    other = (j for j in other if j.pair.a.kind != "input" or _norms_agree(j.pair))
    passed = {id(t) for j in other for t in (j.pair.a, j.pair.b)}
    losses = {id(t) for side in sides for t in _losses(side) if id(t) not in known}
    shown: set[int] = set()
    for side in sides:
        read: set[tuple[int, int]] = set()
        felt: set[tuple[int, int]] = set()
        summands: set[tuple[int, int]] = set()
        for s in sorted(side, key=lambda s: -s.order):
            place, reads = (s.rank, s.order), {(s.rank, i) for i in s.reads}
            added = s.name == "add" or s.kind == "gradient" or place in summands
            unsure = id(s) in passed or ((added or id(s) in few) and place in read)
            off = id(s) in losses or (id(s) in beyond and not unsure)
            if s.name == "add" and s.phase == "backward" and id(s) in known:
                summands |= reads
            if off or (place in felt and id(s) not in known):
                shown.add(id(s))
                felt |= reads
            read |= reads
    return [
        replace(j, pair=replace(j.pair, certain=False), passed=True)
        if {id(j.pair.a), id(j.pair.b)} <= beyond - shown
        else j
        for j in judged
    ]


def _norms_agree(pair: Pair) -> bool:
    """Whether a tensor may have the same values in another order, as of exchanged axes."""
    return math.isclose(pair.a.pieces[0].norm, pair.b.pieces[0].norm, rel_tol=1e-6)


def _losses(side: Sequence[Tensor]) -> list[Tensor]:
    """Where backward passes begin."""
    read = {(t.rank, i) for t in side if t.name == "ones_like" for i in t.reads}
    return [t for t in side if (t.rank, t.order) in read]


def _as_steep(judged: Sequence[Judged], sides: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all gradients of parameters together are as large, however these were merged or split."""
    grads = [[p for t in side if t.kind == "weight_grad" for p in t.pieces] for side in sides]
    least, most = sorted(math.hypot(*(p.norm for p in some)) for some in grads)
    usual = [j.apart.tolerance for j in judged if j.pair.a.kind == "weight_grad"]
    return bool(usual) and most - least <= statistics.median(usual) * most


def _off(judged: Sequence[Judged], place: int, layout: Layout) -> tuple[int, bool]:
    """The first gradient that is off by another factor than most are; whether there is none.

    Clipping, or what the loss is multiplied by, makes all gradients off by one factor. Clipping reads
    them before they are compared, and shows that one is off, but not which.
    """
    values = {
        i: (x[0], y[0])
        for i, j in enumerate(judged)
        if j.pair.a.kind == "weight_grad"
        for _, x, y, _ in matched(j.pair.a, j.pair.b, layout)
        if math.isfinite(x[0] @ y[0]) and x[0].any()
    }
    beyond = [i for i in values if judged[i].apart.ratio > 1.0]
    reads = _reads_gradients(judged, place)
    missing = (
        i for i, j in enumerate(judged) if j.pair.a.kind == "weight_grad" and i not in values
    )
    lost = next((i for i in missing if judged[i].apart.difference == math.inf), None)
    if reads and lost is not None:
        return lost, False
    if not (reads or place in values) or 2 * len(beyond) <= len(values):
        return beyond[0] if reads and beyond else place, False
    factor = float(np.nanmedian([x @ y / (x @ x) for x, y in (values[i] for i in beyond)]))
    room = {i: FACTOR * judged[i].apart.tolerance * size_of(*values[i]) for i in beyond}
    other = [i for i in beyond if not distance(factor * values[i][0], values[i][1]) <= room[i]]
    return min(other, default=place), not (other or reads)


def _reads_gradients(judged: Sequence[Judged], place: int) -> bool:
    """Whether an operation outside of the model comes after the backward pass of all modules."""
    behind = (j.pair.a for j in judged[place:] if j.pair.a.phase == "backward")
    left = any(t.kind in ("operation", "gradient") and t.module is not None for t in behind)
    one = judged[place].pair.a
    return one.kind == "operation" and one.phase == "backward" and not left


def _lone(first: Culprit, edits: Sequence[Edit]) -> Culprit:
    """A parameter that one side has alone: what is drawn after it begins with other values."""
    lone = [e for e in edits if e.op.startswith("parameter ")]
    if first.kind != "weight" or len({e.side for e in lone}) != 1:
        return first
    t = min((e.tensors[0] for e in lone), key=lambda t: t.order)
    return replace(first, module=t.module, name=t.name, rank=None, difference=math.inf)


_Graphs = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Edit]]
"""A step's tensors on both sides, and what is edited."""


def _known(judged: Sequence[Judged]) -> set[int]:
    """Which tensors surely agree, by ``id``: not by chance, nor only if ranks add them up."""
    found: set[int] = set()
    for j in judged:
        a, b = j.pair.a, j.pair.b
        joined = len(a.pieces) != len(b.pieces) and j.rank is None and a.shape == b.shape
        agree = j.apart.ratio <= 1.0 and j.whole and not (joined and "weight" not in a.kind)
        if agree and (j.pair.certain or a.pieces[0].values.any()):
            found |= {id(a), id(b)}
    return found


def _culprit(one: Judged, graphs: _Graphs, known: Collection[int]) -> Culprit:
    """Name what parts: the tensor, or the operations behind it of which nothing is known."""
    a, b, edits = graphs
    made = one.pair.b if one.pair.b.file else one.pair.a
    kind, phase = made.kind, made.phase
    op = f"gradient of {made.name}" if kind == "gradient" and made.name else made.name or kind
    module, op = made.module, _KINDS.get(kind, op)
    name = made.name if "weight" in kind else ""
    compared = one.pair.certain and kind == "operation"
    hidden = _unknown(one.pair.a, a, known, compared) + _unknown(one.pair.b, b, known, compared)
    if roundoff(made.dtype):  # whole numbers are not compared between ranks
        hidden = [x for x in hidden if roundoff(x.dtype)]
    lost, fp8 = one.apart.difference == math.inf, fp8_side(one.pair, one.apart.difference)
    alone = {id(x) for e in edits if e.side != "both" for x in e.tensors}
    edited = [x for x in hidden if id(x) in alone and roundoff(x.dtype)]
    if hidden and (lost or not name) and (edited or not one.pair.lone):
        made = min(edited or hidden, key=lambda x: x.order)
        shown = all(any(_computes(x, phase) for x in side) for side in (a, b))
        modules = {made.module} if shown or lost else {x.module for x in hidden}
        module, op = _around(modules), made.name if len(modules) == 1 else "operation"
        kind = "operation" if kind == "input" else kind  # not data, but made by these
    elif one.pair.lone and (cut := _around({module, *_cut_off(made, (a, b))})) != module:
        module, op = cut, f"{op} of {module}"
    rest = one.rank, one.step, kind, name, *astuple(one.apart), fp8
    return Culprit(module, op, phase, made.file, made.line, made.code, *rest)


def _cut_off(t: Tensor, sides: Sequence[Sequence[Tensor]]) -> set[str | None]:
    """The modules in which a gradient that one side has alone may end: back to what both have one of.

    Empty if a parameter is read there: it may end in what reads the tensor.
    """
    given = ({(s.module, s.name) for s in side if s.kind == "gradient"} for side in sides)
    both, found = set.intersection(*given), set()
    for side in sides:
        known = {id(s) for s in side if s.kind == "output" and (s.module, s.name) in both}
        own = (s for s in side if (s.kind, s.module, s.name) == ("output", t.module, t.name))
        path = [x for s in own for x in _unknown(s, side, known, False)]
        weights = {s.order for s in side if s.kind == "weight"}
        if any(weights.intersection(x.reads) for x in path):
            return set()
        found |= {x.module for x in path}
    return found


_KINDS = {
    "weight": "weight",
    "weight_grad": "gradient of a parameter",
    "updated_weight": "optimizer step",
}
"""What parts, where it is a parameter's."""


def _unknown(
    t: Tensor, side: Sequence[Tensor], known: Collection[int], compared: bool
) -> list[Tensor]:
    """The operations behind a tensor since those that agree, in order; sums of these if no other."""
    rows = {(s.rank, s.order): s for s in side if s.phase == t.phase}
    same = (  # an output that agrees is of an operation that does
        (s, rows[key])
        for s in rows.values()
        if s.kind == "output" and id(s) in known
        for i in s.reads
        if (key := (s.rank, i)) in rows
    )
    known = {*known, *(id(x) for s, x in same if s.pieces[0].norm == x.pieces[0].norm)}
    waiting = [t]
    found: dict[int, Tensor] = {}
    sums: dict[int, Tensor] = {}
    while waiting:
        one = waiting.pop()
        read = [rows[key] for i in one.reads if (key := (one.rank, i)) in rows]
        new = [s for s in read if id(s) not in known and id(s) not in found]
        if one is t and compared and len(new) == len(read):
            return []  # none of them is known to be right, so it may as well be wrong itself
        if one is not t and one.kind == "operation" and one.name not in MOVES:
            plain = one.name == "add" and not new
            (sums if plain else found)[id(one)] = one
        waiting += new
    return sorted((found or sums).values(), key=lambda s: s.order)


def _computes(t: Tensor, phase: str) -> bool:
    """Whether it shows what a module computes, which a compiled graph does not."""
    return (t.kind, t.phase) == ("operation", phase) and t.module is not None


def _around(modules: Collection[str | None]) -> str | None:
    """The module that all of these lie in."""
    paths = [name.replace(".", "/") for name in modules if name is not None]
    return commonpath(paths).replace("/", ".") if len(paths) == len(modules) else None
