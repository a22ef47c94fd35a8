"""An FP32 training that also ranks its operations by sensitivity."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpdiag.numerics.autocast_lists import LISTS
from mpdiag.sensitivity.loss_estimate import Estimator, by_operation
from mpdiag.tracing.operation_calls import OUTSIDE
from mpdiag.training.trainer import MixedPrecision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from mpdiag.plan import PrecisionPlan


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
