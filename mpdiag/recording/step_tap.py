"""What an optimizer runs in its first steps: products in half precision, and factors without effect.

Looked at from below, by a tap that runs each operation as it is. Fused kernels show one operation, and
nothing inside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mpdiag.recording.counting.tensors import has_memory
from mpdiag.runs.precision import Observed
from mpdiag.tracing.capture import is_captured
from mpdiag.tracing.dispatch import is_traced
from mpdiag.tracing.names import NamedParameter
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.tap import OperationTap

STEPS = 3
"""Steps of each optimizer that are looked at."""
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "mv"))
_FACTORS = frozenset(("mul_", "_foreach_mul_"))


class StepTap:
    """Looks on while optimizers step.

    Args:
        parameters: Named parameters by ``id``.
        failed: Told what failed; after that nothing more is looked at.
    """

    def __init__(
        self, parameters: Mapping[int, NamedParameter], failed: Callable[[str, Exception], None]
    ) -> None:
        self._parameters = parameters
        self._failed = failed
        self._tap = OperationTap(self)
        self._steps: dict[int, int] = {}
        self._of: Optimizer | None = None
        self._by_place: dict[int, str] = {}
        self._found: dict[tuple[str, ...], Observed] = {}

    def found(self) -> tuple[Observed, ...]:
        """What was seen, once each."""
        return tuple(self._found.values())

    def begin(self, optimizer: Optimizer) -> None:
        """An optimizer begins a step that evaluates no closure."""
        taken = self._steps.get(id(optimizer), 0)
        if is_traced() or is_captured():
            return  # what is compiled or captured must not see the tap
        if taken >= STEPS:
            return
        self._steps[id(optimizer)] = taken + 1
        try:
            held = [p for g in optimizer.param_groups for p in g["params"] if p.dtype in HALF]
            self._by_place = {
                part.data_ptr(): self._parameters[id(p)].name
                for p in held
                if id(p) in self._parameters and has_memory(part := getattr(p, "_local_tensor", p))
            }
            self._of = optimizer if self._tap.attach() else None
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._give_up(error)

    def end(self) -> None:
        """The optimizer's step is over."""
        if self._of is not None:
            self._of = None
            self._tap.detach()

    def _give_up(self, error: Exception) -> None:
        self._of = None
        self._steps = dict.fromkeys(self._steps, STEPS)
        self._failed("looking at an optimizer's step", error)

    def run(self, func: Any, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note what it shows."""
        name = func._schema.name.partition("::")[2]
        if self._of is None or name not in _PRODUCTS | _FACTORS:
            return func(*args, **kwargs)
        try:
            before = list(self._before(name, args))
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            before = []
        result = func(*args, **kwargs)
        if self._of is not None:
            try:
                self._note(name, args, before)
            except Exception as error:  # noqa: BLE001
                self._give_up(error)
        return result

    def _before(self, name: str, args: tuple[Any, ...]) -> Iterator[tuple[str, torch.Tensor, Any]]:
        """The half-precision parameters that a factor is applied to, and their values."""
        if name in _FACTORS and self._by_place:
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else (args[0],):
                part: Any = getattr(tensor, "_local_tensor", tensor)  # whole, ranks would meet
                place = self._by_place.get(part.data_ptr()) if has_memory(part) else None
                if place:
                    yield place, part, part.detach().clone()

    def _note(
        self, name: str, args: tuple[Any, ...], before: Sequence[tuple[str, torch.Tensor, Any]]
    ) -> None:
        assert self._of is not None
        holder = type(self._of).__name__
        step = self._steps[id(self._of)] - 1
        if name in _PRODUCTS:
            dtype = str(args[0].dtype).removeprefix("torch.")
            key = ("optimizer-products", holder, dtype)
            seen = self._found.get(key)
            first, count = (step, 0.0) if seen is None else (seen.first, seen.size)
            self._found[key] = Observed(key[0], key[1:], first, step, count + 1)
            return
        factor = args[1] if isinstance(args[1], float) else None
        for place, tensor, values in before:
            if factor is not None and 0.5 < factor < 1.0 and _is_same(tensor, values):
                key = ("factor-without-effect", holder, place)
                first = self._found[key].first if key in self._found else step
                self._found[key] = Observed(key[0], key[1:], first, step, factor)


def _is_same(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a factor changed nothing, though there is a value that is not 0."""
    return torch.equal(tensor, before) and bool(tensor.any())
