"""One small training whose truth is known by training it.

A case is ordinary code that somebody might write: a model, an optimizer and a loss. It says nothing
about precision; what it needs is found by training it in several precisions (``truth.py``), and
what the analyzer foretells from an FP32 recording is scored against that (``score.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


@dataclass(frozen=True)
class Training:
    """What one seed builds.

    Attributes:
        model: Trained in FP32; every parameter that is trained belongs to it.
        optimizer: Any of torch's that needs no closure.
        loss: From the step's index (from 0) to a scalar loss. It runs the forward pass and draws its
            data from the seed and the index alone, so that every precision sees the same batches.
        evaluate: The metric after training, in FP32 and without gradients, on data that is the same
            for every precision.
        clip_norm: Clip the gradients' norm to this before each step.
        schedule: Called with the step's index before it, to set learning rates.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], torch.Tensor]
    evaluate: Callable[[], float]
    clip_norm: float | None = None
    schedule: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Case:
    """A training, its length and how its result is measured.

    Attributes:
        name: Unique in the collection, in snake case.
        about: One sentence: what is trained on what.
        steps: Optimizer steps of one training.
        build: From a seed to a training; the same seed always builds the same one.
        metric: What ``evaluate`` returns, for people.
        higher_is_better: Whether a larger metric is a better one.
        margin: The loss of the metric, absolute, that somebody who trains this would not accept.
    """

    name: str
    about: str
    steps: int
    build: Callable[[int], Training]
    metric: str
    higher_is_better: bool
    margin: float
