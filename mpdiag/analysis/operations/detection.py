"""Finds the operations that must stay in FP32, by applying the rules until nothing new turns up.

The rules are applied twice: with everything stored in the format (levels O2 and O3), and under the
operation policy (O1). An operation found only in the first case is *covered*: by the policy's lists,
or only because its inputs, such as a batch of data, are FP32 at O1.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpdiag.analysis.findings import Finding, info, warning
from mpdiag.analysis.layers import UNKNOWN, LargestValues
from mpdiag.analysis.operations.gradient_rules import (
    SUSPICIONS,
    Site,
    decisive,
    gradient_errors,
    harmless,
    site,
)
from mpdiag.analysis.operations.graph import (
    StepGraph,
    StoredStep,
    in_fp32,
    low_composite,
    split,
    store,
)
from mpdiag.analysis.operations.growth import grown, trended
from mpdiag.analysis.operations.loss_change import NO_CURVE, LossCurve
from mpdiag.analysis.operations.precision_rules import PERSISTENT
from mpdiag.analysis.operations.precision_rules import RULES as PRECISION_RULES
from mpdiag.analysis.operations.rules import (
    RULES,
    CoveredBy,
    OperationFinding,
    finding_of,
    fix_of,
    gradients,
)
from mpdiag.analysis.operations.sources import without_followers, written_in_place
from mpdiag.display.wording import counted
from mpdiag.numerics.autocast_lists import BANNED, LISTS, policy_name
from mpdiag.numerics.formats import BF16, FloatFormat
from mpdiag.runs.operations import Operation

ForwardRule = Callable[[StoredStep], Iterator[OperationFinding]]

_WARNINGS = SUSPICIONS | {"gradient-error"}
"""Rules about precision alone: the numbers stay finite."""


def find_operations(
    operations: Iterable[Operation],
    target: FloatFormat,
    scale: float = 1.0,
    curve: LossCurve = NO_CURVE,
    sizes: LargestValues = UNKNOWN,
) -> tuple[OperationFinding, ...]:
    """The operations that cannot be stored in a format; those the policy does not cover come first.

    Args:
        operations: Of one or more recorded steps, as ``Run.operations()`` gives them.
        target: The format tensors are stored in.
        scale: The loss scale that gradients will carry.
        curve: The losses of the training, where they were recorded.
        sizes: The largest values of layers and parameters in all recorded steps: an operation whose
            values leave the range once these are as large is found, too.
    """
    graphs = split(operations, curve)
    sites = [{site(op) for op in graph.operations if not op.node} for graph in graphs]
    spared = harmless(graphs, target)
    seen: dict[tuple[Any, ...], list[tuple[int, OperationFinding]]] = defaultdict(list)
    for number, graph in enumerate(graphs):
        for found in _judged(graph, target, scale, spared):
            seen[found.code, found.op, found.module, found.where].append((number, found))
    for number, found in _later(graphs, sites, target, scale, spared, sizes):
        seen.setdefault((found.code, found.op, found.module, found.where), [(number, found)])
    merged = []
    for (code, *place), entries in seen.items():
        steps = sum(tuple(place) in one for one in sites) if code in PERSISTENT else 1
        for kept in ([e for e in entries if not e[1].covered], entries):
            if kept and len({number for number, _ in kept}) >= steps:
                merged.append(max((f for _, f in kept), key=_size))
                break
    merged = _without_followers(graphs, [*merged, *_by_gradients(graphs, target, merged)])
    return tuple(
        sorted(merged, key=lambda f: (f.covered, -f.bytes_share - f.flops_share, f.op, f.where))
    )


def _judged(
    graph: StepGraph, target: FloatFormat, scale: float, spared: frozenset[Site]
) -> Iterator[OperationFinding]:
    """The findings of one recorded step."""
    needed = _needed(graph, target, scale, spared, policy=True)
    everything = _needed(graph, target, scale, spared, policy=False)
    for index, found in {**everything, **needed}.items():
        op = graph.operations[index]
        flops, moved = _shares(graph, op)
        covered = index not in needed
        yield replace(
            found,
            covered=covered,
            covered_by=_covered_by(graph, op) if covered else "",
            flops_share=flops,
            bytes_share=moved,
        )


def _later(
    graphs: Sequence[StepGraph],
    sites: Sequence[set[Site]],
    target: FloatFormat,
    scale: float,
    spared: frozenset[Site],
    sizes: LargestValues,
) -> Iterator[tuple[int, OperationFinding]]:
    """What leaves the range once layers have grown, by the last recorded step of each operation."""
    last = {place: number for number, places in enumerate(sites) for place in places}
    later = [(number, grown(graphs[number], sizes, target)) for number in sorted({*last.values()})]
    for number, graph in (*later, (len(graphs) - 1, trended(graphs, sizes.last, target))):
        if graph is None:
            continue
        for found in _judged(graph, target, scale, spared):
            place = found.op, found.module, found.where
            if found.code == "overflow" and last.get(place) == number:
                yield number, found


def _by_gradients(
    graphs: Sequence[StepGraph], target: FloatFormat, merged: Iterable[OperationFinding]
) -> list[OperationFinding]:
    """What the other rules leave in the format and whose rounding the gradients feel, once a place."""
    kept = {(f.op, f.module, f.where) for f in merged if not f.covered}
    steps = decisive(graphs, target)
    found: dict[Site, OperationFinding] = {}
    for number, graph in reversed(list(enumerate(graphs))):
        fp32 = frozenset(o.index for o in graph.operations if not o.node and site(o) in kept)
        step = store(graph, target, fp32=fp32)
        new = {
            finding.index: finding
            for finding in gradient_errors(step)
            if finding.index not in fp32 and number in steps[site(graph.operations[finding.index])]
        }
        for index, finding in _at_the_source(step, _not_in_place(step, new), {}).items():
            flops, moved = _shares(graph, graph.operations[index])
            whole = replace(finding, flops_share=flops, bytes_share=moved)
            found.setdefault((whole.op, whole.module, whole.where), whole)
    return list(found.values())


def _without_followers(
    graphs: Sequence[StepGraph], merged: list[OperationFinding]
) -> list[OperationFinding]:
    """Without what is FP32 in every step anyway, once the findings of the other steps are."""
    sites = {(f.op, f.module, f.where) for f in merged if not f.covered}
    alone: set[Site] = set()
    for graph in graphs:
        found = [op.index for op in graph.operations if not op.node and site(op) in sites]
        alone |= {site(graph.operations[i]) for i in without_followers(graph, found)}
    return [f for f in merged if f.covered or (f.op, f.module, f.where) in alone]


def _at_the_source(
    step: StoredStep, new: dict[int, OperationFinding], found: Mapping[int, OperationFinding]
) -> dict[int, OperationFinding]:
    """Findings about conversions to another tensor's dtype, moved to what made that tensor narrow.

    Nothing can keep ``p.to(z.dtype)`` wide but an FP32 ``z``.
    """
    graph = step.graph
    result: dict[int, OperationFinding] = {}
    for index, finding in new.items():
        made = graph.written.get(graph.followed[index]) if index in graph.followed else None
        if made is None:
            result.setdefault(index, finding)
            continue
        about = graph.operations[index] if finding.about is None else finding.about
        waiting, seen = [made], set[int]()
        while waiting:
            op = waiting.pop()
            narrow = any(step.low.get(t.tensor, False) for t in op.outputs)
            if op.index in seen or op.index in found or op.node or not narrow:
                continue
            seen.add(op.index)
            result.setdefault(op.index, _moved(op, finding, about, ""))
            if op.index in graph.followed and graph.followed[op.index] in graph.written:
                waiting.append(graph.written[graph.followed[op.index]])
            elif LISTS.get(policy_name(op.op)) != "low" and not low_composite(op):
                before = [graph.producer(t) for t in op.inputs]
                waiting += [b for b in before if b is not None]
        if not seen:
            result.setdefault(index, finding)
    return result


def _not_in_place(
    step: StoredStep, new: dict[int, OperationFinding]
) -> dict[int, OperationFinding]:
    """Findings about writes in place outside of submodules, moved to what made the tensors narrow.

    Nothing can keep ``x *= y`` wide but an FP32 ``x``; in a submodule the whole module is.
    """
    result: dict[int, OperationFinding] = {}
    for index, finding in new.items():
        op = step.graph.operations[index]
        makers = [] if finding.module else written_in_place(step, op)
        instead = f"{finding.op.rstrip('_')} into a new tensor"
        for one in makers:
            result.setdefault(one.index, _moved(one, finding, finding.about or op, instead))
        if not makers:
            result.setdefault(index, finding)
    return result


def _moved(
    op: Operation, finding: OperationFinding, about: Operation, instead: str
) -> OperationFinding:
    """A finding, moved to an operation that makes FP32 what it is about."""
    return finding_of(
        op, finding.code, finding.reason, instead, finding.without, finding.evidence, about
    )


def operation_findings(
    operations: Iterable[OperationFinding], *, bf16: bool = False
) -> list[Finding]:
    """One finding for each rule and value that the operation policy does not cover.

    Args:
        operations: What was found.
        bf16: Whether BF16's own rules find nothing.
    """
    found: dict[tuple[str, ...], list[OperationFinding]] = defaultdict(list)
    for f in operations:
        if not f.covered:
            read_by = (str(f.evidence.get(name) or "") for name in ("consumer", "consumer_line"))
            found[(f.code, f.subject, *read_by)].append(f)
    return [_finding(group, bf16=bf16) for group in found.values()]


def _finding(group: Sequence[OperationFinding], *, bf16: bool) -> Finding:
    f = group[0]
    other = ", or train in BF16" if bf16 and f.code == "overflow" else ""
    return Finding(
        severity="warning" if f.code in _WARNINGS else "error",
        code=f"operation-{f.code}",
        message=f"{f.subject}: {f.reason}",
        evidence={**f.evidence, "line": f.where, "code": f.text},
        fix=f"{fix_of(group)}{other}; otherwise {f.without}",
    )


def bf16_findings(
    operations: Iterable[Operation], target: FloatFormat, curve: LossCurve = NO_CURVE
) -> Iterator[Finding]:
    """What BF16, with 8 significant bits, would lose where another format is the target."""
    if target == BF16:
        return
    found = [f for f in find_operations(operations, BF16, curve=curve) if not f.covered]
    if not found:
        return
    first = found[0]
    yield info(
        code="bf16-precision",
        message=f"BF16 would need FP32 for {counted(len(found), 'operation')}, too: "
        f"{first.subject}: {first.reason}",
        evidence={
            "operations": [
                {"op": f.op, "module": f.module, "line": f.where, "rule": f.code} for f in found
            ]
        },
        fix="for a BF16 plan, analyze with --target bf16",
    )


def refused_findings(operations: Iterable[Operation]) -> Iterator[Finding]:
    """Losses on probabilities, at which torch's autocast ends a training on CUDA.

    Whatever dtype they read: where autocast is on, the call alone raises.
    """
    found = {
        o.where or o.module: o for o in operations if not o.node and policy_name(o.op) in BANNED
    }
    for place, op in found.items():
        yield warning(
            code="refused-by-autocast",
            message=f"on CUDA, {op.op} raises an error under autocast (at {place})",
            evidence={"op": op.op, "where": op.where, "module": op.module},
            fix="leave out the sigmoid and call binary_cross_entropy_with_logits, or call it outside "
            "autocast with FP32 inputs",
        )


def _size(found: OperationFinding) -> float:
    return float(found.evidence.get("absmax") or 0.0)


def _covered_by(graph: StepGraph, op: Operation) -> CoveredBy:
    """Why an operation is harmless at O1: the policy's lists, or FP32 data from outside."""
    if LISTS.get(policy_name(op.op)) == "low":
        return "neighbours"  # FP16 at O1, too, and harmless there
    seen: set[int] = set()
    waiting = [op]
    while waiting:
        one = waiting.pop()
        if in_fp32(one):
            return "lists"
        for t in one.inputs:
            before = graph.producer(t)
            if before is not None and before.index not in seen and not before.node:
                seen.add(before.index)
                waiting.append(before)
    return "neighbours"


def _shares(graph: StepGraph, op: Operation) -> tuple[float, float]:
    """An operation's share of the step's FLOP and bytes, including its backward pass."""
    own = [op, *graph.backward.get(op.index, [])]
    flops = sum(o.flops for o in graph.operations) or 1
    moved = sum(o.bytes for o in graph.operations) or 1
    return sum(o.flops for o in own) / flops, sum(o.bytes for o in own) / moved


def _new(
    step: StoredStep,
    rules: Iterable[ForwardRule],
    found: Mapping[int, OperationFinding],
    spared: frozenset[Site],
) -> dict[int, OperationFinding]:
    """What some rules find that was not found before, moved to where it can be mended."""
    new = {
        finding.index: finding
        for rule in rules
        for finding in rule(step)
        if finding.index not in found
        and (
            not (finding.code in SUSPICIONS or finding.evidence.get("suspected"))
            or "running" in finding.evidence  # what the next step reads shows in none by itself
            or site(step.graph.operations[finding.index]) not in spared
        )
    }
    return _at_the_source(step, _not_in_place(step, new), found)


def _needed(
    graph: StepGraph, target: FloatFormat, scale: float, spared: frozenset[Site], *, policy: bool
) -> dict[int, OperationFinding]:
    """Findings by operation; what one finding puts into FP32 is FP32 in the next round.

    What is suspected of operations that are ``spared`` is dropped.
    """
    found: dict[int, OperationFinding] = {}
    while True:
        step = store(graph, target, policy=policy, fp32=frozenset(found))
        new: dict[int, OperationFinding] = {}
        for rules in (RULES, PRECISION_RULES):  # what is said more precisely is said first
            if not new:
                new = _new(step, rules, found, spared)
        if not new:
            known = len(found)
            for finding in gradients(step, scale):
                found.setdefault(finding.index, finding)
            if not policy:
                return found
            if len(found) > known:  # a gradient that leaves FP32 may be too large for what it is of
                continue
            alone = without_followers(graph, found)
            return {index: f for index, f in found.items() if index in alone}
        first = min(new)  # fixing it may fix the operations that read its result
        found[first] = new[first]
        found.update({i: f for i, f in new.items() if f.code != "overflow"})
