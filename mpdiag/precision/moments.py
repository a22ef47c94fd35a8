"""Moving averages of optimizers, and the factor by which each falls in a step without gradient.

Sources: ``torch/optim`` 2.13 (adam, adamw, nadam, radam, adamax, rmsprop, adadelta, sgd, adafactor,
muon), Chen et al. 2023 for Lion, Gupta et al. 2018 for Shampoo, whose factors are sums and never fall.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def moments(holder: str, groups: Iterable[Mapping[str, Any]]) -> dict[str, set[float]]:
    """The factors of an optimizer's states, by the state's name.

    Args:
        holder: The optimizer's type.
        groups: Settings of its parameter groups.
    """
    found: dict[str, set[float]] = {}

    def note(state: str, factor: object) -> None:
        if isinstance(factor, (int, float)) and 0.0 < float(factor) < 1.0:
            found.setdefault(state, set()).add(float(factor))

    for group in groups:
        betas = group.get("betas")
        if isinstance(betas, (list, tuple)) and len(betas) >= 2:
            note("exp_avg", betas[1] if "lion" in holder.lower() else betas[0])
            if "lion" not in holder.lower():
                for state in ("exp_avg_sq", "exp_inf"):
                    note(state, betas[1])
        note("square_avg", group.get("alpha", group.get("rho")))
        note("momentum_buffer", group.get("momentum"))
    return found
