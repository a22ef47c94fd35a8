"""Writes the first skipped steps of a training into its run, as capsules."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from mpdiag.errors import UsageError
from mpdiag.training.callers import loop_stacklevel
from mpdiag.training.skips.capsule import refuse_odd_batch, save_capsule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.training.results import StepResult
    from mpdiag.training.run_log import RunLog
    from mpdiag.training.weights.wrapping import Wrapped

_MOST = 3


class CapsuleWriter:
    """Keeps the batches of skipped steps.

    Args:
        log: Into whose folder capsules are written; None where the training has none.
        wrapped: The models.
        facts: What ``capsule.json`` says of the training: level, backend, device and plan.
    """

    def __init__(self, log: RunLog | None, wrapped: Wrapped, facts: Mapping[str, Any]) -> None:
        self._log = log
        self._wrapped = wrapped
        self._facts = facts
        self._written = 0
        self._checked = False

    def check(self, batch: Any) -> None:
        """Refuse a batch that no capsule could hold, before a step is skipped.

        Raises:
            UsageError: If it holds something else than tensors and plain values, or the training
                has no run folder or several models.
        """
        if self._log is None:
            message = "step(batch=…) writes capsules of skipped steps into a run: pass run="
            raise UsageError(message)
        if len(self._wrapped.models) != 1:
            message = "step(batch=…) writes capsules of one model, and this trainer has several"
            raise UsageError(message)
        if not self._checked:  # batches are of one form
            refuse_odd_batch(batch)
            self._checked = True

    def write(self, batch: Any, result: StepResult) -> None:
        """Write a capsule of a step that was just skipped; a disk that refuses costs a warning."""
        if self._log is None or self._written == _MOST or result.rank != 0:
            return
        self._written += 1
        folder = self._log.folder / "capsules" / f"step{result.step:06d}"
        model = self._wrapped.models[0]
        try:
            save_capsule(
                folder,
                weights=self._wrapped.fp32_state(model),
                random=self._wrapped.start.random,
                batch=batch,
                facts={
                    "step": result.step,
                    "scale": result.scale,
                    "reason": result.reason,
                    "model": f"{type(model).__module__}.{type(model).__qualname__}",
                    "training": model.training,
                    **self._facts,
                },
            )
        except OSError as error:
            warnings.warn(
                f"cannot write the capsule {folder} ({error}); training goes on without it",
                RuntimeWarning,
                stacklevel=loop_stacklevel(),
            )
