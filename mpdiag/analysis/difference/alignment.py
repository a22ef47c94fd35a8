"""Which tensors of two traced steps belong together: by module, name, order and shape.

What modules return, parameters and gradients are matched by name and by the number of their call.
Operations are matched within a module and a pass as two sequences are; what one side has alone is an
edit of the graph. Where a module's operations were edited, a pair of operations may be a chance one, so
the module is judged by what it returns.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from mpdiag.analysis.difference.sides import Steps, Tensor, times
from mpdiag.analysis.difference.tolerance import distance, roundoff
from mpdiag.numerics.autocast_lists import MOVES

_PLACES = ("weight", "input", "forward", "backward", "weight_grad", "updated_weight")
"""In this order the tensors of a step are judged."""
_SORTS = ("sort", "argsort")
_FEW = 0.25
"""Share of choices that rounding turns at most."""


@dataclass(frozen=True)
class Pair:
    """A tensor of both sides.

    Attributes:
        a, b: The tensor.
        certain: Whether they are surely the same one; not if operations of its module were edited.
        carried: Whether the step before has returned them, as a state.
        turned: Share of the rows behind it for which a choice, as of an expert, was another one.
        rows: Whether it has those rows, or is a mean over them; a gradient of weights sums over them.
        lone: Whether a module returns it on both sides, and it has a gradient on one side alone.
    """

    a: Tensor
    b: Tensor
    certain: bool = True
    carried: bool = False
    turned: float = 0.0
    rows: bool = False
    lone: bool = False


@dataclass(frozen=True)
class Edit:
    """An operation that one side has alone.

    Attributes:
        module: Its module; None outside of all.
        phase: ``forward`` or ``backward``.
        op: ATen's name; with other arguments on both sides, ``NAME(A -> B)``.
        side: ``a``, ``b``, or ``both`` where its arguments differ.
        tensors: These operations' results, in order.
    """

    module: str | None
    phase: str
    op: str
    side: str
    tensors: Sequence[Tensor]

    @property
    def inside(self) -> bool:
        """Whether one side's modules alone run an operation: their code is another one."""
        return self.module is not None and self.side != "both" and self.tensors[0].kind != "weight"


def aligned(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[list[Pair], list[Edit]]:
    """The pairs of two steps in the order in which they are judged, and the edits of the graph.

    Args:
        a: All tensors of a step on one side, of ``whole_batches``.
        b: Those on the other.
    """
    named = {_name(t): t for t in b if t.kind != "operation"}
    pairs = [Pair(t, named[_name(t)]) for t in a if t.kind != "operation" and _name(t) in named]
    ours, theirs = _operations(a), _operations(b)
    pairs += _without_gradient(a, b, pairs)
    edits: list[Edit] = []
    if ours and theirs:
        for key in dict.fromkeys((*ours, *theirs)):
            some, found = _matched(ours.get(key, []), theirs.get(key, []))
            pairs += some
            edits += found
    weights = [{t.name: t for t in side if t.kind == "weight"} for side in (a, b)]
    for i, side in enumerate("ab"):
        lone = [t for name, t in weights[i].items() if name not in weights[1 - i]]
        edits += [Edit(t.module, t.phase, f"parameter {t.name}", side, [t]) for t in lone]
    turned = _turned(a, b)
    unsure = _unsure(a, turned)
    rows = frozenset().union(*(rows for *_, rows, _ in turned.values()))
    made: dict[str | None, float] = {t.module: t.order for t in reversed(a) if t.phase == "forward"}
    made[None] = next((t.order for t in a if t.phase == "backward" and t.module), 0)
    shared = _shared(a, kept=not theirs) | _shared(b, kept=not ours)
    unsure |= {id(p.a) for p in pairs if p.a.kind == "gradient" and _name(p.a)[1:] in shared}
    unsure |= _among_others(a, b)
    pairs = [
        replace(
            p,
            certain=p.certain and id(p.a) not in unsure and not _before_mean(p.a, p.b),
            turned=_before(p.a, turned, made),
            rows=p.a.phase == "forward" or bool(_rows_of(p.a) & rows),
        )
        for p in pairs
    ]
    return sorted(pairs, key=lambda pair: _place(pair.a)), edits


_Turned = Mapping[str, tuple[float, float, frozenset[int], float]]
"""Modules in which choices were turned, with their rows and the share of these that were.

Forward, it reaches what comes after the first order; backward, modules that begin before the second.
"""


def _turned(a: Sequence[Tensor], b: Sequence[Tensor]) -> _Turned:
    """Modules in which rounding, or a fault before, has turned a choice: whole numbers differ."""
    ours, theirs = (
        {_name(t): t for t in side if t.kind == "operation" and not roundoff(t.dtype)}
        for side in (a, b)
    )
    found: dict[str, tuple[float, float, frozenset[int], float]] = {}
    modules: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for key, x in ours.items():
        y = theirs.get(key)
        if y and x.name in _SORTS and x.module and len(x.pieces) != len(y.pieces):
            # Each part of a batch is sorted alone.
            found[x.module] = (x.order, math.inf, frozenset(), 0.0)
        elif y and x.phase == "forward" and x.module and len(x.pieces) == len(y.pieces):
            modules[x.module].append((x, y))
    computed = {(t.rank, t.order) for t in a if roundoff(t.dtype)}
    for module, pairs in modules.items():
        other = [
            pair
            for pair in pairs
            if pair[0].shape != pair[1].shape
            or pair[0].pieces[0].norm != pair[1].pieces[0].norm
            or (pair[0].pieces[0].values != pair[1].pieces[0].values).any()
        ]
        if other:
            first = other[0][0].order
            chosen = any(_chooses(x, computed) for x, _ in pairs if x.order <= first)
            # A list of rows moves up by one that is gone.
            share = min(_share(x, y) for x, y in other) if chosen else 0.0
            # The largest of a window passes on nearly the same value, whichever it is.
            pool = all("max_pool" in x.name for x, _ in other)
            reach = (math.inf, float(first)) if pool else (float(first), math.inf)
            found[module] = (*reach, _rows_of(pairs[0][0]), share)
    return found


def _chooses(t: Tensor, computed: Collection[tuple[int, int]]) -> bool:
    """Whether numbers are chosen by values that were computed; a mask is a constant."""
    return t.dtype.startswith("int") and any((t.rank, i) in computed for i in t.reads)


def _share(a: Tensor, b: Tensor) -> float:
    """The share of rows that choose otherwise; 0 if they are too many for rounding."""
    if a.name == "nonzero" or a.shape != b.shape:
        rows = [math.prod(t.shape[:1]) for t in (a, b)]
        share = (1 + abs(rows[0] - rows[1])) / max(1, *rows)
    else:  # one more may lie at a position that is not stored; a twin shows it of many windows
        different = a.pieces[0].values != b.pieces[0].values
        more = math.prod(a.shape) if "max_pool" in a.name else different.size
        share = np.count_nonzero(different) / max(1, different.size) + 1 / max(1, more)
    return share if share <= _FEW else 0.0


def _shared(step: Sequence[Tensor], *, kept: bool) -> set[tuple[str | None, str, str, int]]:
    """The gradients of modules that return what they were given: of all that reads it, or not.

    So it is, where the other side is compiled (``kept``), of what they return and read themselves: a
    hook on what a graph returns does not see what arrives inside the graph.
    """
    made = {(t.rank, t.order): t for t in step if t.phase == "forward"}
    readers: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for t in made.values() if kept else ():
        for i in t.reads if t.kind == "operation" else ():
            readers[t.rank, i].append(t)
    return {
        (t.module, t.name, "backward", t.call)
        for t in step
        if t.kind == "output" and t.module is not None and t.reads
        for keys in [[(t.rank, i) for i in t.reads]]
        if any(_lies_in(s, t.module) for key in keys for s in readers[key])
        or not any(_lies_in(made[key], t.module) for key in keys if key in made)
    }


def _among_others(a: Sequence[Tensor], b: Sequence[Tensor]) -> set[int]:
    """What may be another tensor: a model is given, or a module returns, more of them on one side.

    Nothing if a side is compiled: a graph may leave out what is constant.
    """
    if not all(any(t.kind == "operation" and t.module for t in side) for side in (a, b)):
        return set()
    sides = ([t for t in side if t.kind == "input" or not t.call] for side in (a, b))
    ours, theirs = (Counter((str(t.kind), t.module) for t in side) for side in sides)
    of = {"input": "input", "output": "output", "gradient": "output"}
    later = ((t, (of[t.kind], t.module)) for t in a if t.kind in of and (t.name or t.call))
    return {id(t) for t, key in later if ours[key] != theirs[key]}


def _before_mean(*sides: Tensor) -> bool:
    """Whether it is a part's gradient of rows, which the loss divides by their number afterwards.

    The loss of a part may have been divided before, or its gradient may be.
    """
    some = (t for t in sides if t.pieces[0].rank is None and t.module is None)
    return any(t.phase == "backward" and not t.from_loss for t in some)


def _lies_in(t: Tensor, module: str) -> bool:
    return t.module is not None and (not module or f"{t.module}.".startswith(f"{module}."))


def _rows_of(t: Tensor) -> frozenset[int]:
    """How many rows a tensor has, by its first dimension and by all but the last; none of weights."""
    weight = "weight" in t.kind or len(t.shape) < 2
    return frozenset() if weight else frozenset((t.shape[0], math.prod(t.shape[:-1])))


def _before(t: Tensor, turned: _Turned, made: Mapping[str | None, float]) -> float:
    """The largest share of rows that reaches a tensor.

    Args:
        t: The tensor.
        turned: Where choices were turned.
        made: Where each module begins, and for None where the gradients of modules do.
    """
    forward, begins = t.phase == "forward", made.get(t.module, -1)
    if t.module is None:  # the loss comes behind all modules, clipping before
        begins = math.inf if t.order < begins else -1
    shares = (
        s for after, end, _, s in turned.values() if (t.order > after if forward else begins <= end)
    )
    return max(shares, default=0.0)


def _unsure(step: Sequence[Tensor], turned: _Turned) -> set[int]:
    """What lies in a module that is judged by what it returns, or in one inside, by ``id``.

    Clipping and the like read the gradients of such modules. What has the rows among which a few
    choices differ is sure.
    """
    found: set[int] = set()
    places: set[tuple[int, int]] = set()
    for t in step:
        own = t.kind == "operation" and t.module in turned
        weights = t.kind in ("weight", "updated_weight") or t.module is None
        inside = not weights and any(t.module != m and _lies_in(t, m) for m in turned)
        outside = t.module is None and t.phase == "backward"
        around = (rows for m, (*_, rows, s) in turned.items() if s and _lies_in(t, m))
        if any(_rows_of(t) & rows for rows in around) and roundoff(t.dtype):
            continue
        if own or inside or (outside and any((t.rank, i) in places for i in t.reads)):
            found.add(id(t))
            if t.phase == "backward":
                places.add((t.rank, t.order))
    return found


def renamed(a: Steps, b: Steps) -> Steps:
    """The first side with the second one's names of modules that have the same parameters.

    Their shapes show it where every other parameter is on both sides; else their values have to.
    """
    if not (a and b):
        return a
    sides = [[t for t in steps[min(steps)] if t.kind == "weight"] for steps in (a, b)]
    names = [{t.name: _parameter(t) for t in side} for side in sides]
    same = {name for name, shape in names[0].items() if names[1].get(name) == shape}
    ours, theirs = ([t for t in side if t.name not in same] for side in sides)
    pairs = _of_one_value(ours, theirs)
    left = [[t for t in side if all(t not in p for p in pairs)] for side in (ours, theirs)]
    some = _in_order(left[0], left[1], _parameter)
    pairs += some if len(some) == max(map(len, left)) else list(_beside(left, pairs))
    new = {path: path.rpartition(".")[2] for name in same for path in _paths(name)}
    for x, y in pairs:
        parts = dict(zip(_paths(x.name), y.name.split(".")[:-1], strict=False))
        if len(parts) == y.name.count(".") and all(new.get(p, o) == o for p, o in parts.items()):
            new |= parts
    modules = {(x.module, y.module) for x, y in pairs}
    times = [Counter(some) for some in zip(*modules, strict=True)]
    moved = {x: y for x, y in modules if times[0][x] == times[1][y] == 1}
    drawn, owner = {t.name: _drawn(t) for t in sides[1]}, {y.name: x.name for x, y in pairs}
    for t in ours:  # no other parameter has its new name
        name = _renamed(t, new, moved).name
        if name != t.name and owner.get(name) != t.name and drawn.get(name, _drawn(t)) != _drawn(t):
            moved[t.module] = t.module
    return {s: [_renamed(t, new, moved) for t in step] for s, step in a.items()} if pairs else a


def _parameter(t: Tensor) -> tuple[Any, ...]:
    return t.name.rpartition(".")[2], tuple(n for n in t.shape if n > 1)


def _of_one_value(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The parameters that have the same values on both sides, which no other one has."""
    ours, theirs = ({_drawn(t): t for t in side} for side in (a, b))
    times = Counter(chain(map(_drawn, a), map(_drawn, b)))
    return [(t, theirs[k]) for k, t in ours.items() if k in theirs and times[k] == 2]


def _drawn(t: Tensor) -> tuple[Any, ...]:
    return *_parameter(t), t.pieces[0].values.tobytes()


def _beside(
    sides: Sequence[Sequence[Tensor]], known: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What is alike, and lies beside the same known parameters: a norm's ones alone show nothing."""
    groups = []
    for side, mine in zip(sides, zip(*known, strict=True), strict=bool(known)):
        inside: dict[str, set[int]] = defaultdict(set)
        for i, t in enumerate(mine):
            for path in ("", *_paths(t.name)):
                inside[path].add(i)
        found: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for t in side:
            around = inside[t.name.rpartition(".")[0].rpartition(".")[0]]
            found[_drawn(t), frozenset(around)].append(t)
        groups.append(found)
    for key, some in groups[0].items() if groups else ():
        if key[1] and len(groups[1][key]) == len(some):
            yield from zip(some, groups[1][key], strict=True)


def _paths(name: str) -> list[str]:
    """The modules around a parameter, from the outermost on."""
    return list(accumulate(name.split(".")[:-1], "{}.{}".format))


def _renamed(t: Tensor, new: Mapping[str, str], moved: Mapping[str | None, str | None]) -> Tensor:
    """A tensor of its module's new path; operations of such modules may be others.

    Args:
        t: The tensor.
        new: The new last part of each path.
        moved: The new paths of modules that lie somewhere else.
    """
    if t.kind == "operation" or t.module is None:
        return t
    parts = t.module.split(".")
    path = ".".join(new.get(".".join(parts[: i + 1]), part) for i, part in enumerate(parts))
    module = moved.get(t.module, path)
    own = f"{module}." if module else ""
    name = own + t.name.rpartition(".")[2] if "weight" in t.kind else t.name
    return replace(t, module=module, name=name)


def whole_batches(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Both sides of a step, with the parts of a batch put together where one side has more of them."""
    return [_whole_batch(side, other, _parts(side, other)) for side, other in ((a, b), (b, a))]


def _parts(step: Sequence[Tensor], other: Sequence[Tensor]) -> int:
    """How many parts of a batch, as of gradient accumulation, there are for each of the other side."""
    inputs = [[t for t in side if t.kind == "input"] for side in (step, other)]
    elements = {sum(math.prod(p.shape) for t in ts for p in t.pieces) for ts in inputs}
    times = [len(ts) for ts in inputs]
    if len(elements) != 1 or not all(times):
        return 1
    return times[0] if max(times) % min(times) else times[0] // times[1]


def _whole_batch(step: Sequence[Tensor], other: Sequence[Tensor], parts: int) -> Sequence[Tensor]:
    """The tensors of a batch's parts put together: each part has a piece, as a rank has.

    What the other side has as often is none of a part: clipping comes once a step.
    """
    if parts < 2:
        return step
    calls: dict[tuple[str | None, ...], list[Tensor]] = defaultdict(list)
    for t in step:
        calls[(*_name(t)[:4], t.code)].append(t)
    times: Counter[tuple[str | None, ...]] = Counter((*_name(t)[:4], t.code) for t in other)
    shapes = {(*_name(t)[:4], t.code, t.shape) for t in other}
    alike = (some for key, some in calls.items() if times[key] == len(some))
    found = [t for t in step if "weight" in t.kind]
    found += [t for some in alike for t in some if "weight" not in t.kind]
    given = max(t.order for t in step if t.kind == "input")
    together = all(t.order > given for t in step if t.phase == "backward")  # in one backward pass
    for key, some in calls.items():
        each, left = divmod(len(some), parts)
        if not left and len(some) != times[key] and "weight" not in some[0].kind:
            for i in range(each):
                held = some[i::each]
                added = all(x.order in y.reads for x, y in pairwise(held))
                if added and (*key, held[0].shape) in shapes:
                    held = held[-1:]  # each adds to what the one before has left
                elif together and held[0].phase == "backward":  # the last part's comes first
                    held = held[::-1]
                pieces = tuple(replace(p, rank=None) for t in held for p in t.pieces)
                found.append(replace(some[i], pieces=pieces))
    return sorted(found, key=lambda t: t.order)


def _without_gradient(
    a: Sequence[Tensor], b: Sequence[Tensor], named: Sequence[Pair]
) -> list[Pair]:
    """Parameters of both sides, and what modules return, that have a gradient on one side alone."""
    pairs = []
    for ours, theirs, swapped in ((a, b, False), (b, a, True)):
        known = {(t.kind, t.module, t.name) for t in theirs}
        for t in ours:
            place = t.module, t.name
            of = {"weight_grad": "weight", "gradient": "output"}.get(t.kind, "")
            lone = (of, *place) in known and (t.kind, *place) not in known
            if lone and (of == "weight" or t.pieces[0].norm):  # a graph is given zeros for None
                orders = (p.a.order for p in named if p.a.kind == t.kind and p.b.order < t.order)
                none = replace(times(t, math.nan), order=max(orders, default=0), reads=())
                pair = Pair(none, t) if swapped else Pair(t, none)
                pairs.append(replace(pair, lone=of == "output"))
    return pairs


def _name(t: Tensor) -> tuple[str, str | None, str, str, int]:
    return t.kind, t.module, t.name, t.phase, t.call


def _place(t: Tensor) -> tuple[int, int]:
    """Where a tensor stands in the order of judgement: forward before backward."""
    backwards = -1 if t.kind == "weight_grad" else 1  # from the loss on
    # Of several models, each by a name, one may have made the other's input.
    own = t.kind in _PLACES and not (t.kind == "input" and t.module)
    return _PLACES.index(t.kind if own else t.phase), backwards * t.order


def _operations(step: Sequence[Tensor]) -> dict[tuple[str, str | None], list[Tensor]]:
    """A step's operations by pass and module. After the last backward pass gradients are compared."""
    found: dict[tuple[str, str | None], list[Tensor]] = defaultdict(list)
    for t in step:
        if t.kind == "operation" and t.phase != "update" and t.name not in MOVES:
            found[t.phase, t.module].append(t)
    return found


def _matched(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[list[Pair], list[Edit]]:
    """The pairs of one module in one pass, and what has no partner."""
    lines = _same_lines(a, b)
    whole = [Pair(*pair) for pair in lines]
    held = {id(t) for pair in lines for t in pair}
    a, b = ([t for t in side if id(t) not in held] for side in (a, b))
    pairs = _exchanged(_in_order(a, b, _word))
    held = {id(t) for pair in pairs for t in pair}
    alone = [
        (side, t.name, t) for side, some in (("a", a), ("b", b)) for t in some if id(t) not in held
    ]
    whole += [Pair(x, y, not alone) for x, y in pairs]
    return whole, _edits([*_changed([*lines, *pairs]), *alone])


def _in_order(
    a: Sequence[Tensor], b: Sequence[Tensor], word: Callable[[Tensor], Hashable]
) -> list[tuple[Tensor, Tensor]]:
    """The pairs of two sequences in which the same words follow one another."""
    ours, theirs = ([word(t) for t in side] for side in (a, b))
    if ours == theirs:
        return list(zip(a, b, strict=True))
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return [(a[i + k], b[j + k]) for i, j, n in blocks for k in range(n)]


def _exchanged(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same pairs, but for gradients of two factors: they come in either order, and values tell."""
    found = list(pairs)
    for i in range(len(found) - 1):
        (a, b), (c, d) = found[i : i + 2]
        alike = len({(_word(t), t.phase, t.pieces[0].shape) for t in (a, b, c, d)}) == 1
        given = {*a.reads} & {*c.reads}  # the gradient of the product
        if alike and a.phase == "backward" and given and {*a.reads} != {*c.reads}:
            w, x, y, z = (t.pieces[0].values for t in (a, b, c, d))
            if distance(w, z) + distance(y, x) < distance(w, x) + distance(y, z):
                found[i : i + 2] = [(a, d), (c, b)]
    return found


def _same_lines(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The pairs of lines outside of all modules that read gradients and do the same, as clipping."""
    sides: list[dict[str, list[Tensor]]] = []
    for side in (a, b):
        lines: dict[str, list[Tensor]] = defaultdict(list)
        for t in side:
            outside = t.module is None and t.phase == "backward"
            if outside and t.code and (len(t.pieces) == 1 or t.from_loss):
                lines[t.code].append(t)
        sides.append(lines)
    both = [(some, sides[1].get(code, [])) for code, some in sides[0].items()]
    return [
        pair
        for some, other in both
        if [_word(t) for t in some] == [_word(t) for t in other]
        for pair in zip(some, other, strict=True)
    ]


def _word(t: Tensor) -> tuple[str, int]:
    return t.name, len(t.shape)


def _edits(found: Iterable[tuple[str, str, Tensor]]) -> list[Edit]:
    """Edits of their side, operation and tensors."""
    edits: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for side, op, t in found:
        edits[side, op].append(t)
    return [
        Edit(some[0].module, some[0].phase, op, side, some) for (side, op), some in edits.items()
    ]


def _changed(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    """Operations with other arguments that are no tensors: another epsilon, another dimension."""
    for x, y in pairs:
        ours, theirs = _arguments(x), _arguments(y)
        other = [
            f"{name} {ours.get(name, 'default')} -> {theirs.get(name, 'default')}"
            for name, value in (theirs | ours).items()
            if ours.get(name) != theirs.get(name) and not isinstance(value, list)
            if len(x.pieces) == len(y.pieces) or not isinstance(value, int)  # as many rows
        ]
        if other:
            yield "both", f"{x.name}({', '.join(other)})", y


def _arguments(t: Tensor) -> dict[str, Any]:
    with suppress(ValueError):  # it was cut short
        return dict(json.loads(t.arguments or "{}"))
    return {}
