"""Run the step of a skip capsule again, and name the operation that went non-finite first."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpdiag.errors import DamagedCapsule, DamagedPlan, UsageError
from mpdiag.plan import PrecisionPlan
from mpdiag.tracing.nonfinite import Producer, find_nonfinite
from mpdiag.training.options import Backend, PrecisionOverrides
from mpdiag.training.skips.capsule import Capsule, load_capsule, ranks_of
from mpdiag.training.skips.step_start import random_as_before
from mpdiag.training.trainer import MixedPrecision

SCHEMA_VERSION = 1

Builder = Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], Tensor]]]


@dataclass(frozen=True)
class Replayed:
    """A capsule's step, run again.

    Attributes:
        step: The step's number in its training.
        scale: Its loss scale.
        reason: Why it was skipped then.
        loss: The loss now.
        first: The first operation that went non-finite; None if all was finite this time.
    """

    step: int
    scale: float
    reason: str
    loss: float
    first: Producer | None

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag why CAPSULE --json``; a loss that is not finite is text."""
        finite = abs(self.loss) < float("inf")
        return {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "scale": self.scale,
            "reason": self.reason,
            "loss": self.loss if finite else str(self.loss),
            "first": None if self.first is None else self.first.to_json(),
        }


def builder_named(path: str) -> Builder:
    """The function that a person names as ``package.module:function``.

    The working folder is looked in first, as ``python -m`` does.

    Raises:
        UsageError: If there is no such function.
    """
    module_name, _, name = path.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        builder = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"--model {path} cannot be used ({error}): give package.module:function"
        raise UsageError(message) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(builder):
        message = f"--model {path} is not a function: it must return the model and a loss function"
        raise UsageError(message)
    found: Builder = builder
    return found


def replay_capsule(path: str | os.PathLike[str] | Capsule, build: Builder) -> Replayed:
    """Run a capsule's step again and find the first operation that goes non-finite.

    A step of several ranks runs with each rank's batch, from rank 0 on, until one is not finite. Another
    stage of a pipeline is passed over: its own capsule runs with its own model.

    Args:
        path: The capsule.
        build: Returns the model, and a function of model and batch that returns the loss.

    Raises:
        DamagedCapsule: If the capsule cannot be read, or belongs to another model.
        UsageError: If ``build`` returns something else.
    """
    capsule = path if isinstance(path, Capsule) else load_capsule(path)
    replayed = _replay(capsule, build)
    for other in ranks_of(capsule) if replayed.first is None else ():
        held = load_capsule(other)
        try:
            again = _replay(held, build)
        except DamagedCapsule:
            if "weights" in held.document:
                raise
            continue
        if again.first is not None:
            rank = int(other.name.rpartition("-rank")[2])
            return replace(again, first=replace(again.first, rank=rank))
    return replayed


def _replay(capsule: Capsule, build: Builder) -> Replayed:
    built: object = build()  # what a person wrote may return anything
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
        message = "the model's function must return a module and a function of module and batch"
        raise UsageError(message)
    model, loss_of = built
    document = capsule.document
    weights = {
        n.removeprefix("model."): t for n, t in capsule.tensors.items() if n.startswith("model.")
    }
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        detail = str(error).splitlines()[-1].strip()
        message = f"{capsule.folder} is of another model, a {document['model']} ({detail})"
        raise DamagedCapsule(message) from error
    model.train(bool(document["training"]))
    scale = float(document["scale"])
    with (
        _random_of(capsule),
        _trainer_of(capsule, model, scale) as mp,
        find_nonfinite(model) as trace,
    ):
        with mp.autocast():
            loss = loss_of(model, capsule.batch)
        mp.backward(loss)
    value = float(loss.detach())
    return Replayed(int(document["step"]), scale, str(document["reason"]), value, trace.first)


def _trainer_of(capsule: Capsule, model: nn.Module, scale: float) -> MixedPrecision:
    """A trainer like the capsule's, whose steps change nothing."""
    document = capsule.document
    backend: Backend = "emulated" if document["backend"] == "emulated" else "auto"
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    try:
        plan = PrecisionPlan.from_json(document["plan"])
        mp = MixedPrecision(
            model,
            optimizer,
            plan,
            level=document["level"],
            backend=backend,
            overrides=PrecisionOverrides(loss_scale=scale),
        )
    except (DamagedPlan, UsageError) as error:
        message = f"{capsule.folder} is damaged, or of another model ({error}): copy it again"
        raise DamagedCapsule(message) from error
    mp.context.monitor.steps = int(document["step"])  # random bits of block formats follow from it
    if (products := mp.context.wrapped.policy.products) is not None:
        products.rank = int(document.get("rank", 0))
    return mp


@contextmanager
def _random_of(capsule: Capsule) -> Iterator[None]:
    """Random numbers are drawn as they were in the capsule's step."""
    states = {
        n.removeprefix("random."): t for n, t in capsule.tensors.items() if n.startswith("random.")
    }
    with ExitStack() as stack:
        try:
            stack.enter_context(random_as_before(states))
        except (RuntimeError, TypeError) as error:
            message = f"{capsule.folder} holds no random state of torch ({error}): copy it again"
            raise DamagedCapsule(message) from error
        yield
