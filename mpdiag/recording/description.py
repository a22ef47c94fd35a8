"""What ``meta.json`` says of a training, for recorder and trainer alike."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.runs import provenance
from mpdiag.tracing.names import type_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer


def describe_training(models: Sequence[nn.Module]) -> dict[str, Any]:
    """The models, and where and how the program runs that trains them.

    Args:
        models: At least one; a parameter that several hold counts once.
    """
    versions = provenance.versions()
    parameters = {id(p): p for model in models for p in model.parameters()}
    return {
        "mpdiag": versions.get("mpdiag", "unknown"),
        "argv": provenance.arguments(),
        "device": provenance.device(models[0]),
        "versions": versions,
        "seeds": {"torch": torch.initial_seed()},
        "model": {
            "type": ", ".join(type_name(model) for model in models),
            "parameters": sum(p.numel() for p in parameters.values()),
        },
    }


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """The type of an optimizer and the plain settings of its first group."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    settings = {
        name: value
        for name, value in group.items()
        if isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    }
    return {"type": type(optimizer).__name__, **settings}
