"""Gradients of micro-batches that add up in half precision, beside the same sums in FP32."""

from collections import defaultdict
from collections.abc import Mapping
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


class GradientSums(StepListener):
    """Adds some elements of half-precision gradients in FP32, too, as backward passes bring them."""

    def __init__(self, parameters: Mapping[int, NamedParameter], guard: HookGuard) -> None:
        self.guard = guard
        self._parameters = parameters
        self._handles: list[Any] = []
        self._steps: list[int] = []
        # By parameter: the sum in FP32, autograd's sum, and how many gradients they have taken.
        self._sums: dict[str, tuple[torch.Tensor, torch.Tensor | None, int]] = {}
        # By that number: squares of the errors and of the sums in FP32.
        self._off: dict[int, list[float]] = {}

    def step_began(self, step: Step) -> None:
        """Hook parameters, if backward passes of this step add up."""
        self.stopped()
        if not (step.recorded and step.accumulating) or len(self._steps) >= STEPS:
            return
        self._steps.append(step.number)
        self._sums, self._off = {}, defaultdict(lambda: [0.0, 0.0])
        held = [n for n in self._parameters.values() if _adds_narrowly(n.parameter)]
        for named in held[:: -(-len(held) // PARAMETERS) or 1]:
            p, hook = named.parameter, partial(self._added, named.name)
            self._handles.append(p.register_hook(partial(self._arrives, named)))
            self._handles.append(p.register_post_accumulate_grad_hook(hook))

    def stopped(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @guarded("a weight gradient hook")
    def _arrives(self, named: NamedParameter, gradient: torch.Tensor | None) -> None:
        held, new = named.parameter.grad, None if gradient is None else some_of(gradient)
        before = None if held is None else some_of(held)
        if new is not None:
            exact, last, taken = self._sums.get(named.name, (torch.zeros_like(new), None, 0))
            if before is None:
                exact, taken = torch.zeros_like(new), 0
            elif last is None or not torch.equal(before, last):
                exact, taken = before, int(before.any())  # the loop has changed it meanwhile
            self._sums[named.name] = exact.float() + new.float(), None, taken + 1

    @guarded("a weight gradient hook")
    def _added(self, name: str, parameter: torch.Tensor) -> None:
        total = None if parameter.grad is None else some_of(parameter.grad)
        if total is not None and name in self._sums:
            exact, _, taken = self._sums[name]
            self._sums[name] = exact, total, taken
            squares = float((total.float() - exact).square().sum()), float(exact.square().sum())
            if sum(squares) < float("inf"):
                self._off[taken] = [a + b for a, b in zip(self._off[taken], squares, strict=True)]

    def found(self) -> tuple[Observed, ...]:
        """How far the sums of the last step looked at are off, by how many gradients they took."""
        return tuple(
            Observed("gradient-sum", (), step, step, (error / size) ** 0.5, taken)
            for step in self._steps[-1:]
            for taken, (error, size) in sorted(self._off.items())
            if size
        )


def _adds_narrowly(parameter: torch.Tensor) -> bool:
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return parameter.is_leaf and parameter.requires_grad and dtype in HALF
