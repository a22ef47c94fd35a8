"""What a workload is, and the plain FP32 loop that trains one.

A `Workload` describes a training: which model, which optimizer, which batches, which loss, which
metric. It holds no state, so one object can be trained many times. `start` turns it into a
`Session`, in which the model and its optimizer exist but no step has been taken: the moment to
attach a recorder or a trainer.

    workload = load("ssd")
    session = start(workload, seed=0)
    with mpdiag.record(session.model, session.optimizer, "runs/ssd"):  # attach what you like ...
        losses = session.run()  # ... then run the loop
    print(workload.metric, session.evaluate())

`train` is the same in one call, with nothing attached. A trainer that changes how a step is taken
(another precision, a loss scale) hands `run` its own `take_step`, and batches, callbacks and
bookkeeping stay the same.
"""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "Batch",
    "OnStep",
    "Session",
    "TakeStep",
    "Training",
    "Workload",
    "plain_step",
    "start",
    "train",
]

Batch: TypeAlias = tuple[Tensor, ...]
"""Tensors whose first dimension is the batch; `batches` of the workload says what they are."""

OnStep: TypeAlias = Callable[[int, float], None]
"""Called after each step with its number, counted from 0, and its loss."""

TakeStep: TypeAlias = "Callable[[Session, Batch], Tensor | float]"
"""Takes one training step on one batch and returns its loss. `plain_step` is the FP32 one."""


class Workload(ABC):
    """The description of one training; subclasses are frozen dataclasses of their options."""

    name: ClassVar[str]
    """As `load` knows it."""
    title: ClassVar[str]
    """A heading of a few words."""
    summary: ClassVar[str]
    """One sentence: what is learned, from what."""
    family: ClassVar[str]
    """Which task of "Mixed Precision Training" (Micikevicius et al., 2018) it stands for."""
    default_steps: ClassVar[int]
    """Optimizer steps of a run that learns something real within half a minute on two CPU cores."""
    metric: ClassVar[str]
    """What `evaluate` returns, with its unit."""
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model, drawn from torch's global random state, in FP32 on the CPU."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of the model's parameters."""

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """The learning rate's schedule, stepped after each of `steps` steps; None: constant."""
        del optimizer, steps
        return None

    @abstractmethod
    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """The `steps` training batches that belong to `seed`, on the CPU.

        They are drawn from a generator of their own: neither the model nor whatever is attached to
        it can change which data comes next.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The training loss, a scalar: forward pass included, backward pass not."""

    @abstractmethod
    def score(self, model: nn.Module) -> float:
        """The metric on held-out data, for a model in evaluation mode. Call `evaluate` instead."""

    def evaluate(self, model: nn.Module) -> float:
        """The metric on held-out data, always the same; the model's mode is restored afterwards."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return self.score(model)
        finally:
            model.train(was_training)


@dataclass
class Session:
    """A training that is set up and has not begun: attach what you like, then `run` it."""

    workload: Workload
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    steps: int
    seed: int
    device: torch.device

    def run(self, on_step: OnStep | None = None, take_step: TakeStep | None = None) -> list[float]:
        """Train to the end and return the loss of every step.

        A loss that is not finite is reported like any other, and the loop goes on, as a plain loop
        does: what to do about it is for the caller (or for `take_step`) to decide.
        """
        step_on = take_step or plain_step
        losses = []
        self.model.train()
        for step, batch in enumerate(self.workload.batches(self.steps, self.seed)):
            loss = float(step_on(self, tuple(tensor.to(self.device) for tensor in batch)))
            losses.append(loss)
            if on_step:
                on_step(step, loss)
        return losses

    def evaluate(self) -> float:
        """The workload's metric for the model as it is now."""
        return self.workload.evaluate(self.model)


@dataclass(frozen=True)
class Training:
    """What came of a finished run."""

    workload: str
    steps: int
    seed: int
    losses: tuple[float, ...]
    """One for each step."""
    metric: float
    """On held-out data, after the last step, in the workload's unit."""
    seconds: float
    """Wall time of the steps alone, evaluation not counted."""

    @property
    def first_non_finite_step(self) -> int | None:
        """The step whose loss was the first NaN or infinity; None if all were finite."""
        return next(
            (step for step, loss in enumerate(self.losses) if not math.isfinite(loss)), None
        )


def plain_step(session: Session, batch: Batch) -> Tensor:
    """One step as everybody writes it: clear, forward, backward, update, schedule."""
    session.optimizer.zero_grad()
    loss = session.workload.loss(session.model, batch)
    loss.backward()
    session.optimizer.step()
    if session.scheduler:
        session.scheduler.step()
    return loss.detach()


def start(
    workload: Workload,
    *,
    steps: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Session:
    """Seed everything, build the model on `device`, and stop just before the first step.

    The seed decides the initial weights and the batches. Torch's, NumPy's and Python's global
    random states are set, as a training script would set them. Without `steps`, the workload's own
    number is taken.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - for code that draws from the global state
    torch.manual_seed(seed)
    model = workload.model().to(
        device
    )  # built on the CPU first: every device starts from the same weights
    optimizer = workload.optimizer(model)
    steps = workload.default_steps if steps is None else steps
    scheduler = workload.scheduler(optimizer, steps)
    return Session(workload, model, optimizer, scheduler, steps, seed, torch.device(device))


def train(
    workload: Workload,
    *,
    steps: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    on_step: OnStep | None = None,
) -> Training:
    """Train in plain FP32 from start to end, then evaluate."""
    session = start(workload, steps=steps, seed=seed, device=device)
    began = time.perf_counter()
    losses = session.run(on_step)
    seconds = time.perf_counter() - began
    return Training(workload.name, session.steps, seed, tuple(losses), session.evaluate(), seconds)
