"""What several libraries need: a recording for their callbacks, and a state for their checkpoints.

They save models and optimizers themselves. The rest is the loss scaler, the counts of steps and skips
and, where the model holds half-precision weights, their FP32 masters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mpdiag.errors import StateMismatch, UsageError
from mpdiag.numerics.loss_scalers import Scaler
from mpdiag.training import checkpoint

if TYPE_CHECKING:
    from mpdiag.recording.recorder import Optimizers, Recorder
    from mpdiag.tracing.names import Models
    from mpdiag.training.trainer import MixedPrecision


class Recording:
    """Records a training from a framework's callback.

    The training's precision and its findings are printed, and its series are sent to what it reports to.

    Attributes:
        recorder: The recording; None before training begins.

    Args:
        run: The run folder, a path or a URL.
        options: As for ``record_loop``: ``report_to``, and ``mpdiag.record``'s ``every``, ``include``,
            ``exclude``, ``max_steps``, ``overwrite``.
    """

    def __init__(self, run: str | os.PathLike[str], **options: Any) -> None:
        self.run = run
        self.options = options
        self.recorder: Recorder | None = None

    def begin(self, model: Models, optimizers: Optimizers) -> Recorder:
        """Begin to record a model and its optimizers."""
        from mpdiag.integrations.loop import record_loop

        self.recorder = record_loop(model, optimizers, self.run, **self.options).start()
        return self.recorder

    def end(self, state: str = "complete") -> None:
        """Finish the run folder, if recording began."""
        if self.recorder is not None:
            self.recorder.close(state)


def dump_scaler(scaler: Scaler) -> dict[str, Any]:
    """A scaler's class by its name, and its fields, settings and state alike.

    Raises:
        UsageError: If the scaler is not a dataclass.
    """
    kind = type(scaler).__name__
    try:
        return {"kind": kind, **asdict(scaler)}
    except TypeError:
        message = f"{kind} is not a dataclass, so its state cannot be saved: derive it from Scaler"
        raise UsageError(message) from None


def load_scaler(scaler: Scaler, state: Mapping[str, Any]) -> Scaler:
    """The scaler in a saved state.

    Raises:
        StateMismatch: If it is the state of another scaler, or cannot be read.
    """
    fields = dict(state)
    kind = fields.pop("kind", None)
    if kind != type(scaler).__name__:
        raise StateMismatch(
            f"the checkpoint holds the state of {kind or 'no scaler'}, but the plan uses "
            f"{type(scaler).__name__}: load it with the plan that it was trained by"
        )
    try:
        return replace(scaler, **fields)
    except (TypeError, UsageError) as error:
        raise StateMismatch(f"the checkpoint's loss scaler cannot be read: {error}") from error


class TrainingState:
    """The state of a ``MixedPrecision`` without its models and optimizers."""

    def __init__(self, mp: MixedPrecision) -> None:
        self._mp = mp

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: ``torch.load(weights_only=True)`` reads them."""
        mp = self._mp
        state = {"scaler": dump_scaler(mp.loss_scaler), "steps": mp.steps, "skipped": mp.skipped}
        state["skips_in_a_row"] = mp.context.monitor.skips.to_plain()
        if mp.precision.master_weights:
            state["masters"] = checkpoint.masters_of(mp.context.wrapped)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, once models and optimizers were loaded.

        A state without masters leaves them as the models' weights say.

        Raises:
            StateMismatch: If it is the state of another scaler or another model.
        """
        mp = self._mp
        scaler = load_scaler(mp.loss_scaler, state["scaler"])
        if "masters" in state:
            checkpoint.load_masters(state["masters"], mp.context.wrapped)
        skips = list(state.get("skips_in_a_row", []))
        mp.resume(checkpoint.Progress(scaler, int(state["steps"]), int(state["skipped"]), skips))
