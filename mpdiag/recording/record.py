"""``mpdiag.record``: what a user asks of a recording, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from mpdiag.errors import UsageError
from mpdiag.files.paths import place
from mpdiag.recording.cadence import BUDGET, Cadence
from mpdiag.recording.operations import DEFAULT
from mpdiag.recording.recorder import Recorder

if TYPE_CHECKING:
    import os

    from mpdiag.tracing.names import Models

Optimizers = Optimizer | Sequence[Optimizer] | None


def record(
    model: Models,
    optimizer: Optimizers,
    run: str | os.PathLike[str],
    *,
    every: int | None = None,
    include: str | None = None,
    exclude: str | None = None,
    max_steps: int | None = None,
    budget: float | None = BUDGET,
    operations: int = DEFAULT,
    overwrite: bool = False,
) -> Recorder:
    """Record a training; use it as a context manager around the loop.

    Recorded per step: activations and activation gradients of every module, and weights, weight
    gradients and weight updates of every parameter, each as a histogram of powers of two. Losses,
    weights and random state stay bit for bit what they are without it.

    Args:
        model: A module, a list of modules, or a mapping of names to modules.
        optimizer: The optimizer, a list of them, or None where there is none.
        run: The run folder to write, a path or a URL that fsspec knows.
        every: Record each step divisible by this; default: the first 20 and then each 20th.
        include: Regular expression: record only modules and parameters whose name it matches.
        exclude: Regular expression: leave out those whose name it matches.
        max_steps: Record so many steps, then let training go on alone.
        budget: Share of step time that recording may take. The recorder measures itself, and once
            it has cost 10 seconds it records 2, 4, 8 … times fewer steps if it takes more; None
            never does, and neither does ``every``.
        operations: In so many of the recorded steps (the first ones from steps 0, 10, 100 … on),
            record every operation too: what it reads and writes, its module, its line of code.
        overwrite: Replace a run that lies in the folder already.

    Raises:
        UsageError: If an argument makes no sense.
        RunExists: If the folder holds a run and ``overwrite`` is False.
    """
    optimizers = _optimizers(optimizer)
    cadence = Cadence(every, max_steps, budget)
    if type(operations) is not int or operations < 0:
        message = f"operations must be a number of steps, 0 or more, not {operations!r}"
        raise UsageError(message)
    return Recorder(
        model, optimizers, place(run), cadence, include, exclude, overwrite, operations=operations
    )


def _optimizers(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    found = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    sequence: object = found  # callers without a type checker pass anything
    if not isinstance(sequence, Sequence) or not all(isinstance(o, Optimizer) for o in sequence):
        message = (
            "the second argument of record() must be a torch.optim.Optimizer, a list of them or None, "
            f"not {type(optimizer).__name__}"
        )
        raise UsageError(message)
    return list({id(o): o for o in map(_unwrapped, found)}.values())


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps, inside a wrapper that only looks like one (Accelerate's is)."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer
