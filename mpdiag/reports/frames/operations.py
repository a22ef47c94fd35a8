"""What stays in FP32, what the recorded numbers prove, and the format each layer could have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from mpdiag.numerics.autocast_lists import CALLED_AS, policy_name
from mpdiag.numerics.formats import FORMATS
from mpdiag.reports.words import layer_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.runs.operations import Operation

# What a user calls, by the ATen operation that is recorded of it.
_CALLED_AS: dict[str, tuple[str, ...]] = {
    **CALLED_AS,
    "native_layer_norm": ("layer_norm",),
    "native_batch_norm": ("batch_norm",),
    "_native_batch_norm_legit": ("batch_norm",),
    "native_dropout": ("dropout",),
    "_adaptive_avg_pool2d": ("adaptive_avg_pool2d",),
    "max_pool2d_with_indices": ("max_pool2d",),
}
Lines = dict[tuple[str, str], str]
"""The user's line of each (module, operation): the first where there are several."""


def lines_of(operations: Sequence[Operation]) -> Lines:
    """Where each recorded operation of each module was called."""
    found: Lines = {}
    for op in operations:
        if op.where and not op.node:
            line = f"{op.where}: {op.code}" if op.code else op.where
            for name in (policy_name(op.op), *_CALLED_AS.get(op.op, ())):
                found.setdefault((op.module or "", name), line)
    return found


def operations_frame(analysis: Analysis) -> pd.DataFrame:
    """What stays in FP32, as the plan has it: ``module``, ``operation``, ``why``, ``line``."""
    rows = [
        {
            "module": layer_name(choice.module),
            "operation": choice.op or "all of it",
            "why": choice.reason,
            "line": _line(choice.evidence),
            "largest |x|": choice.evidence.get("absmax"),
            "values that overflow": choice.evidence.get("overflow"),
        }
        for choice in analysis.plan.fp32_operations
    ]
    columns = ["module", "operation", "why", "line", "largest |x|", "values that overflow"]
    frame = pd.DataFrame(rows, columns=columns)
    # A column that says nothing of any of them is left out.
    told = [c for c in columns[3:] if (frame[c].notna() & (frame[c] != "")).any()]
    return frame[columns[:3] + told]


def _line(evidence: Mapping[str, Any]) -> str:
    where, code = str(evidence.get("line") or ""), str(evidence.get("code") or "")
    return f"{where}: {code}" if where and code else where


def proven_frame(analysis: Analysis) -> pd.DataFrame:
    """Operations that the recorded numbers themselves show to need FP32, each with its line."""
    rows = [
        {
            "operation": found.op,
            "module": layer_name(found.module),
            "line": found.where,
            "code": found.text,
            "why": found.reason,
            "without it": found.without,
            "fix": found.fix,
            "already so by the policy": found.covered,
        }
        for found in analysis.operations
    ]
    return pd.DataFrame(rows)


def layer_formats_frame(analysis: Analysis) -> pd.DataFrame:
    """The narrowest format of each layer's activations and activation gradients, as the plan has it."""
    rows = [
        {
            "layer": layer_name(advice.name),
            "tensors": advice.kind.replace("_", " "),
            "format": FORMATS[advice.format].label,
            "largest |x|": advice.evidence.get("absmax"),
        }
        for advice in analysis.plan.layer_formats
    ]
    return pd.DataFrame(rows, columns=["layer", "tensors", "format", "largest |x|"])
