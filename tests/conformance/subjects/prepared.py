"""What libraries have in common that prepare models and optimizers, and whose optimizers then step."""

from __future__ import annotations

from typing import Any

from conformance.subjects.protocol import Training
from conformance.subjects.torch_amp import Counter
from torch import Tensor
from torch.optim import Optimizer


class PreparedTraining(Training):
    """A loop that calls ``step`` and ``zero_grad`` of prepared optimizers.

    Attributes:
        counters: By id of the prepared optimizer, what counts the steps of the one inside.
    """

    counters: dict[int, Counter]

    def step(self, *optimizers: Optimizer) -> bool:
        chosen = optimizers or self.optimizers
        before = [self.counters[id(o)].taken for o in chosen]
        for optimizer in chosen:
            optimizer.step()
        for optimizer in chosen:
            optimizer.zero_grad()
        return all(self.counters[id(o)].taken > n for o, n in zip(chosen, before, strict=True))

    def step_with(self, closure: Any) -> bool:
        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = closure()
            self.backward(loss)
            return loss

        self.optimizer.step(evaluate)
        return True
