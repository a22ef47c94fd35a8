"""What a second moment in half precision would be in FP32: some of its elements, followed in every step.

Rounding keeps ``v ← β₂v + (1 − β₂)g²`` from falling, or from rising, and which of the two wins depends
on the gradients. So nothing is said by rule: FP32 copies of a few elements start where the optimizer's
state starts, at 0, see the same gradients, and are compared with what the optimizer has.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from mpdiag.numerics.decay import NARROW, decay
from mpdiag.recording.counting.tensors import own_part, readable
from mpdiag.recording.step_clock import StepListener
from mpdiag.runs.precision import Shadow

STATE = "exp_avg_sq"
LEAST = 64
"""Elements that must not be 0 where a state's values are judged."""
MOST_PARAMETERS = 16
ELEMENTS = 256
"""Of each parameter at most: what is followed costs some ten microseconds a parameter and step."""


@dataclass(eq=False)
class _Followed:
    """Elements of one parameter's state.

    Attributes:
        parameter: Whose state it is.
        at: Their places in the flat parameter, int64 (k,).
        value: What FP32 has there, (k,).
        factor: β₂.
        steps: How many steps were followed.
    """

    parameter: torch.Tensor
    at: torch.Tensor
    value: torch.Tensor
    factor: float
    steps: int = 0


class StateShadow(StepListener):
    """Follows second moments that are stored in half precision, or rounded to it, and cannot fall.

    Args:
        optimizers: All that step; they may become more.
        failed: Told what failed; after that nothing more is followed.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], failed: Callable[[str, Exception], None]
    ) -> None:
        self._optimizers = optimizers
        self._failed = failed
        self._followed: dict[int, list[_Followed]] = {}
        self._heard: Counter[int] = Counter()
        self._follows = True

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Take the step in FP32, too."""
        if not self._follows:
            return
        try:
            with torch.no_grad():
                self._step(optimizer)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._follows = False
            self._failed("following an optimizer's states", error)

    def _step(self, optimizer: Optimizer) -> None:
        # A step that calls another class's is heard of twice, and may round what that one has stored.
        self._heard[id(optimizer)] += 1
        if self._heard[id(optimizer)] <= 2 and not self._followed.get(id(optimizer)):
            self._followed[id(optimizer)] = _to_follow(optimizer)
        for one in self._followed[id(optimizer)]:
            taken = _steps_taken(optimizer, one.parameter)
            gradient = one.parameter.grad
            if gradient is None or taken == one.steps:
                continue
            if taken != one.steps + 1:
                one.steps = -1  # a step was not seen: nothing can be said any more
                continue
            g = _flat(gradient)[one.at].float()
            one.value.mul_(one.factor).addcmul_(g, g, value=1.0 - one.factor)
            one.steps = taken

    def found(self) -> tuple[Shadow, ...]:
        """The comparison of each optimizer's states with FP32's, over all that was followed."""
        shadows = []
        for optimizer in self._optimizers:
            ones = [f for f in self._followed.get(id(optimizer), ()) if f.steps > 0]
            if ones:
                actual = torch.cat(
                    [_flat(optimizer.state[f.parameter][STATE])[f.at].double() for f in ones]
                )
                shadow = torch.cat([f.value.double() for f in ones])
                live = shadow > 0
                ratios = (actual[live] / shadow[live]).sort().values
                if len(ratios):
                    shadows.append(
                        Shadow(
                            type(optimizer).__name__,
                            STATE,
                            len(ones),
                            len(ratios),
                            max(f.steps for f in ones),
                            *(float(ratios[int(q * (len(ratios) - 1))]) for q in (0.1, 0.5, 0.9)),
                        )
                    )
        return tuple(shadows)


def _to_follow(optimizer: Optimizer) -> list[_Followed]:
    """Elements of the parameters of an optimizer whose second moment rounding holds, after one step."""
    found: list[_Followed] = []
    for group in optimizer.param_groups:
        betas = group.get("betas")
        decoupled = group.get("decoupled_weight_decay", type(optimizer).__name__ == "AdamW")
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            continue
        if group.get("weight_decay") and not decoupled:
            continue  # the moment is not that of the gradient alone
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {}).get(STATE)
            if not isinstance(state, torch.Tensor) or len(found) == MOST_PARAMETERS:
                continue
            if readable(state) is None or _steps_taken(optimizer, parameter) != 1:
                continue  # from the beginning, or not at all
            size = _flat(state).numel()
            many = min(size, ELEMENTS)
            at = torch.arange(many, device=state.device) * size // max(1, many)
            dtype = str(state.dtype).removeprefix("torch.")
            dtype = "bfloat16" if bool(hold_bf16_numbers(_flat(state)[at])) else dtype
            if dtype in NARROW and decay(dtype, float(betas[1])).stuck:
                value = torch.zeros(many, device=state.device)
                found.append(_Followed(parameter, at, value, float(betas[1])))
    return found


def hold_bf16_numbers(values: torch.Tensor) -> torch.Tensor:
    """Whether FP32 values could all be BF16: their low 16 bits are 0, of at least ``LEAST`` not 0.

    Args:
        values: (…, n); of another dtype than FP32 the answer is no.

    Returns:
        Bool (…), on the device of the values. Nothing waits for it.
    """
    enough = (values != 0).sum(-1) >= LEAST
    if values.dtype != torch.float32:
        return enough & False
    return enough & ((values.contiguous().view(torch.int32) & 0xFFFF) == 0).all(-1)


def _steps_taken(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Steps that an optimizer has taken with a parameter; -1 where only the device knows."""
    step = optimizer.state.get(parameter, {}).get("step")
    if isinstance(step, torch.Tensor):
        return int(step) if step.device.type == "cpu" else -1
    return step if isinstance(step, int) else -1


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return own_part(tensor).detach().reshape(-1)
