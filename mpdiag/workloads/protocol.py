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

A trainer that changes how a step is taken
(another precision, a loss scale) hands `run` its own `take_step`, and batches, callbacks and
bookkeeping stay the same; `mixed_step` is that of an `mpdiag.MixedPrecision`.

A training with several losses, each with an optimizer of its own (a GAN), overrides `optimizers`
and `losses` in place of `optimizer` and `loss`; its models are parts of one module.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from mpdiag.training.trainer import MixedPrecision


DataSplit: TypeAlias = Literal["train", "test"]
Batch: TypeAlias = tuple[Tensor, ...]
"""Tensors whose first dimension is the batch; `batches` of the workload says what they are."""

OnStep: TypeAlias = Callable[[int, float], None]
"""Called after each step with its number, counted from 0, and its loss."""

TakeStep: TypeAlias = "Callable[[Session, Batch], Tensor | float]"
"""Takes one training step on one batch and returns its loss. `plain_step` is the FP32 one."""


class Workload(ABC):
    """The description of one training; subclasses are frozen dataclasses of their options."""

    name: ClassVar[str]
    """The name that `load` takes."""
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
    margin: ClassVar[float]
    """The largest difference of the metric, in its unit, that does not matter."""
    paper_scale: ClassVar[float | None] = None
    """The loss scale that the paper used for this family; None if it used or named none."""
    clip_norm: ClassVar[float | None] = None
    """Gradients whose norm exceeds this are scaled down to it; None: no clipping."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model, drawn from torch's global random state, in FP32 on the CPU."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of the model's parameters."""
        raise NotImplementedError

    def optimizers(self, model: nn.Module) -> tuple[Optimizer, ...]:
        """The optimizers, in the order in which they step; one, unless there are several losses."""
        return (self.optimizer(model),)

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

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The training loss, a scalar: forward pass included, backward pass not."""
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        """The losses of one step, one for each optimizer.

        The caller takes an optimizer's step before it asks for the next loss, which therefore sees
        the updated weights.
        """
        yield self.loss(model, batch)

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
    """A training that is set up but has not started: attach hooks, then `run` it."""

    workload: Workload
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]
    """One for each optimizer, or none at all."""
    steps: int
    seed: int
    device: torch.device

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer, which most trainings have only one of."""
        return self.optimizers[0]

    def run(self, on_step: OnStep | None = None, take_step: TakeStep | None = None) -> list[float]:
        """Train to the end and return the loss of every step.

        A non-finite loss is reported like any other, and the loop continues, as a plain loop does:
        the caller (or `take_step`) decides what to do about it.
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


def plain_step(session: Session, batch: Batch) -> Tensor:
    """One ordinary step: clear, forward, backward, clip, update, schedule.

    With several losses it returns the first.
    """
    workload, shown = session.workload, []
    losses = workload.losses(session.model, batch)
    for optimizer, loss in zip(session.optimizers, losses, strict=False):
        optimizer.zero_grad()
        loss.backward()
        if workload.clip_norm is not None:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, workload.clip_norm)
        optimizer.step()
        shown.append(loss.detach())
    for scheduler in session.schedulers:
        scheduler.step()
    return shown[0]


def mixed_step(trainer: MixedPrecision) -> TakeStep:
    """The same step, taken by a trainer that holds the session's model and optimizers.

    A loss that could not be stepped counts as NaN, and no schedule moves on after a skip.
    """

    def take_step(session: Session, batch: Batch) -> float:
        workload, results = session.workload, []
        losses = workload.losses(session.model, batch)
        for optimizer in session.optimizers:
            # Another loss's backward pass may have left gradients here.
            optimizer.zero_grad()
            with trainer.autocast():
                loss = next(losses)
            results.append(trainer.step(loss, optimizer=optimizer, clip_norm=workload.clip_norm))
        if not any(result.skipped for result in results):
            for scheduler in session.schedulers:
                scheduler.step()
        return math.nan if results[0].loss is None else results[0].loss

    return take_step


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
    # Built on the CPU first: every device starts from the same weights.
    model = workload.model().to(device)
    optimizers = workload.optimizers(model)
    steps = workload.default_steps if steps is None else steps
    found = [workload.scheduler(optimizer, steps) for optimizer in optimizers]
    schedulers = tuple(scheduler for scheduler in found if scheduler is not None)
    return Session(workload, model, optimizers, schedulers, steps, seed, torch.device(device))
