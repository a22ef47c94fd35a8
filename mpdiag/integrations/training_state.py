"""What the checkpoints of other libraries lack of a training by a plan.

They save models and optimizers themselves. The rest is the loss scaler, the counts of steps and skips
and, where the model holds half-precision weights, their FP32 masters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.integrations.scaler_state import dump_scaler, load_scaler
from mpdiag.training import checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.training.trainer import MixedPrecision


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
