"""What quantising a layer's matrix products does to the loss, estimated from its recorded operands.

An error e of a layer's output y = x · w changes the loss by Σ a·e, where a is the loss's gradient with
respect to y (``sensitivity.loss_estimate`` sums these products on tensors). A recording has the sums
Σx², Σw², Σa² and Σ(q - x)², Σ(q - w)², not which value met which. For errors independent of the
values, the square of the change is on average::

    S = Σa² · K · (mean (q - x)² · mean w² + mean x² · mean (q - w)²)

with K values summed over for each output. Its sign differs from step to step. What stays is the second
order: for a mean over N losses, each a negative log-likelihood, the squares of their gradients are on
average their curvature (Fisher), and the loss rises by N/2 · S. N is the number of lines of the last
layer. Squares of (gradient · error) are also the score of ModelOpt's AutoQuantize, which takes them on
tensors. ``studies/block_decisions.py`` holds the estimate against measured changes. The errors of wgrad
follow from those of its operands in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpdiag.analysis.blocks.operands import tiles_of
from mpdiag.analysis.operations.loss_change import LossCurve
from mpdiag.numerics.block_recipes import OPERANDS, BlockRecipe
from mpdiag.runs.block_operands import BlockOperand

Key = tuple[str, str]
"""A layer: module and parameter."""


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


@dataclass
class _Step:
    """A layer's operands in one step of one rank, by product and operand; of grouped ones by expert."""

    operands: dict[tuple[int, int | None, str, str], BlockOperand]

    def products(self) -> Iterable[tuple[int, int | None]]:
        return dict.fromkeys((call, expert) for call, expert, *_ in self.operands)


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
    layers: dict[tuple[Key, str], dict[tuple[int, int], _Step]] = {}
    names: dict[Key, str] = {}
    for row in rows:
        if row.module is None:
            continue
        key = row.module, local_name(row.module, row.parameter, row.product)
        names.setdefault(key, row.parameter)
        steps = layers.setdefault((key, row.product), {})
        step = steps.setdefault((row.steps[0], row.rank), _Step({}))
        step.operands[row.call, row.expert, row.gemm, row.operand] = row
    return [
        _effect(key, kind, steps, recipe, curve, gradients.get(names[key], math.nan), terms)
        for (key, kind), steps in layers.items()
    ]


def _loss_terms(rows: Sequence[BlockOperand]) -> int:
    """How many losses a step averages: the lines of the last linear layer; 1 without one."""
    inputs = [row for row in rows if (row.product, row.gemm, row.operand) == _LAST]
    first = [row for row in inputs if (row.steps, row.rank) == (inputs[0].steps, inputs[0].rank)]
    return first[-1].lines if first else 1


_LAST = ("linear", "fprop", "input")


def local_name(module: str, parameter: str, kind: str) -> str:
    """A parameter's name in its module; ``weight`` for a tied one, which has another module's name."""
    inside = parameter.removeprefix(f"{module}.") if module else parameter
    return inside if "." not in inside or kind == "grouped" else "weight"


def _effect(
    key: Key,
    kind: str,
    steps: Mapping[tuple[int, int], _Step],
    recipe: BlockRecipe,
    curve: LossCurve,
    gradient: float,
    terms: int,
) -> LayerEffect:
    rises: dict[int, list[float]] = {}
    noises: list[float] = []
    wgrads, flops, sizes = [], 0.0, (0, 0, 0)
    for (number, _), step in steps.items():
        found = [_Product(step, call, expert, recipe) for call, expert in step.products()]
        size = curve.size(number) or (1.0 if not curve.losses else math.nan)
        rise = terms / 2 * sum(product.squared_change() for product in found) / size
        rises.setdefault(number, []).append(rise)
        wgrads.append(sum(product.wgrad_error() for product in found))
        for product in found:
            flops += product.flops()
            sizes = product.sizes(sizes)
            noises += product.noise()
    by_step = {number: _mean(few) for number, few in rises.items()}
    return LayerEffect(
        *key,
        kind,
        flops / max(1, len(steps)),
        *sizes,
        rise=_mean([rise for rise in by_step.values() if not math.isnan(rise)]),
        output_error=math.sqrt(_mean(noises)),
        wgrad_error=math.sqrt(_mean(wgrads) / gradient) if gradient else math.nan,
        by_step=by_step,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


class _Product:
    """The three products of one call of a layer, of one expert if it has some."""

    def __init__(self, step: _Step, call: int, expert: int | None, recipe: BlockRecipe) -> None:
        self._found = {
            gemm: {name: step.operands.get((call, expert, gemm, name)) for name in names}
            for gemm, names in OPERANDS.items()
        }
        self._recipe = recipe

    def _of(self, gemm: str, name: str) -> BlockOperand | None:
        return self._found[gemm][name]

    def flops(self) -> float:
        """Of all three."""
        return sum(
            max((o.flops for o in few.values() if o), default=0) for few in self._found.values()
        )

    def sizes(self, known: tuple[int, int, int]) -> tuple[int, int, int]:
        """Length, outputs and tokens; the fewest tokens where several are known."""
        x, w = self._of("fprop", "input"), self._of("fprop", "weight")
        if x is None or w is None:
            return known
        return x.length, w.lines, min(x.lines, known[2] or x.lines)

    def _squares(self, gemm: str, name: str) -> tuple[float, float]:
        """Mean square of an operand's values and of their errors, NaN where they are not known."""
        one = self._of(gemm, name)
        tiles = [] if one is None else tiles_of([one], self._recipe.operand(gemm, name))[0]
        values = sum(t.values for t in tiles[0]) if tiles else 0
        if not values:
            return math.nan, math.nan
        return sum(t.signal for t in tiles[0]) / values, sum(t.error for t in tiles[0]) / values

    def _error(self, gemm: str) -> float:
        """Mean square of the error of a product's results."""
        one, other = OPERANDS[gemm]
        (a, da), (b, db) = self._squares(gemm, one), self._squares(gemm, other)
        length = next((o.length for o in self._found[gemm].values() if o), 0)
        return length * (da * b + a * db)

    def squared_change(self) -> float:
        """S, the mean square of the change of the loss; NaN without a gradient."""
        x, w = self._of("fprop", "input"), self._of("fprop", "weight")
        if x is None or w is None:
            return math.nan
        gradient, _ = self._squares("dgrad", "grad_output")
        if math.isnan(gradient):  # the layer's input needs no gradient
            gradient, _ = self._squares("wgrad", "grad_output")
        return gradient * x.lines * w.lines * self._error("fprop")

    def wgrad_error(self) -> float:
        """Σ of the squared error of the weight's gradient."""
        g, x = self._of("wgrad", "grad_output"), self._of("wgrad", "input")
        return math.nan if g is None or x is None else g.lines * x.lines * self._error("wgrad")

    def noise(self) -> list[float]:
        """The squared relative error of the layer's output, if it is known."""
        squares = [self._squares("fprop", name) for name in OPERANDS["fprop"]]
        found = sum(error / value if value else math.nan for value, error in squares)
        return [] if math.isnan(found) else [found]
