"""What quantising a layer's matrix products does to the loss, estimated from its recorded operands.

An error e of a layer's output y = x · w changes the loss by Σ a·e, where a is the loss's gradient with
respect to y (``sensitivity.loss_estimate`` sums these products on tensors). A recording has the sums
Σx², Σw², Σa² and Σ(q - x)², Σ(q - w)², not which value met which. For errors independent of the
values, the square of the change is on average::

    S = Σa² · K · (mean (q - x)² · mean w² + mean x² · mean (q - w)²)

with K values summed over for each output. Its sign differs from step to step. What stays is the second
order: for a mean over N losses, each a negative log-likelihood, the squares of their gradients are on
average their curvature (Fisher), and the loss rises by N/2 · S. N is the number of lines of the last
layer that have a gradient. Squares of (gradient · error) are also the score of ModelOpt's AutoQuantize,
which takes them on tensors. ``studies/block_decisions.py`` holds the estimate against measured changes.
The errors of wgrad follow from those of its operands in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpdiag.analysis.blocks.operands import tiles_of
from mpdiag.analysis.operations.loss_change import LossCurve
from mpdiag.numerics.block_recipes import OPERANDS, BlockRecipe, OperandFormat
from mpdiag.runs.block_operands import BlockOperand

Key = tuple[str, str]
"""A layer: module and parameter."""
_Operands = dict[tuple[str, str], BlockOperand]
_Steps = dict[tuple[int, int], dict[tuple[int, int | None], _Operands]]
"""Operands by product and operand; those of each call and expert, of each step and rank."""


@dataclass(frozen=True)
class LayerEffect:
    """What quantising all products of a layer does.

    Attributes:
        module: Its name.
        parameter: Name of the weight in the module.
        kind: Of its products.
        flops: Of all its products in a step, forward and backward.
        length, outputs, tokens: Sizes of its products; tokens of an expert: the fewest in a step.
        rise: N/2 · S of the forward product as a share of the loss, averaged over steps: an estimate of
            how far quantising this layer alone raises the loss. Not a share where no loss was logged;
            NaN where the layer's gradient was not recorded.
        output_error: ‖error of y‖ / ‖y‖ for independent values, which the layer adds.
        wgrad_error: ‖error‖ / ‖gradient‖ of the weight's gradient; NaN if it is not known.
        by_step: ``rise`` by step.
    """

    module: str
    parameter: str
    kind: str
    flops: float
    length: int
    outputs: int
    tokens: int
    rise: float
    output_error: float
    wgrad_error: float
    by_step: Mapping[int, float]

    @property
    def key(self) -> Key:
        """Module and parameter."""
        return self.module, self.parameter


def layer_effects(
    rows: Sequence[BlockOperand],
    recipe: BlockRecipe,
    curve: LossCurve,
    gradients: Mapping[str, float],
) -> list[LayerEffect]:
    """The effect of each layer, in the order of their first appearance.

    Args:
        rows: One for each step × rank × operand; those outside modules are left out.
        recipe: What quantises them.
        curve: The recorded losses.
        gradients: Mean Σg² of a step, by parameter.
    """
    terms = _loss_terms(rows)
    layers: dict[tuple[Key, str], _Steps] = {}
    names: dict[Key, str] = {}
    for row in rows:
        if row.module is None:
            continue
        key = row.module, local_name(row.module, row.parameter, row.product)
        names.setdefault(key, row.parameter)
        step = layers.setdefault((key, row.product), {}).setdefault((row.steps[0], row.rank), {})
        step.setdefault((row.call, row.expert), {})[row.gemm, row.operand] = row
    return [
        _effect(key, kind, steps, recipe, curve, gradients.get(names[key], math.nan), terms)
        for (key, kind), steps in layers.items()
    ]


def _loss_terms(rows: Sequence[BlockOperand]) -> float:
    """How many losses a step averages: the lines of the last linear layer that have a gradient.

    A position without a loss (padding, or one that a masked model is not asked for) has a gradient of
    zeros. 1 without a linear layer.
    """
    inputs = [row for row in rows if (row.product, row.gemm, row.operand) == _LAST]
    if not inputs:
        return 1.0
    first = [row for row in inputs if (row.steps, row.rank) == (inputs[0].steps, inputs[0].rank)]
    last = first[-1]
    shares = [
        1 - row.depths.zeros / row.counted
        for row in rows
        if (row.steps, row.rank, row.key[:4]) == (last.steps, last.rank, last.key[:4])
        and (row.gemm, row.operand) == ("dgrad", "grad_output")
        and row.counted
    ]
    return last.lines * min(shares, default=1.0)


_LAST = ("linear", "fprop", "input")


def local_name(module: str, parameter: str, kind: str) -> str:
    """A parameter's name in its module; ``weight`` for a tied one, which has another module's name."""
    inside = parameter.removeprefix(f"{module}.") if module else parameter
    return inside if "." not in inside or kind in ("grouped", "experts") else "weight"


def _effect(
    key: Key,
    kind: str,
    steps: _Steps,
    recipe: BlockRecipe,
    curve: LossCurve,
    gradient: float,
    terms: float,
) -> LayerEffect:
    rises: dict[int, list[float]] = {}
    wgrads, found = [], []
    for (number, _), products in steps.items():
        scale = curve.scales.get(number, 1.0)
        few = [_products(operands, recipe, scale) for operands in products.values()]
        size = curve.size(number) or (1.0 if not curve.losses else math.nan)
        rises.setdefault(number, []).append(terms / 2 * sum(p.change for p in few) / size)
        wgrads.append(sum(p.wgrad for p in few))
        found += few
    by_step = {number: _mean(rise) for number, rise in rises.items()}
    return LayerEffect(
        *key,
        kind,
        sum(p.flops for p in found) / len(steps),
        found[-1].length,
        found[-1].outputs,
        min(p.tokens for p in found),
        rise=_mean([rise for rise in by_step.values() if not math.isnan(rise)]),
        output_error=math.sqrt(_mean([p.noise for p in found if not math.isnan(p.noise)])),
        wgrad_error=math.sqrt(_mean(wgrads) / gradient) if gradient else math.nan,
        by_step=by_step,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


class _Products(NamedTuple):
    """The three products of one call of a layer, of one expert if it has some; NaN is not known.

    Attributes:
        change: S, the mean square of the change of the loss.
        wgrad: Σ of the squared error of the weight's gradient.
        noise: The squared relative error of the output.
        flops: Of all three.
        length, outputs, tokens: Their sizes; 0 where the forward product was not recorded.
    """

    change: float
    wgrad: float
    noise: float
    flops: float
    length: int
    outputs: int
    tokens: int


def _products(operands: _Operands, recipe: BlockRecipe, scale: float) -> _Products:
    known = {
        place: _squares(one, recipe.operand(*place), scale if place[1] == "grad_output" else 1.0)
        for place, one in operands.items()
    }
    (x, dx), (w, dw), (g, dg), (across, d_across), (a, _) = (
        known.get(place, (math.nan, math.nan))
        for place in (
            *(("fprop", "input"), ("fprop", "weight")),
            *(("wgrad", "grad_output"), ("wgrad", "input"), ("dgrad", "grad_output")),
        )
    )
    a = g if math.isnan(a) else a  # of a layer with an input that needs no gradient
    inputs, weights = operands.get(("fprop", "input")), operands.get(("fprop", "weight"))
    length = inputs.length if inputs else 0
    outputs, tokens = weights.lines if weights else 0, inputs.lines if inputs else 0
    return _Products(
        change=a * tokens * outputs * length * (dx * w + x * dw),
        wgrad=outputs * length * tokens * (dg * across + g * d_across),
        noise=dx / x + dw / w if x and w else math.nan,
        flops=sum(
            max((one.flops for (of, _), one in operands.items() if of == gemm), default=0)
            for gemm in OPERANDS
        ),
        length=length,
        outputs=outputs,
        tokens=tokens,
    )


def _squares(one: BlockOperand, fmt: OperandFormat, scale: float) -> tuple[float, float]:
    """Mean square of an operand's unscaled values and of their errors, NaN without a measurement."""
    tiles, like = tiles_of([one], fmt)
    values = scale**2 * sum(tile.values for tile in tiles[0]) if tiles else 0
    if not values:
        return math.nan, math.nan
    beside = 10 ** ((like.par_db - fmt.par_db) / 10)
    error = sum(tile.error for tile in tiles[0]) * beside
    return sum(tile.signal for tile in tiles[0]) / values, error / values
