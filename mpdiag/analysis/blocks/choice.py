"""Which layers of a block recipe stay in BF16, and what rules of thumb keep at the same cost."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpdiag.analysis.blocks.effects import Key, LayerEffect, layer_effects, local_name
from mpdiag.analysis.blocks.operands import OperandError, operand_errors
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.operations.loss_change import LossCurve
from mpdiag.display.wording import percent
from mpdiag.files.documents import finite
from mpdiag.numerics.block_recipes import BUDGET, OPERANDS, WIDE, BlockRecipe
from mpdiag.plan import BlockLayer, BlockPlan
from mpdiag.runs.block_operands import BlockOperand

HARMLESS = 0.005
"""Estimated rise of the loss, as a share of it, that needs no layer in BF16: half of what NVIDIA reports
for NVFP4 with a part of the layers in BF16 (below 1 %; arXiv 2509.25149)."""
NOISY = 1 / math.sqrt(3)
"""‖error‖ / ‖gradient‖ from which training with quantised gradients stops helping (arXiv 2505.19115)."""


@dataclass(frozen=True)
class Baseline:
    """What a rule of thumb keeps in BF16 at the cost of the plan.

    Attributes:
        name: ``last layers``, ``largest divergence`` or ``gradient score``.
        kept: Its layers.
        left: The estimated rise of the loss by all others, as a share of it.
    """

    name: str
    kept: tuple[Key, ...]
    left: float

    def to_json(self) -> dict[str, Any]:
        """An entry of ``block_baselines``: module and parameter of each layer."""
        return {"name": self.name, "kept": [list(key) for key in self.kept], "left": self.left}


@dataclass(frozen=True, eq=False)
class BlockAnalysis:
    """What a recording says of a block recipe.

    Attributes:
        recipe: The recipe.
        operands: Every operand in its format.
        effects: Every layer's effect on the loss, in the model's order.
        plan: What is quantised.
        baselines: What rules of thumb would keep.
        budget: Share of the FLOPs that could stay in BF16.
        steps: The steps with recorded operands.
        shards: Tensor-parallel parts that sizes are divided by.
    """

    recipe: BlockRecipe
    operands: tuple[OperandError, ...]
    effects: tuple[LayerEffect, ...]
    plan: BlockPlan
    baselines: tuple[Baseline, ...]
    budget: float
    steps: tuple[int, ...]
    shards: int = 1

    def layer(self, effect: LayerEffect) -> BlockLayer:
        """The plan's choice for a layer."""
        return next(
            c
            for c in self.plan.layers
            if (c.module, c.parameter, c.kind) == (*effect.key, effect.kind)
        )

    def of(self, module: str) -> tuple[OperandError, ...]:
        """The operands of a module."""
        return tuple(found for found in self.operands if found.operand.module == module)

    def choices(self, module: str | None) -> tuple[BlockLayer, ...]:
        """The plan's choices for a module."""
        return tuple(layer for layer in self.plan.layers if layer.module == module)

    def worst(self) -> list[str]:
        """The modules that raise the loss most, first."""
        known = [e for e in self.effects if not math.isnan(e.rise)]
        return list(dict.fromkeys(e.module for e in sorted(known, key=lambda e: -e.rise)))

    def patterns(self) -> tuple[str, ...]:
        """How many operands of layers that could be quantised have which finding, in clauses."""
        counts = Counter(found.finding for found in self.operands)
        return tuple(
            f"{number} of {len(self.operands)} operands: {finding}"
            for finding, number in counts.most_common()
        )

    def to_json(self) -> list[dict[str, Any]]:
        """The ``blocks`` of ``mpdiag analyze --json``."""
        chosen = {(c.module, c.parameter, c.kind): c for c in self.plan.layers}
        rows = []
        for found in self.operands:
            one = found.operand
            name = one.module or ""
            layer = chosen.get((name, local_name(name, one.parameter, one.product), one.product))
            keep = getattr(layer, found.operand.gemm) if layer else WIDE
            reason = layer.reason if layer else "it is outside the model's modules"
            rows.append(found.to_json(WIDE if keep == WIDE else found.format.format, reason))
        return rows


def analyze_blocks(
    rows: Sequence[BlockOperand],
    modules: Sequence[Mapping[str, Any]],
    layers: Layers,
    curve: LossCurve,
    recipe: BlockRecipe,
    *,
    budget: float = BUDGET,
    shards: int = 1,
    unseen: Iterable[Mapping[str, Any]] = (),
) -> BlockAnalysis:
    """Judge a recipe by the recorded operands, and choose what stays in BF16.

    Args:
        rows: One for each step × rank × operand.
        modules: The run's table of modules and parameters.
        layers: Histograms, of which those of weight gradients count.
        curve: The recorded losses.
        recipe: The recipe.
        budget: Share of the matrix FLOPs that may stay in BF16.
        shards: Tensor-parallel parts that a layer is divided into.
        unseen: What ``meta.json`` says of products that show no operands.
    """
    part = layers.of_kind("weight_grad")
    energies = part.histograms.energy().value / part.steps.clip(1) if len(part) else []
    gradients = {str(name): float(e) for name, e in zip(part.names, energies, strict=True)}
    effects = layer_effects(rows, recipe, curve, gradients)
    linears = _linears(modules)
    order = {str(row["name"]): i for i, row in enumerate(modules) if row["what"] == "module"}
    effects.sort(key=lambda e: order.get(e.module, len(order)))
    bound = {e.key: reason for e in effects if (reason := _bound(e, linears, recipe, shards))}
    free = [e for e in effects if e.key not in bound]
    whole = sum(e.flops for e in effects)
    harmless = HARMLESS if curve.losses else 0.0
    kept, wide_wgrad = choose(free, budget * whole, harmless)
    left = left_of(free, kept)
    rest = "its effect is small" if left <= harmless else "the budget is spent on other layers"
    reasons = {e.key: rest for e in effects} | wide_wgrad | kept | bound
    chosen = [_layer(e, recipe, reasons[e.key], {*bound, *kept}, wide_wgrad) for e in effects]
    recorded = {e.module for e in effects} | {r.parameter.removesuffix(".weight") for r in rows}
    missing = [name for name in linears if name not in recorded]
    chosen += [
        BlockLayer(name, "weight", "linear", WIDE, WIDE, WIDE, "no product of it was recorded")
        for name in missing
    ]
    seen = {(e.module, e.kind) for e in effects}
    hidden = {str(u["module"] or "") for u in unseen if (u["module"], u["product"]) not in seen}
    spent = sum(e.flops * (e.key in kept or (e.key in wide_wgrad) / 3) for e in free)
    evidence = {
        "flops_in_bf16": _share(spent, whole),
        "flops_not_quantised": _share(sum(e.flops for e in effects if e.key in bound), whole),
        "budget": budget,
        "rise": left,
        "rise_all_quantised": left_of(free, ()),
        "late_over_early": late_over_early(free),
        "not_recorded": sorted({*missing, *hidden}),
    }
    plan = BlockPlan(
        target=recipe.target,
        formats=recipe.formats(),
        layers=tuple(chosen),
        reason=_reason(free, kept, left, budget) if curve.losses else _NO_LOSSES,
        evidence=dict(finite(evidence)),
    )
    return BlockAnalysis(
        recipe=recipe,
        operands=tuple(operand_errors(rows, recipe)),
        effects=tuple(effects),
        plan=plan,
        baselines=tuple(baselines(free, spent)),
        budget=budget,
        steps=tuple(sorted({step for row in rows for step in row.steps})),
        shards=shards,
    )


def choose(
    effects: Sequence[LayerEffect], budget: float, harmless: float = HARMLESS
) -> tuple[dict[Key, str], dict[Key, str]]:
    """The layers that stay in BF16, those with the most effect for their FLOPs first, and why.

    It ends where what is left is harmless, or the budget is spent. Where a gradient is noisier than
    ``NOISY``, wgrad alone stays in BF16 if the budget allows that.

    Args:
        effects: Of the layers that could be quantised.
        budget: FLOPs that may stay in BF16.
        harmless: The rise of the loss at which it ends.

    Returns:
        Reasons by layer: of those that stay whole, and of those that stay with wgrad.
    """
    kept: dict[Key, str] = {}
    for e in effects:
        if math.isnan(e.rise):
            kept[e.key] = "its gradient was not recorded, so its effect on the loss is not known"
    known = [e for e in effects if e.key not in kept]
    ranked = sorted(known, key=lambda e: -e.rise / max(e.flops, 1.0))
    places = {e.key: i for i, e in enumerate(sorted(known, key=lambda e: -e.rise), 1)}
    spent = 0.0
    for e in ranked:
        left = left_of(known, kept)
        if left <= harmless:
            break
        if spent + e.flops > budget:
            continue
        spent += e.flops
        kept[e.key] = (
            f"number {places[e.key]} of {len(known)} by estimated effect on the loss, "
            "and among the most for its FLOPs"
        )
    wide: dict[Key, str] = {}
    for e in ranked:
        if e.key not in kept and e.wgrad_error >= NOISY and spent + e.flops / 3 <= budget:
            spent += e.flops / 3
            wide[e.key] = (
                f"rounding errors of wgrad are {percent(e.wgrad_error)} of the weight's gradient"
            )
    return kept, wide


def left_of(effects: Iterable[LayerEffect], kept: Collection[Key]) -> float:
    """The estimated rise of the loss by all other layers: the sum, as of independent errors."""
    return sum(e.rise for e in effects if e.key not in kept and not math.isnan(e.rise))


def late_over_early(effects: Sequence[LayerEffect]) -> float:
    """The estimated rise in the last recorded step over that in the first; NaN with fewer than two.

    Of three or more the first, of initial weights, does not count. What grows during the training is
    an argument for a forward pass in BF16 at its end.
    """
    steps = sorted({step for e in effects for step in e.by_step})
    if len(steps) < 2:
        return math.nan
    first, last = (
        sum(rise for e in effects if not math.isnan(rise := e.by_step.get(step, math.nan)))
        for step in (steps[len(steps) > 2], steps[-1])
    )
    return last / first if first else math.nan


def baselines(effects: Sequence[LayerEffect], spent: float) -> Iterable[Baseline]:
    """What rules of thumb keep at a cost.

    Args:
        effects: Of the layers that could be quantised, in the model's order.
        spent: FLOPs that may stay in BF16.
    """
    known = [e for e in effects if not math.isnan(e.rise)]
    for name, order in (
        ("last layers", known[::-1]),
        ("largest divergence", sorted(known, key=lambda e: -e.output_error)),
        ("gradient score", sorted(known, key=lambda e: -e.rise)),
    ):
        kept: list[Key] = []
        cost = 0.0
        for e in order:
            if cost + e.flops <= spent * (1 + 1e-9):
                cost += e.flops
                kept.append(e.key)
        yield Baseline(name, tuple(kept), left_of(known, kept))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _linears(modules: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The modules that engines convert by name: linear layers, with their sizes."""
    found = {}
    for row in modules:
        if row["what"] != "module":
            continue
        settings = json.loads(row.get("settings") or "{}")
        if {"in_features", "out_features"} <= settings.keys():
            found[str(row["name"])] = settings
    return found


def _bound(e: LayerEffect, linears: Collection[str], recipe: BlockRecipe, shards: int) -> str:
    """Why no engine quantises a layer, whatever its effect; empty if one does."""
    if e.kind not in ("linear", "grouped"):
        return f"no engine that trains in {recipe.label} quantises products of this kind ({e.kind})"
    if e.kind == "linear" and e.module not in linears:
        return "engines convert nn.Linear, and this product is of another module"
    for name, size in (("input", e.length), ("output", e.outputs)):
        if size % recipe.multiple:
            padded = -(-size // recipe.multiple) * recipe.multiple
            return (
                f"its {name} has {size} features, not a multiple of {recipe.multiple}; padded to "
                f"{padded} it could be quantised"
            )
    if shards > 1 and all(
        size // shards % recipe.multiple or size % shards for size in (e.length, e.outputs)
    ):
        return f"no part of {shards} has sizes that are multiples of {recipe.multiple}"
    return ""


_FIGURES = ("rise", "output_error", "wgrad_error", "flops", "length", "outputs", "tokens")


def _layer(
    e: LayerEffect,
    recipe: BlockRecipe,
    reason: str,
    kept: Collection[Key],
    wide_wgrad: Collection[Key],
) -> BlockLayer:
    wide = OPERANDS if e.key in kept else ("wgrad",) if e.key in wide_wgrad else ()
    fprop, dgrad, wgrad = (WIDE if gemm in wide else recipe.target for gemm in OPERANDS)
    evidence = {name: getattr(e, name) for name in _FIGURES}
    ragged = e.tokens % recipe.multiple
    if ragged:
        evidence["tokens_padded"] = e.tokens + recipe.multiple - ragged
    return BlockLayer(
        e.module, e.parameter, e.kind, fprop, dgrad, wgrad, reason, dict(finite(evidence))
    )


_NO_LOSSES = "no losses were logged, so the layers in BF16 take the whole budget"


def _reason(
    effects: Sequence[LayerEffect], kept: Collection[Key], left: float, budget: float
) -> str:
    """How the choice was made."""
    if not effects:
        return "no layer could be quantised"
    enough = f"{percent(HARMLESS)} of the loss"
    if left <= HARMLESS:
        how = "all of them quantised" if not kept else "these layers in BF16"
        return f"with {how}, the loss rises by an estimated {percent(left)} (limit: {enough})"
    return (
        f"the layers in BF16 take the budget of {percent(budget)} of the matrix FLOPs; the loss rises "
        f"by an estimated {percent(left)} (limit: {enough})"
    )
