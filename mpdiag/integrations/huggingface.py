"""Transformers: a callback that records, and a ``Trainer`` that trains by a plan.

::

    Trainer(model, arguments, train_dataset=data, callbacks=[RecordCallback("runs/mine")])
    PlanTrainer(model, arguments, train_dataset=data, plan="plan.json")

``fp16`` and ``bf16`` stay off in ``TrainingArguments``: the plan says what is computed in what.
"""

import weakref
from pathlib import Path
from typing import Any

import torch

from mpdiag.installation.extras import EXTRAS
from mpdiag.integrations.shared import Recording, TrainingState
from mpdiag.recording.recorder import Recorder
from mpdiag.runs.training_log import log_metric

with EXTRAS["huggingface"].imports("mpdiag.integrations.huggingface"):
    from transformers import Trainer, TrainerCallback

    from mpdiag.integrations.accelerate import PlanAccelerator, apply_plan

import os
from collections.abc import Iterator, Mapping

from mpdiag.plan import PrecisionPlan
from mpdiag.training.trainer import MixedPrecision

STATE_FILE = "mpdiag.pt"
"""In a checkpoint of ``PlanTrainer``: loss scale, counts and FP32 masters."""


class RecordCallback(Recording, TrainerCallback):
    """Records a training; see ``Recording`` for arguments and attributes."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin to record."""
        recorder = self.begin(kwargs["model"], kwargs["optimizer"])
        # Transformers calls nothing when training fails; the recording ends with the process.
        weakref.finalize(self, Recorder.close, recorder, "failed")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Write an evaluation's metrics into the run."""
        if self.recorder is not None and state.is_world_process_zero:
            for name, value, higher in _figures(kwargs.get("metrics") or {}, args):
                self.recorder.log_metric(name, value, higher_is_better=higher)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Finish the recording."""
        self.end()


class PlanTrainer(Trainer):
    """A ``Trainer`` that trains by a plan.

    Args:
        args: As for ``Trainer``.
        plan: A plan, or the path of one.
        plan_options: As for ``mpdiag.MixedPrecision``: ``run``, ``backend``, ``level`` …
        kwargs: As for ``Trainer``.

    Raises:
        UsageError: If ``TrainingArguments`` turn mixed precision on.
    """

    def __init__(
        self,
        *args: Any,
        plan: PrecisionPlan | str | os.PathLike[str],
        plan_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.plan = plan
        self.plan_options = dict(plan_options or {})
        super().__init__(*args, **kwargs)

    @property
    def mp(self) -> MixedPrecision | None:
        """The ``MixedPrecision``; None outside training."""
        accelerator = self.accelerator
        return accelerator.mp if isinstance(accelerator, PlanAccelerator) else None

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and put it under the plan."""
        super().create_accelerator_and_postprocess()
        apply_plan(self.accelerator, self.plan, **self.plan_options)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:  # noqa: ARG002
        """The plan's context, so that losses are computed by it, too."""
        return self.accelerator.autocast()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate; the metrics are written into the plan's run, if it has one."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        if self.plan_options.get("run") is not None:
            for name, value, higher in _figures(metrics, self.args):
                log_metric(name, value, higher_is_better=higher)
        return metrics

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save as ``Trainer`` does; during training, weights are in the level's precision."""
        if isinstance(self.accelerator, PlanAccelerator):
            self.accelerator.complete_model()
        super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save them, together with the loss scale, step counts and masters."""
        super()._save_optimizer_and_scheduler(output_dir)
        if self.mp is not None and self.args.should_save:
            torch.save(TrainingState(self.mp).state_dict(), Path(output_dir) / STATE_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load them, with the checkpoint's loss scale and masters if it has them."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.mp is not None and checkpoint is not None:
            path = Path(checkpoint) / STATE_FILE
            if path.exists():
                state = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
                TrainingState(self.mp).load_state_dict(state)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; afterwards the model has its full FP32 weights."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.accelerator.end_plan()


def _figures(metrics: Mapping[str, Any], arguments: Any) -> Iterator[tuple[str, float, bool]]:
    """The metrics of an evaluation: name, value, whether higher is better.

    That is known of the loss, and of what ``metric_for_best_model`` names.
    """
    known = {"eval_loss": False}
    best = arguments.metric_for_best_model
    if best and arguments.greater_is_better is not None:
        known[best if best.startswith("eval_") else f"eval_{best}"] = arguments.greater_is_better
    for name, higher in known.items():
        if isinstance(metrics.get(name), (int, float)):
            yield name, float(metrics[name]), higher
