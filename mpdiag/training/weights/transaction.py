"""Weights and optimizer state as they were, for steps that may have to be undone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from mpdiag.training.results import NonFiniteKind


class Transaction:
    """A copy of what some optimizers hold; it takes their memory once more while it exists."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._weights = [
            (p, p.detach().clone()) for o in optimizers for g in o.param_groups for p in g["params"]
        ]
        self._states = [{p: _copied(s) for p, s in o.state.items()} for o in optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights and optimizer states."""
        for parameter, value in self._weights:
            parameter.copy_(value)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)

    def non_finite_state(
        self, names_of: Callable[[Sequence[Tensor]], list[str]]
    ) -> list[tuple[str, NonFiniteKind]]:
        """Parameters whose optimizer state is not finite, each with ``NaN`` or ``Inf``."""
        found: list[tuple[str, NonFiniteKind]] = []
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for value in tree_leaves(dict(state)):
                    if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                        name = names_of([parameter])[0]
                        found.append((name, "NaN" if bool(torch.isnan(value).any()) else "Inf"))
        return found


def _copied(state: Any) -> Any:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
    }
