"""What an optimizer does in its first steps: products in half precision, factors without effect, SGD.

Looked at from below, by a tap that runs each operation as it is. Fused kernels show one operation, and
nothing inside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mpdiag.recording.counting.tensors import readable
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
_ORTHOGONALIZES = ("muon", "dion")
"""In the names of optimizers whose update of a matrix is not its gradient times a number."""
_LARGEST = 1 << 22
"""Elements of a matrix whose update is compared with its gradient."""


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
        self._kept: tuple[str, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
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
        self._kept = None
        try:
            held = [p for g in optimizer.param_groups for p in g["params"] if p.dtype in HALF]
            self._by_place = {
                part.data_ptr(): self._parameters[id(p)].name
                for p in held
                if id(p) in self._parameters and (part := readable(p)) is not None
            }
            matrix = _matrix(optimizer) if taken == 0 else None
            if matrix is not None and matrix.grad is not None and id(matrix) in self._parameters:
                name = self._parameters[id(matrix)].name
                kept = (matrix.detach(), matrix.grad.detach())
                self._kept = (name, kept[0], kept[0].clone(), kept[1].clone())
            self._of = optimizer if self._tap.attach() else None
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._give_up(error)

    def end(self) -> None:
        """The optimizer's step is over."""
        self._tap.detach()  # also if looking has failed
        optimizer, self._of = self._of, None
        if optimizer is None:
            return
        if self._kept is not None:
            (name, after, before, gradient), self._kept = self._kept, None
            try:
                if _is_gradients(before, gradient, after):
                    key = ("no-orthogonalization", type(optimizer).__name__, name)
                    self._found[key] = Observed(key[0], key[1:], 0, 0, 0.0)
            except Exception as error:  # noqa: BLE001
                self._give_up(error)

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
                part = readable(tensor)  # of the whole, ranks would have to meet
                place = None if part is None else self._by_place.get(part.data_ptr())
                if part is not None and place:
                    yield place, part, part.clone()

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


def _matrix(optimizer: Optimizer) -> torch.Tensor | None:
    """The smallest FP32 matrix that an optimizer orthogonalizes, by its name; None of others."""
    if not any(word in type(optimizer).__name__.lower() for word in _ORTHOGONALIZES):
        return None
    those = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if group.get("use_muon", True) and optimizer.state.get(p, {}).get("use_muon", True)
        if type(p) in (torch.Tensor, torch.nn.Parameter) and p.dtype == torch.float32
        if p.ndim == 2 and min(p.shape) > 1 and p.numel() <= _LARGEST and p.grad is not None
    ]
    return min(those, key=torch.Tensor.numel, default=None)


def _is_gradients(before: torch.Tensor, gradient: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether an update is a multiple of the gradient and of the weights, and of nothing else.

    A gradient whose singular values are all the same, or all but one zero, is orthogonal but for a
    factor: of such a one nothing is said.
    """
    update, again = after - before, gradient @ gradient.mT @ gradient
    if _left(again, gradient) < 0.1 or not bool(update.any()):
        return False
    return _left(update, gradient, before) < 0.01


def _left(value: torch.Tensor, *among: torch.Tensor) -> float:
    """The share of a value's norm that is no combination of some others."""
    flat, columns = value.flatten(), torch.stack([one.flatten() for one in among], 1)
    columns = columns / columns.norm(dim=0).clamp_min(1e-30)
    found = torch.linalg.pinv(columns.mT @ columns) @ (columns.mT @ flat)
    return float((flat - columns @ found).norm() / flat.norm().clamp_min(1e-30))
