"""Chooses what stays in FP32: by operation records if there are any, else by module types."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpdiag.analysis.findings import Finding, error, warning
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.operations.graph import StepGraph, stored_low
from mpdiag.analysis.operations.layer_effects import within
from mpdiag.analysis.operations.rules import OperationFinding, called
from mpdiag.analysis.operations.sources import is_product
from mpdiag.display.wording import counted
from mpdiag.numerics.formats import FloatFormat
from mpdiag.plan import Fp32Choice
from mpdiag.runs.operations import Operation

NORMS = ("BatchNorm", "SyncBatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm")
EXPONENTIALS = ("Softmax", "LogSoftmax", "Softmax2d", "Softmin", "Softplus")
CLOSE = 8.0
"""Activations within this factor of the format's largest value count as close to it."""


def choose_fp32_operations(
    layers: Layers, modules: Sequence[Mapping[str, Any]], target: FloatFormat
) -> tuple[Fp32Choice, ...]:
    """Choose the modules whose operation stays in FP32, with the recorded values as evidence.

    *Mixed Precision Training* (section 3.3) keeps large reductions in FP32: statistics of
    normalisations, softmax and losses. An activation beyond the format's range must stay there, too,
    and a loss scale does not help.
    """
    activations = layers.of_kind("activation")
    h = activations.histograms
    overflow = np.asarray(h.overflow(target).lower)
    where = {name: i for i, name in enumerate(activations.names)}
    choices = []
    for module in modules:
        if module["what"] != "module":
            continue
        name, kind = str(module["name"]), str(module["type"])
        i = where.get(name)
        if i is None:
            continue
        numbers = {"absmax": float(h.absmax[i]), "overflow": int(overflow[i]), "type": kind}
        if overflow[i] > 0:
            reason = (
                f"its output reaches {h.absmax[i]:.3g}, beyond {target.label}'s largest value "
                f"{target.max:.5g}"
            )
        elif kind.startswith(NORMS):
            reason = "a normalisation: its statistics are a large reduction"
        elif kind in EXPONENTIALS:
            reason = "an exponential and a sum over its results"
        elif kind.endswith("Loss"):
            reason = "a loss: a reduction over all values"
        else:
            continue
        choices.append(Fp32Choice(op=kind, module=name, reason=reason, evidence=numbers))
    return tuple(choices)


def proven_modules(
    choices: Sequence[Fp32Choice], findings: Sequence[OperationFinding]
) -> tuple[Fp32Choice, ...]:
    """The modules whose own outputs left the range, judging by operation records.

    A module's type alone is not a proof. A container that only passes on the output of a module or an
    operation inside it is not at fault itself.
    """
    overflowing = [c for c in choices if c.evidence.get("overflow")]
    inner = [c.module for c in overflowing]
    inner += [f.module for f in findings if f.code == "overflow" and f.module is not None]

    def passes_on(name: str) -> bool:
        prefix = f"{name}." if name else ""
        return any(m != name and m.startswith(prefix) for m in inner) or any(
            f.module == name and f.code == "overflow" for f in findings
        )

    return tuple(c for c in overflowing if not passes_on(c.module))


def leading_modules(
    modules: Sequence[Fp32Choice], operations: Sequence[Fp32Choice], graphs: Sequence[StepGraph]
) -> tuple[Fp32Choice, ...]:
    """The modules that would not be FP32 without being named.

    What is on no list of the policy is as wide as what it reads: a ReLU after a linear layer in FP32
    gives FP32. A module that no recorded step shows stays named.

    Args:
        modules: Choices of whole modules.
        operations: The plan's other choices.
        graphs: The recorded steps.
    """
    kept = list(modules)
    for one in modules:
        others = [c for c in (*kept, *operations) if c is not one]
        shown = [g for g in graphs if _inside(g, one.module)]
        if shown and all(_follows(g, one.module, others) for g in shown):
            kept.remove(one)
    return tuple(kept)


def _inside(graph: StepGraph, name: str) -> list[Operation]:
    return [op for op in graph.operations if not op.node and within(op.module, name)]


def _follows(graph: StepGraph, name: str, others: Sequence[Fp32Choice]) -> bool:
    """Whether a module reads and stores FP32 alone because of other choices."""
    sites = {(c.module, c.op) for c in others if not c.evidence.get("type")}
    whole = {c.module for c in others if c.evidence.get("type") or not c.op}
    fp32 = frozenset(
        op.index
        for op in graph.operations
        if not op.node
        and ((op.module or "", called(op)) in sites or any(within(op.module, w) for w in whole))
    )
    low = stored_low(graph, policy=True, fp32=fp32)
    return not any(
        (is_product(op) and op.index not in fp32)
        or any(low[t.tensor] for t in (*op.inputs, *op.outputs))
        for op in _inside(graph, name)
    )


def proven_operations(findings: Sequence[OperationFinding]) -> tuple[Fp32Choice, ...]:
    """Findings as choices of the plan; an operation outside every submodule has module "".

    The plan is for level O1: operations that are harmless there and on no list are left out.

    An in-place operation cannot change the precision of the tensor it writes to, so the whole module
    around it stays in FP32; without such a module there is only the finding.
    """
    choices: dict[tuple[str, str], Fp32Choice] = {}
    for f in findings:
        if f.covered_by == "neighbours" or not _can_be_kept(f):
            continue
        op = "" if f.op.endswith("_") else f.op
        module = f.module or ""
        evidence = {
            **f.evidence,
            "rule": f.code,
            "line": f.where,
            "code": f.text,
            "fix": f.fix,
            "without": f.without,
            "flops_share": f.flops_share,
            "bytes_share": f.bytes_share,
            "policy": f.covered,
        }
        choices.setdefault((op, module), Fp32Choice(op, module, f.told, evidence))
    return tuple(choices.values())


def beyond_any_plan(findings: Iterable[OperationFinding]) -> tuple[OperationFinding, ...]:
    """Findings that no plan mends: only the training's own code can."""
    return tuple(f for f in findings if not f.covered and not _can_be_kept(f))


def _can_be_kept(f: OperationFinding) -> bool:
    """Whether a policy can keep an operation in FP32.

    Not a conversion in the code, and not a write in place outside of every submodule.
    """
    return f.op != "_to_copy" and (not f.op.endswith("_") or bool(f.module))


def activation_findings(
    layers: Layers, target: FloatFormat, modules: Sequence[Fp32Choice], *, bf16: bool = True
) -> Iterator[Finding]:
    """Modules whose outputs leave a format's range, or come close to its end.

    Args:
        layers: Merged histograms.
        target: The format to train in.
        modules: The plan's choices by module.
        bf16: Whether BF16's own rules find nothing.
    """
    activations = layers.of_kind("activation")
    named = {c.module: c for c in modules if c.evidence.get("overflow")}
    if named:
        worst = max(named.values(), key=lambda c: float(c.evidence["absmax"]))
        yield error(
            code="activation-overflow",
            message=f"{counted(len(named), 'module')} {'has' if len(named) == 1 else 'have'} output "
            f"values beyond {target.label}'s range; the largest is {worst.evidence['absmax']:.3g} in "
            f"{worst.module or 'the model'}",
            evidence={"modules": sorted(named), "absmax": worst.evidence["absmax"]},
            fix=f"keep them in FP32 (the plan does){', or train in BF16' if bf16 else ''}; a loss "
            "scale does not help",
        )
    close = [
        (str(name), float(top))
        for name, top in zip(activations.names, activations.histograms.absmax, strict=True)
        if target.max / CLOSE <= top and not target.overflows(float(top))
    ]
    if close:
        name, top = max(close, key=lambda item: item[1])
        yield warning(
            code="activation-close-to-overflow",
            message=f"the output of {name or 'the model'} reaches {top:.3g}, within {CLOSE:g}× "
            f"of {target.label}'s largest value",
            evidence={"modules": [n for n, _ in close], "absmax": top},
            fix="if you train longer, it may overflow: keep it in FP32"
            f"{', or train in BF16' if bf16 else ''}",
        )
