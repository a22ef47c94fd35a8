"""What differs between two forward passes of a model: per token, per layer, and what would help."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpdiag.files.documents import finite

SCHEMA_VERSION = 1
MATTERS = 0.01
"""Share of the squared difference from which a layer is worth keeping in FP32."""


@dataclass(frozen=True)
class LayerMismatch:
    """What one module contributes.

    Shares are of the squared difference of all log-probabilities. They sum to 1 where what different
    modules add is independent.

    Attributes:
        name: As PyTorch names it; ``""`` is the model itself.
        kind: Its class.
        numel: Elements of its own parameters.
        difference: ‖b − a‖ / ‖a‖ of its outputs: how the difference grows from module to module.
            None where they cannot be put side by side.
        added: The share that it adds itself, without the modules inside it.
        removable: The share that FP32 takes away in this layer; None of a module that was not tried.
    """

    name: str
    kind: str
    numel: int
    difference: float | None
    added: float
    removable: float | None


@dataclass(frozen=True)
class Distance:
    """How far two passes are apart, over all tokens.

    Attributes:
        mean, max: |log p_b − log p_a| of the token.
        kl: Mean KL divergence KL(a‖b) over the whole vocabulary, in nats.
        probability_mean, probability_max: |p_b − p_a| of the token.
    """

    mean: float
    max: float
    kl: float
    probability_mean: float
    probability_max: float


@dataclass(frozen=True)
class Mismatch:
    """What differs between two forward passes, and what would help.

    Attributes:
        tokens: How many were compared.
        distance: Between the passes.
        layers: In the order in which the first model calls them.
        keep: Layers to keep in FP32 within ``budget``, the most important first.
        budget: Largest share of the parameters that may stay in FP32.
        kept: The distance with ``keep`` in FP32 in both models, measured; None if ``keep`` is empty.
        fp16: The distance with FP16 in place of BF16, measured; None if it was not.
        fp16_reason: Why FP16 was not measured; empty where it was.
        loss_scale: For a training in FP16, from the recording; None without one.
        unequal: Parameters that one model lacks, or that differ by more than rounding.
    """

    tokens: int
    distance: Distance
    layers: tuple[LayerMismatch, ...]
    keep: tuple[str, ...]
    budget: float
    kept: Distance | None
    fp16: Distance | None
    fp16_reason: str
    loss_scale: float | None
    unequal: tuple[str, ...]

    @property
    def ranking(self) -> list[LayerMismatch]:
        """The layers that were tried in FP32, the one that takes most away first."""
        tried = [layer for layer in self.layers if layer.removable is not None]
        return sorted(tried, key=lambda layer: -(layer.removable or 0.0))

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag mismatch --json``."""
        document: dict[str, Any] = finite(asdict(self))
        return {"schema_version": SCHEMA_VERSION, **document}


def worth_keeping(layers: Sequence[LayerMismatch], budget: float) -> tuple[str, ...]:
    """Layers to keep in FP32, the one that takes most away first, as the budget allows."""
    left = budget * sum(layer.numel for layer in layers)
    chosen = []
    for layer in sorted(layers, key=lambda layer: -(layer.removable or 0.0)):
        if (layer.removable or 0.0) >= MATTERS and layer.numel <= left:
            chosen.append(layer.name)
            left -= layer.numel
    return tuple(chosen)
