"""What optimizers keep: moving averages, with the factor by which each falls, and sums.

Sources: ``torch/optim`` 2.13 (adam, adamw, nadam, radam, adamax, rmsprop, adadelta, sgd, adafactor,
muon, adagrad), Chen et al. 2023 for Lion, Gupta et al. 2018 for Shampoo.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from mpdiag.numerics.decay import lerped

SLOWEST = -0.2
"""Exponents nearer to 0 slow an average down only after steps that no training has."""


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
        for state in ("square_avg", "grad_avg", "acc_delta"):
            note(state, group.get("alpha", group.get("rho")))
        note("momentum_buffer", group.get("momentum"))
    return found


def slowing(holder: str, groups: Iterable[Mapping[str, Any]]) -> dict[str, set[float]]:
    """Averages of torch's Adafactor, whose factor is ``1 - step**decay``, and their ``decay``.

    Args:
        holder: The optimizer's type.
        groups: Settings of its parameter groups.
    """
    found = {group.get("beta2_decay") for group in groups} if holder == "Adafactor" else set()
    powers = {float(p) for p in found if isinstance(p, (int, float)) and p <= SLOWEST}
    return dict.fromkeys(("row_var", "col_var", "variance"), powers)


@lru_cache(maxsize=64)
def stops_falling(dtype: str, power: float) -> int:
    """The first step whose factor ``1 - step**power`` gives every normal value of a format back.

    Args:
        dtype: ``bfloat16`` or ``float16``.
        power: At most ``SLOWEST``.
    """

    def stuck(step: int) -> bool:
        found = lerped(dtype, min(0.5, float(step) ** power))
        return found.stuck == found.values

    last = 1
    while not stuck(last):
        last *= 2
    return bisect_left(range(last + 1), 1, key=stuck)
