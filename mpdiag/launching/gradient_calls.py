"""A script's calls of autograd, passed to the trainer of the models they reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpdiag.launching.processes import tell
from mpdiag.runs.provenance import announced_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from mpdiag.training.script_trainer import ScriptTrainer

_REPLACED = {
    "a GradScaler": "the plan's loss scale replaces its own",
    "an autocast": "the plan's casts replace its own (autocast(enabled=False) stays)",
}


class GradientCalls:
    """Takes the calls that ``Patches`` intercepts.

    Args:
        trainers: The trainers at work; more may be added later.
        refuse: Ends the script, with a reason.

    Attributes:
        in_script_code: Whether code of the script runs inside the pass.
        casts_off: How many contexts of the script switch autocast off.
    """

    def __init__(self, trainers: list[ScriptTrainer], refuse: Callable[[str], None]) -> None:
        self.refuse = refuse
        self.in_script_code = False
        self.casts_off = 0
        self._trainers = trainers
        self._current: ScriptTrainer | None = None  # whose backward pass is under way
        self._noted: set[str] = set()

    @property
    def loss_scale(self) -> float:
        """The scale in force; 1 before training."""
        trainer = self._current or (self._trainers[-1] if self._trainers else None)
        return 1.0 if trainer is None else trainer.loss_scale

    @property
    def computing_gradients(self) -> bool:
        """Whether gradients carry the scale right now."""
        return self._current is not None and self._current.computing_gradients

    @property
    def accumulated_are_true(self) -> bool:
        """Whether ``.grad`` of parameters carries no scale, even in a backward pass."""
        return self._current is not None and self._current.gradients.unscaled_at_leaves

    @contextmanager
    def script_code(self) -> Iterator[None]:
        """While a hook of the script runs: a pass that it begins is one of its own."""
        trainer = self._current
        if trainer is None:
            yield
            return
        computing, before = trainer.computing_gradients, self.in_script_code
        trainer.computing_gradients, self.in_script_code = False, True
        try:
            yield
        finally:
            trainer.computing_gradients, self.in_script_code = computing, before

    def note_seen(self, gradient: Tensor) -> None:
        """Remember whether a gradient is finite that a hook may replace."""
        if self._current is not None:
            self._current.gradients.note_seen(gradient)

    def note_half_only(self, function: str) -> None:
        """Say once that a function sees gradients at the loss scale, for it takes no others."""
        self._tell_once(
            function,
            f"the backward pass of {function} runs in half precision, on gradients multiplied by "
            "the loss scale: do not clip or normalise them there",
        )

    def backward(self, plain: Callable[..., None], tensors: Sequence[Tensor], options: Any) -> None:
        """Run a backward pass; one of other models, or that torch begins in another, is left alone."""
        trainer, reached = self._reach(tensors)
        if trainer is None:
            plain(tensors, **options)
            return
        inputs = options.pop("inputs", None)
        if inputs is not None:
            inputs = (inputs,) if not isinstance(inputs, (list, tuple)) else tuple(inputs)
        with self._at_work(trainer):
            trainer.backward(plain, tensors, reached, inputs or None, options)

    def grad(self, plain: Callable[..., Any], tensors: Sequence[Tensor], options: Any) -> Any:
        """Run ``torch.autograd.grad``; one of other models is left alone."""
        trainer, reached = self._reach(tensors)
        if trainer is None:
            return plain(tensors, **options)
        with self._at_work(trainer):
            return trainer.grad(plain, tensors, reached, options)

    @contextmanager
    def _at_work(self, trainer: ScriptTrainer) -> Iterator[None]:
        before, inside = self._current, self.in_script_code
        self._current, self.in_script_code = trainer, False
        try:
            yield
        finally:
            self._current, self.in_script_code = before, inside

    def retain(self, tensor: Tensor) -> None:
        """Note a tensor that keeps its gradient."""
        for trainer in self._trainers:
            trainer.gradients.retain(tensor)

    def note_own_precision(self, what: str) -> None:
        """Say once that the script's own mixed precision is replaced."""
        self._tell_once(what, f"the script has {what} of its own: {_REPLACED[what]}")

    def _tell_once(self, subject: str, sentence: str) -> None:
        if subject not in self._noted and announced_ranks()[0] == 0:
            tell(sentence)
        self._noted.add(subject)

    def _reach(self, tensors: Sequence[Any]) -> tuple[ScriptTrainer | None, Any]:
        """The trainer whose models a backward pass from here would reach, and what it reaches."""
        import torch

        from mpdiag.launching.discovery import in_transform
        from mpdiag.tracing.autograd_graph import leaves_of
        from mpdiag.tracing.dispatch import in_backward

        plain = all(isinstance(t, torch.Tensor) for t in tensors)
        # As reentrant checkpointing begins, or as a mode of torch.overrides calls a second time.
        nested = (in_backward() or self._current is not None) and not self.in_script_code
        if not self._trainers or nested or in_transform() or not plain:
            return None, None
        leaves, opaque = leaves_of(tensors)
        for trainer in reversed(self._trainers):
            if trainer.gradients.owns(leaves):
                return trainer, (leaves, opaque)
        return (self._trainers[-1] if opaque else None), (leaves, opaque)
