"""The verdict's figures: the four that decide, the levels, the formats."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.figures import at_scale
from mpdiag.analysis.scaling.necessity import MATTERS
from mpdiag.display.wording import scale_text, superscript
from mpdiag.numerics.formats import FORMATS, half_of
from mpdiag.plan import PrecisionPlan

UNKNOWN = "–"
"""Stands for a figure that the recording cannot give, as ``percent`` has it."""

MEMORY = (
    "Predicted peak of a step: weights and their gradients, optimizer state, what modules return, the "
    "loss. Not included: what autograd keeps of plain functions, gradients of activations, workspace "
    "of kernels. The batch says how many recorded batches should fit into O0's memory."
)


@dataclass(frozen=True)
class Fact:
    """One figure with what it is called, a few words beside it, and what it means; no markup."""

    label: str
    value: str
    note: str
    meaning: str


def facts(analysis: Analysis) -> tuple[Fact, ...]:
    """Four figures that decide: the scale, its interval, what is lost, the masters."""
    scale, plan = analysis.loss_scale, analysis.plan.loss_scale
    known = plan.need != "unknown" and analysis.advises
    need = plan.need if analysis.advises else UNKNOWN
    upper = scale_text(plan.upper)
    scale_at = at_scale(plan.recommended)
    label = half_of(analysis.target).label
    before = analysis.figures.find("all-values")
    after = analysis.figures.find("all-values-scaled") or before
    where = analysis.figures.all_steps
    ends = [
        f"2{superscript(round(math.log2(end)))}" if end else "∞" for end in (plan.lower, plan.upper)
    ]
    masters = analysis.plan.master_weights
    return (
        Fact(
            "Loss scale",
            scale_text(plan.recommended) if known else UNKNOWN,
            need if plan.method == "none" or not known else f"{need}; {plan.method}",
            "The loss is multiplied by it before backward(), so that small gradients do not become 0 "
            "in FP16. The gradients are divided by it before the step. 1 means no scaling.",
        ),
        Fact(
            "Admissible interval",
            (" to ".join(ends) if scale.fits else "none") if known else UNKNOWN,
            f"{scale_text(plan.lower)} to {upper}" if known else need,
            "Loss scales that work. Below, too many gradients become 0. Above, gradients overflow to "
            "infinity.",
        ),
        Fact(
            "Gradients lost to 0",
            after.said if known and after is not None else UNKNOWN,
            UNKNOWN
            if not analysis.advises
            else "without a loss scale"
            if after is before
            else f"{analysis.figures.said('all-values')} without a loss scale",
            f"Share of all layers' activation gradients, {where}, that become 0 in {label} {scale_at}. "
            "One layer may lose much more late in the training: see the verdict.",
        ),
        Fact(
            "Updates rounded away",
            analysis.figures.said("updates-swallowed") if known else UNKNOWN,
            f"FP32 masters {'needed' if masters.needed else 'not needed'}" if known else need,
            f"Share of updates, {where}, that are too small to change a 16-bit weight. FP32 master "
            "weights keep them.",
        ),
    )


def levels_frame(plan: PrecisionPlan) -> pd.DataFrame:
    """The opt levels in the order to try them."""
    rows = [
        (a.level, round(a.memory_bytes / 1e6, 1), f"{a.batch_factor:g} ×", a.possible, a.reason)
        for a in plan.levels
    ]
    return pd.DataFrame(rows, columns=["level", "memory (MB)", "batch", "possible", "why"])


def formats_note(analysis: Analysis) -> str:
    """What the table of formats is of: its steps and scales."""
    where, scale = analysis.figures.all_steps, at_scale(analysis.plan.loss_scale.recommended)
    return (
        f"Shares of values that become 0 or ∞ {where}. Last column: how far rounding moves the "
        f"activation gradients of the worst layer; more than {100 * MATTERS:g} % is harmful. "
        f"FP16 gradients {scale}, FP8 with a scale for each layer."
    )


def formats_frame(formats: Mapping[str, Any]) -> pd.DataFrame:
    """Share of values lost by format (rows) and kind, to 0 and to infinity together, and rounding.

    Rounding is of the activation gradients, where there are some; NaN where a layer overflows.
    """
    rows = {}
    for name, summary in formats.items():
        kinds = summary["kinds"]
        row = {k.replace("_", " "): s["underflow"] + s["overflow"] for k, s in kinds.items()}
        if "activation_grad" in kinds:
            error = kinds["activation_grad"]["rounding"]
            row["rounding, worst layer"] = math.nan if error is None else error
        rows[FORMATS[name].label] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("format")
