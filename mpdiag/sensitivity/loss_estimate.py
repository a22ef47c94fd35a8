"""Estimates how far each operation in a narrow format would change the loss, by one backward pass.

In the narrow format an operation returns its result y with an error e. To first order this changes
the loss by ∑ a·e, where a = ∂L/∂y is the adjoint that the backward pass computes anyway. So
each operation is run twice in the forward pass (as it is, and on rounded values), and one backward
pass ranks all of them. A value outside the format's range counts as an infinite error.

The backward pass is judged separately, by the relative rounding error of the gradients that an
operation passes on. ``RankingTrainer`` ranks operations so while it trains in FP32.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mpdiag.emulation.rounding import round_to
from mpdiag.errors import UsageError
from mpdiag.numerics.autocast_lists import LISTS
from mpdiag.numerics.formats import FP16, FloatFormat, format_named
from mpdiag.plan import PrecisionPlan
from mpdiag.tracing.operation_calls import OUTSIDE, Site, Sites, floats
from mpdiag.tracing.source_lines import present_number
from mpdiag.training.trainer import MixedPrecision


@dataclass(frozen=True)
class Estimate:
    """The estimated effect of one call of an operation in a narrow format.

    Attributes:
        site: The call.
        loss_change: ∑ adjoint × error: the change of the loss to first order.
        reach: ∑ |adjoint × error|: the same if no two errors cancelled; infinite where a
            value leaves the range.
        gradient_error: ‖rounding error‖ / ‖gradient‖ of its input gradients.
        loss: The loss, for comparison.
    """

    site: Site
    loss_change: float
    reach: float
    gradient_error: float
    loss: float

    @property
    def weight(self) -> float:
        """The rank of an operation: its reach as a share of the loss, plus its gradient error."""
        share = self.reach / max(abs(self.loss), 1e-12)
        return share + _GRADIENTS * self.gradient_error


_GRADIENTS = 0.01  # gradient errors average out over steps; forward errors do not


@dataclass
class _PendingCall:
    """A call of the forward pass, waiting for its adjoints: the error of each result."""

    site: Site
    errors: list[Tensor]
    overflows: bool


class Estimator(Sites):
    """Records rounding errors in a forward pass and their adjoints in the backward pass.

    Args:
        model: In FP32.
        fmt: The format's name.
        scale: The loss scale: gradients are rounded as they would be under it.
    """

    def __init__(self, model: nn.Module, fmt: str = FP16.name, scale: float = 1.0) -> None:
        super().__init__(model)
        self._fmt: FloatFormat = format_named(fmt)
        self._scale = scale
        self._waiting: dict[int, _PendingCall] = {}
        self._found: dict[Site, tuple[float, float, float]] = {}
        self._sites: list[Site] = []
        self._loss = math.nan

    def forward(self) -> AbstractContextManager[None]:
        """Context of a forward pass; results of an earlier one are dropped."""
        self._waiting.clear()
        self._found.clear()
        self._sites.clear()
        return super().forward()

    def forward_operation(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and keep the error that the narrow format would add to its results."""
        own, number = self._calls.present == site, present_number()
        result, errors = self.run_both(func, args, kwargs)
        overflows = not all(bool(e.isfinite().all()) for e in errors)
        self._sites.append(site)
        if own:
            self._waiting[number] = _PendingCall(site, errors, overflows)
        elif overflows:
            self._found[site] = (math.inf, math.inf, 0.0)
        return result

    def run_both(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """An operation's result, and the error of each FP32 tensor of it in the narrow format."""
        narrow = None
        # Random operations must run only once.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            narrow = floats(func(*tree_map(self._round, args), **tree_map(self._round, kwargs)))
        result = func(*args, **kwargs)
        exact = floats(result)
        errors = [
            # Values that are infinite or NaN in FP32 are not rounding errors.
            torch.where(y.isfinite(), self._round(n) - y, torch.zeros_like(y))
            for y, n in zip(exact, exact if narrow is None else narrow, strict=True)
        ]
        return result, errors

    def _round(self, x: Any) -> Any:
        """A copy of a tensor, rounded if it is FP32: operations may write to their inputs."""
        if isinstance(x, Tensor):
            return round_to(x, self._fmt) if x.dtype == torch.float32 else x.clone()
        return x

    def attach(self, loss: Tensor) -> None:
        """Register for the adjoints of a loss; call it before the backward pass, outside ``forward``."""
        self._loss = float(loss.detach())
        for node in _nodes(loss.grad_fn):
            held = self._waiting.get(node._sequence_nr())
            if held is not None:
                node.register_hook(self._hook(held))
        self._waiting.clear()

    def _hook(self, held: _PendingCall) -> Callable[[Sequence[Any], Sequence[Any]], None]:
        def hook(grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
            pairs = _matched(held.errors, grad_outputs)
            change = reach = 0.0
            for error, adjoint in pairs:
                product = error.double() * adjoint.double()
                change += float(product.sum())
                reach += float(product.abs().sum())
            if held.overflows or not math.isfinite(reach):
                change = reach = math.inf
            self._found[held.site] = (change, reach, self._lost(grad_inputs))

        return hook

    def _lost(self, gradients: Sequence[Any]) -> float:
        """Relative rounding error of gradients under the loss scale."""
        error = size = 0.0
        for g in gradients:
            if isinstance(g, Tensor) and g.dtype == torch.float32 and not g.is_sparse:
                scaled = g.detach() * self._scale
                error += float((round_to(scaled, self._fmt) - scaled).double().pow(2).sum())
                size += float(scaled.double().pow(2).sum())
        if not math.isfinite(error):
            return math.inf
        return math.sqrt(error / size) if size else 0.0

    def estimates(self) -> list[Estimate]:
        """All calls of the last forward pass, in their order."""
        none = (0.0, 0.0, 0.0)
        return [Estimate(s, *self._found.get(s, none), self._loss) for s in self._sites]


def _matched(errors: Sequence[Tensor], adjoints: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of errors and adjoints, both in the order of the results, without None and integers."""
    waiting = [a.detach() for a in adjoints if isinstance(a, Tensor)]
    for error in errors:
        i = next((i for i, a in enumerate(waiting) if a.shape == error.shape), None)
        if i is not None:
            yield error, waiting.pop(i)


def _nodes(root: Any) -> Iterator[Any]:
    """Every node of an autograd graph, once."""
    seen = {root}
    stack = [root]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def estimate(
    model: nn.Module, step: Callable[[], Tensor], *, fmt: str = FP16.name, scale: float = 1.0
) -> list[Estimate]:
    """Estimate every operation of a step from one forward and backward pass.

    Args:
        model: In FP32.
        step: Runs the model on a batch and returns the loss.
        fmt: ``fp16``, ``bf16``, ``fp8_e4m3`` or ``fp8_e5m2``.
        scale: The loss scale.

    Returns:
        One estimate per call, in the order of the calls.

    Raises:
        UsageError: If the step returns no loss, or trains nothing.
    """
    estimator = Estimator(model, fmt, scale)
    trained = trained_parameters(model)
    with untouched(model):
        with estimator.forward():
            loss = step()
        check_loss(loss)
        estimator.attach(loss)
        torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return estimator.estimates()


def by_operation(estimates: Sequence[Estimate]) -> list[tuple[tuple[str, str], float]]:
    """Each (module, operation) with the sum of its calls' weights, largest first."""
    total: Counter[tuple[str, str]] = Counter()
    for e in estimates:
        total[e.site.module, e.site.op] += e.weight  # type: ignore[assignment]
    return sorted(total.items(), key=lambda item: -item[1])


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a step trains, by name.

    Raises:
        UsageError: If there is none.
    """
    found = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise UsageError(
            "no parameter of the model requires a gradient: set requires_grad_() on those to train"
        )
    return found


def check_loss(loss: object) -> None:
    """Refuse a loss that has no backward pass.

    Raises:
        UsageError: If it is not a scalar tensor with an autograd graph.
    """
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        raise UsageError("step() must return its loss: a scalar tensor on which backward() works")


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random state at the end, whatever happens in between."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    with torch.random.fork_rng(devices=()):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@dataclass(frozen=True, order=True)
class Fp32Candidate:
    """An operation of a module, or a whole module (``op`` empty), that may have to stay in FP32."""

    module: str
    op: str

    def __str__(self) -> str:
        return f"{self.op or 'all'} in {self.module or 'the model'}"


class RankingTrainer(MixedPrecision):
    """Trains in FP32, and estimates each operation's sensitivity at steps 0, 1, 2, 4, 8 and so on.

    Attributes:
        weights: The largest estimate of each (module, operation) so far.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, plan: PrecisionPlan, scale: float
    ) -> None:
        super().__init__(model, optimizer, plan, level="O0")
        self.weights: dict[tuple[str, str], float] = {}
        self._estimator = Estimator(model, plan.target, scale)
        self._estimating = False

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The context for the forward pass and the loss."""
        step = self.steps
        if self._estimating or step & (step - 1):
            with super().autocast():
                yield
            return
        with super().autocast(), self._estimator.forward():
            yield
        self._estimating = True

    def backward(self, loss: Tensor, **options: Any) -> None:
        """The trainer's ``backward``; on a step with an estimate it collects the adjoints."""
        if not self._estimating:
            super().backward(loss, **options)
            return
        self._estimator.attach(loss)
        super().backward(loss, **options)
        self._estimating = False
        for key, weight in by_operation(self._estimator.estimates()):
            self.weights[key] = max(weight, self.weights.get(key, 0.0))


def candidates_of(
    weights: dict[tuple[str, str], float], *, lists: bool, whole_modules: bool
) -> list[tuple[Fp32Candidate, float]]:
    """The candidates of a search, largest weight first.

    Args:
        weights: By (module, operation).
        lists: Leave out what the operation policy keeps in FP32 anyway.
        whole_modules: Use whole modules as candidates, for levels that do not cast by operation.
    """
    total: dict[Fp32Candidate, float] = {}
    for (module, op), weight in weights.items():
        if module == OUTSIDE or (lists and LISTS.get(op) == "fp32"):
            continue
        candidate = Fp32Candidate(module, "" if whole_modules else op)
        total[candidate] = total.get(candidate, 0.0) + weight
    return sorted(total.items(), key=lambda item: -item[1])  # ties keep the order of calls
