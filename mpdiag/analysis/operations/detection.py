"""Finds the operations that must stay in FP32, by applying the rules until nothing new turns up.

The rules are applied twice: with everything stored in the format (levels O2 and O3), and under the
operation policy (O1). An operation found only in the first case is *covered*: by the policy's lists,
or only because its inputs, such as a batch of data, are FP32 at O1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpdiag.analysis.findings import Finding
from mpdiag.analysis.operations.graph import StepGraph, in_fp32, split, stored_low
from mpdiag.analysis.operations.rules import RULES, gradients
from mpdiag.numerics.autocast_lists import LISTS, policy_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpdiag.analysis.operations.rules import CoveredBy, OperationFinding
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.runs.operations import Operation


def find_operations(
    operations: Iterable[Operation], target: FloatFormat, scale: float = 1.0
) -> tuple[OperationFinding, ...]:
    """The operations that cannot be stored in a format; those the policy does not cover come first.

    Args:
        operations: Of one or more recorded steps, as ``Run.operations()`` gives them.
        target: The format tensors are stored in.
        scale: The loss scale that gradients will carry.
    """
    merged: dict[tuple[Any, ...], OperationFinding] = {}
    for graph in split(operations):
        needed = _needed(graph, target, scale, policy=True)
        everything = _needed(graph, target, scale, policy=False)
        for index, found in {**everything, **needed}.items():
            op = graph.operations[index]
            flops, moved = _shares(graph, op)
            covered = index not in needed
            found = replace(
                found,
                covered=covered,
                covered_by=_covered_by(graph, op) if covered else "",
                flops_share=flops,
                bytes_share=moved,
            )
            key = (found.code, found.op, found.module, found.where)
            known = merged.get(key)
            if known is None or (found.covered, -_size(found)) < (known.covered, -_size(known)):
                merged[key] = found
    return tuple(
        sorted(merged.values(), key=lambda f: (f.covered, -f.bytes_share - f.flops_share, f.op))
    )


def operation_findings(operations: Iterable[OperationFinding]) -> list[Finding]:
    """One finding for each rule and line of code that the operation policy does not cover."""
    found: dict[tuple[str, str, str], Finding] = {}
    for f in operations:
        if f.covered:
            continue
        at = f" at {f.where}" if f.where and f.where != f.place else ""
        found.setdefault(
            (f.code, str(f.evidence.get("subtraction") or f.where), f.reason),
            Finding(
                severity="warning" if f.code in ("cancellation", "swallowed") else "error",
                code=f"operation-{f.code}",
                message=f"{f.op} in {f.place}{at}: {f.reason}",
                evidence={**f.evidence, "line": f.where, "code": f.text},
                fix=f"{f.fix}; otherwise {f.without}",
            ),
        )
    return list(found.values())


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


def _needed(
    graph: StepGraph, target: FloatFormat, scale: float, *, policy: bool
) -> dict[int, OperationFinding]:
    """Findings by operation; what one finding puts into FP32 is FP32 in the next round."""
    found: dict[int, OperationFinding] = {}
    while True:
        low = stored_low(graph, policy=policy, fp32=frozenset(found))
        new = {
            index: finding
            for rule in RULES
            for index, finding in rule(graph, low, target, policy)
            if index not in found
        }
        if not new:
            for index, finding in gradients(graph, low, target, scale):
                found.setdefault(index, finding)
            return found
        first = min(new)  # fixing it may fix the operations that read its result
        found[first] = new[first]
        found.update({i: f for i, f in new.items() if f.code != "overflow"})
