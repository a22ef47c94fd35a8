"""A training's run folder: ``meta.json`` and ``training.jsonl``, written as it goes."""

import os
import sys
import time
import warnings
from typing import Any

import torch

from mpdiag.errors import MpdiagError
from mpdiag.files.atomic import atomic_path, write_json
from mpdiag.files.paths import place
from mpdiag.plan import PrecisionPlan
from mpdiag.recording.run_folder import describe_training
from mpdiag.runs import provenance
from mpdiag.runs.run import META, SCHEMA_VERSION, now, open_run
from mpdiag.runs.training_log import FILE, LogWriter, Metric, TrainingStep, announce, is_recorded
from mpdiag.tracing.precision_share import PrecisionShare
from mpdiag.training.callers import loop_stacklevel
from mpdiag.training.levels import Precision
from mpdiag.training.results import StepResult
from mpdiag.training.weights.wrapping import Wrapped


class RunLog:
    """Writes the result of each step; on rank 0 alone, and its errors never reach the training.

    A folder that holds a recording gets the log beside it; a training that goes on from a checkpoint
    goes on in the same file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: PrecisionPlan,
        precision: Precision,
        backend: str,
        wrapped: Wrapped,
        share: PrecisionShare,
    ) -> None:
        self._share = share
        self.folder = place(folder).absolute()  # the program may change its working folder
        self._log = LogWriter(self.folder)
        self._device = next((p.device for m in wrapped.models for p in m.parameters()), None)
        self._last: float | None = None
        self._active = self._closed = self._failed = False
        if provenance.ranks()[0] != 0:
            return
        self._active = True
        try:
            self._begin(plan, precision, backend, wrapped)
        except (OSError, MpdiagError) as error:
            self._active = False
            self._fail(
                f"cannot write a run into {self.folder} ({error}); training goes on without it"
            )
        if self._active:
            announce(self)

    def _begin(
        self, plan: PrecisionPlan, precision: Precision, backend: str, wrapped: Wrapped
    ) -> None:
        training = {
            "level": precision.level,
            "dtype": precision.name,
            "backend": backend,
            "loss_scale": plan.loss_scale.method,
        }
        if is_recorded(self.folder):  # of the FP32 training; this one has a log of its own
            (self.folder / FILE).unlink()
        if (self.folder / META).exists():
            self._meta = {**open_run(self.folder).meta, "training": training}
            self._meta.pop("schema_version")
        else:
            self._meta = {
                **describe_training(wrapped.models),
                "state": "training",
                "created": now(),
                "training": training,
            }
            self.folder.mkdir(parents=True, exist_ok=True)
        self._write_meta()
        with atomic_path(self.folder / "plan.json") as path:
            plan.save(path)

    def _write_meta(self) -> None:
        self._meta["updated"] = now()
        write_json(self.folder / META, {"schema_version": SCHEMA_VERSION, **self._meta})

    def note_step(self, result: StepResult) -> None:
        """Write the result of a step."""
        if not self._active:
            return
        moment = time.perf_counter()
        seconds = None if self._last is None else round(moment - self._last, 6)
        self._last = moment
        self._log.append(
            TrainingStep(
                step=result.step,
                loss=result.loss,
                scale=result.scale,
                skipped=result.skipped,
                reason=result.reason,
                gradient_norm=result.gradient_norm,
                memory_bytes=self._memory(),
                seconds=seconds,
            )
        )

    def note_metric(self, name: str, value: float, *, higher_is_better: bool) -> None:
        """Write a metric, even one that is known only after training."""
        metric = Metric(name, value, higher_is_better)
        if self._active:
            self._log.append(metric)
        elif self._closed:
            self._log.append(metric)
            self._log.close()

    def note(self, document: dict[str, Any]) -> None:
        """Write anything else, such as an alarm."""
        if self._active:
            self._log.append(document)

    def close(self, state: str = "complete") -> None:
        """Finish the log; a second call does nothing."""
        if not self._active:
            return
        if self._last is not None and not self._closed:  # there was a step, and no interrupt here
            self._log.append(self._share.to_json())
        self._closed = True
        self._log.close()
        self._meta["half_precision_flops"] = self._share.share
        if self._meta.get("state") in ("training", "complete", "failed", "interrupted"):
            self._meta["state"] = state
        try:
            self._write_meta()
        except OSError as error:
            self._fail(f"cannot write {self.folder} ({error})")
        self._active = False

    @property
    def failed(self) -> bool:
        """Whether something of the run could not be written."""
        return self._failed or self._log.failed

    def _fail(self, message: str) -> None:
        self._failed = True
        warnings.warn(message, RuntimeWarning, stacklevel=loop_stacklevel())

    def _memory(self) -> int | None:
        if self._device is not None and self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if sys.platform == "win32":
            return None
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
