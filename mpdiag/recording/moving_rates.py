"""From which learning rate on weights in half precision move, for optimizers of torch.

A step of ``lr·d`` moves a weight if it is larger than half the distance to the weight's next value.
``d`` is read from the optimizer's states after a step (``torch/optim/adam.py``, ``sgd.py``). What the
optimizer itself rounds on the way is left out: it shifts a rate by 1 %.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import SGD, Adam, Optimizer

from mpdiag.numerics.formats import STORED_IN
from mpdiag.recording.counting.tensors import some_of
from mpdiag.tracing.precision import HALF

PARAMETERS = 64
"""At most, at equal distances: one takes 0.2 ms."""
SHARES = (0.5, 0.99)
"""Of the elements that are looked at."""


def moving_rates(optimizer: Optimizer) -> Iterator[tuple[str, float]]:
    """Shares of an optimizer's half-precision weights, and the learning rate above which each moves.

    Args:
        optimizer: After a step. Of others than Adam, AdamW and SGD of torch nothing is known.
    """
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    found = []
    held = [(g, p) for g in optimizer.param_groups for p in g["params"] if p.dtype in HALF]
    for group, parameter in held[:: -(-len(held) // PARAMETERS) or 1]:
        weight = some_of(parameter)
        update = None if weight is None else _update(optimizer, group, parameter, weight)
        if weight is not None and update is not None:
            half = half_distances(weight, update, str(parameter.dtype).removeprefix("torch."))
            found.append((half / update.abs())[update != 0].double())
    rates = torch.cat(found) if found else torch.zeros(0)
    for share in SHARES if rates.numel() else ():
        yield f"{share:g}", float(rates.quantile(share))


def half_distances(weight: torch.Tensor, update: torch.Tensor, dtype: str) -> torch.Tensor:
    """Half the distance from each weight to its next value towards ``weight - update``, FP32.

    Args:
        weight: Weights.
        update: What is subtracted, of the same shape.
        dtype: ``bfloat16`` or ``float16``.
    """
    mantissa, exponent = weight.float().abs().frexp()
    # Below a power of two values lie half as far apart.
    inward = (mantissa == 0.5) & (weight.sign() == update.sign())
    fmt = STORED_IN[dtype]
    least = fmt.min_subnormal_exponent
    place = (exponent - 1 - fmt.mantissa_bits - inward.int()).clamp_min(least)
    place = torch.where(weight == 0, least, place) - 1
    return torch.ldexp(torch.ones_like(mantissa), place)


def _update(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor | None:
    """What the last step subtracted at a learning rate of 1, FP32 (k,); None where it is not known."""
    state = optimizer.state.get(parameter, {})
    some = {k: some_of(v) for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
    have: dict[str, torch.Tensor] = {k: v.float() for k, v in some.items() if v is not None}
    found: torch.Tensor | None = None
    if isinstance(optimizer, Adam) and "exp_avg" in have:
        one, two = (1.0 - float(beta) ** float(state["step"]) for beta in group["betas"])
        square = have.get("max_exp_avg_sq", have["exp_avg_sq"])
        found = have["exp_avg"] / one / ((square / two).sqrt() + group["eps"])
    gradient = None if parameter.grad is None else some_of(parameter.grad)
    if isinstance(optimizer, SGD) and gradient is not None:
        found = gradient.float() + group["weight_decay"] * weight.float()
        if "momentum_buffer" in have:
            buffer = have["momentum_buffer"]
            found = found + group["momentum"] * buffer if group["nesterov"] else buffer
    return found
