"""Which gradients move weights: what a layer loses matters as far as its parameters move.

A gradient can be far below FP16's range and also do nothing in FP32: behind a saturated softmax, or
in a branch with a weight of 0. With Adam a small gradient may still move its weights as far as any
other, so the updates decide, not the gradients.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.layers import Layers, share

MOVES = 2.0**-12
"""Σ|Δw| over Σ|w| in a part of the training below which a parameter does not move there.

FP16 keeps 11 bits, so the copy of the weight that the forward pass reads stays the same.
"""
FAINT = 2.0**-16
"""A gradient this much smaller than those of all layers that move adds nothing to theirs.

Rounding to FP16 changes a gradient by 2^-11 of itself; the other 5 powers of two are for gradients
that grow on their way back through the layers before.
"""
AT_STAKE = 0.02
"""Σ|Δw| over Σ|w| that a layer which loses much must have for a scale to be *needed*.

Of the trainings of ``studies/cases`` that FP16 fails for want of a scale, 33 of 35 move such a layer
by 0.03 or more late in the training; of 23 that lose as much and train as FP32 does, 11 do.
"""


@dataclass(frozen=True)
class Movement:
    """How far parameters move in a part of the training.

    Attributes:
        paths: Σ|Δw| of each parameter whose updates and values were recorded; 0 where only weight
            decay moves it.
        sizes: Σ|w| of the same parameters.
        parameters: All parameters with a recorded gradient or update.
    """

    paths: Mapping[str, float]
    sizes: Mapping[str, float]
    parameters: frozenset[str] = frozenset()

    def moves(self, layer: str) -> bool:
        """Whether a parameter of a layer, or of a layer inside it, moves or may move."""
        return any(
            name not in self.paths or self.paths[name] > MOVES * self.sizes[name]
            for name in self._of(layer)
        )

    def relative(self, layer: str) -> float:
        """Σ|Δw| over Σ|w| of a layer and those inside it; without parameters, of the module around it.

        It is infinite where it is not known, and where no parameter of the model moves.
        """
        while layer and not self._of(layer):
            layer = layer.rpartition(".")[0]
        names = self._of(layer)
        if not names <= self.paths.keys() or not any(self.paths.values()):
            return math.inf
        path, size = (sum(of[name] for name in names) for of in (self.paths, self.sizes))
        return path / size if size else math.inf

    def _of(self, layer: str) -> frozenset[str]:
        inside = f"{layer}." if layer else ""
        return frozenset(name for name in self.parameters if name.startswith(inside))


UNKNOWN = Movement({}, {})
"""No update was recorded, so that every gradient counts."""


def movement_of(
    paths: Mapping[str, float],
    layers: Layers,
    gradients: Layers,
    optimizers: Collection[Mapping[str, Any]] = (),
) -> Movement:
    """How far the gradients of a part of the training move the parameters there.

    Args:
        paths: Σ|Δw| of each parameter with recorded updates, in that part.
        layers: All merged rows.
        gradients: Those of the part.
        optimizers: Their settings, as ``meta.json`` has them.
    """
    sizes = _per_step(layers.of_kind("weight"))
    pushes = _per_step(gradients.of_kind("weight_grad"))
    known = {
        name: 0.0 if _only_decays(pushes.get(name, math.inf), sizes[name], optimizers) else path
        for name, path in paths.items()
        if name in sizes
    }
    names = layers.of_kind("weight_grad", "update").names
    return Movement(known, {name: sizes[name] for name in known}, frozenset(map(str, names)))


def _per_step(layers: Layers) -> dict[str, float]:
    """Σ|x| of one recorded step, on average, by name."""
    sums = (layers.histograms.abs_sum().value / layers.steps).tolist()
    return dict(zip(map(str, layers.names), sums, strict=True))


def _only_decays(push: float, size: float, optimizers: Collection[Mapping[str, Any]]) -> bool:
    """Whether a parameter's gradient is nothing beside its weight decay.

    Optimizers with an ``eps``, as Adam, magnify a gradient to its size over ``eps`` at most.

    Args:
        push: Σ|g| of a step.
        size: Σ|w|.
        optimizers: Any of them may hold the parameter.
    """
    decays = [
        MOVES * float(one.get("weight_decay") or 0.0) * float(one.get("eps", 1.0)) * size
        for one in optimizers
    ]
    return push < min(decays, default=0.0)


def felt(late: Layers, movement: Movement) -> NDArray[np.bool_]:
    """Which layers' activation gradients move weights, their own or those of layers before them.

    Args:
        late: Activation gradients of a part of the training.
        movement: Of the same part.

    Returns:
        bool (layers,). All, where no layer is known to have a parameter that moves.
    """
    own = np.array([movement.moves(str(name)) for name in late.names], bool)
    h = late.histograms
    sums = h.abs_sum().value
    counting = own & (sums > 0)
    if not counting.any():
        return np.ones(len(late), bool)
    means = share(sums, h.finite)
    faint = (sums < FAINT * sums[counting].min()) & (means < FAINT * means[counting].min())
    counted: NDArray[np.bool_] = own | ~faint
    return counted
