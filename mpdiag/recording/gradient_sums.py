"""Gradients of micro-batches that add up in half precision, beside the same sums in FP32.

In a few recorded steps some elements of each parameter's gradient are added in FP32, too, as each
backward pass brings them, and compared with what autograd has added.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mpdiag.recording.counting.tensors import some_of
from mpdiag.recording.failures import HookGuard, guarded
from mpdiag.recording.step_clock import Step, StepListener
from mpdiag.runs.precision import Observed
from mpdiag.tracing.names import NamedParameter
from mpdiag.tracing.precision import HALF

PARAMETERS = 64
"""At most, at equal distances."""
STEPS = 3
"""Recorded steps with several backward passes that are looked at."""


@dataclass(eq=False)
class _Sum:
    """Elements of one parameter's gradient.

    Attributes:
        exact: Their sum in FP32, (k,).
        last: What autograd's sum was after the last backward pass, (k,).
        taken: How many gradients the sum has taken, on its device.
        off: After each backward pass that number, the squared error and the squared norm.
    """

    exact: torch.Tensor
    last: torch.Tensor | None = None
    taken: torch.Tensor | int = 0
    off: list[torch.Tensor] = field(default_factory=list)


class GradientSums(StepListener):
    """Adds gradients of half precision in FP32, too.

    Args:
        parameters: Named parameters by ``id``.
        guard: Around every hook.
    """

    def __init__(self, parameters: Mapping[int, NamedParameter], guard: HookGuard) -> None:
        self.guard = guard
        self._parameters = parameters
        self._sums: dict[str, _Sum] = {}
        self._handles: list[Any] = []
        self._steps: list[int] = []

    def step_began(self, step: Step) -> None:
        """Hook parameters, if backward passes of this step add up."""
        self.stopped()
        if not (step.recorded and step.accumulating) or len(self._steps) >= STEPS:
            return
        self._steps.append(step.number)
        self._sums = {}
        held = [n for n in self._parameters.values() if _adds_narrowly(n.parameter)]
        for named in held[:: -(-len(held) // PARAMETERS) or 1]:
            hooks = partial(self._arrives, named), partial(self._added, named.name)
            self._handles.append(named.parameter.register_hook(hooks[0]))
            self._handles.append(named.parameter.register_post_accumulate_grad_hook(hooks[1]))

    def stopped(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @guarded("a weight gradient hook")
    def _arrives(self, named: NamedParameter, gradient: torch.Tensor) -> None:
        """A gradient is about to be added."""
        new, held = some_of(gradient), named.parameter.grad
        before = None if held is None else some_of(held)
        if new is None:
            return
        one = self._sums.setdefault(named.name, _Sum(torch.zeros_like(new, dtype=torch.float32)))
        if before is None:
            one.exact, one.taken = torch.zeros_like(one.exact), 0
        elif one.last is None or before.shape != one.last.shape:
            one.exact, one.taken = before.float(), before.any().long()
        else:  # what the loop has changed meanwhile is where the sum begins
            same = (before == one.last).all()
            one.exact = torch.where(same, one.exact, before.float())
            one.taken = torch.where(same, one.taken, before.any().long())
        one.exact, one.taken = one.exact + new.float(), one.taken + 1

    @guarded("a weight gradient hook")
    def _added(self, name: str, parameter: torch.Tensor) -> None:
        """It was added."""
        one = self._sums.get(name)
        total = None if parameter.grad is None else some_of(parameter.grad)
        if one is None or total is None or total.shape != one.exact.shape:
            return
        one.last = total
        taken = torch.as_tensor(one.taken, dtype=torch.float32, device=total.device)
        error = (total.float() - one.exact).square().sum()
        one.off.append(torch.stack((taken, error, one.exact.square().sum())))

    def found(self) -> tuple[Observed, ...]:
        """How far the sums were off in the last step looked at, by how many gradients they took."""
        totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        worst: dict[int, tuple[float, str]] = {}
        for name, one in self._sums.items():
            for taken, error, size in torch.stack(one.off).tolist() if one.off else ():
                if 0.0 < size < float("inf") and error < float("inf"):
                    totals[int(taken)][0] += error
                    totals[int(taken)][1] += size
                    off = ((error / size) ** 0.5, name)
                    worst[int(taken)] = max(worst.get(int(taken), off), off)
        step = self._steps[-1] if self._steps else 0
        return tuple(
            Observed("gradient-sum", (worst[n][1],), step, step, (error / size) ** 0.5, n)
            for n, (error, size) in sorted(totals.items())
        )


def _adds_narrowly(parameter: torch.Tensor) -> bool:
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return parameter.is_leaf and parameter.requires_grad and dtype in HALF
