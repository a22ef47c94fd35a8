"""``MixedPrecision``: train by a plan.

::

    mp = mpdiag.MixedPrecision(model, optimizer, plan)
    for x, y in loader:
        with mp.autocast():
            loss = loss_fn(model(x), y)
        result = mp.step(loss, clip_norm=1.0)

Sources: NVIDIA, *Training with Mixed Precision User Guide* (loss scaling); *Mixed Precision
Training* (sections 3.1 and 3.2); OpenSeq2Seq, *Mixed Precision Training* (regularisers).
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpdiag.emulation.mode import Emulation
from mpdiag.errors import UsageError
from mpdiag.plan import PrecisionPlan
from mpdiag.training import arguments, checkpoint, levels
from mpdiag.training.gradients import ranks
from mpdiag.training.run_log import Journal
from mpdiag.training.skips.capsule import refuse_odd_batch, save_capsule
from mpdiag.training.stepping import Stepping
from mpdiag.training.tensor_core_check import check_for
from mpdiag.training.weights.masters import refuse_low_precision
from mpdiag.training.weights.wrapping import Wrapped

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from mpdiag.training.results import StepResult
    from mpdiag.training.step_guard import StepGuard

_MAX_CAPSULES = 3
Backend = Literal["auto", "native", "emulated"]

_live: weakref.WeakKeyDictionary[nn.Module, weakref.ref[MixedPrecision]] = (
    weakref.WeakKeyDictionary()
)


class MixedPrecision(Stepping):
    """Trains models in the precision a plan asks for.

    Attributes:
        plan: The plan obeyed.
        precision: The level's properties, overrides applied.
        backend: ``native`` or ``emulated``.
        steps: Calls of ``step`` so far.
        skipped: How many of them were skipped.

    Args:
        model: A module or a list of them; they are changed in place, and ``close`` undoes it.
        optimizer: An optimizer or a list of them.
        plan: A plan, or the path of one.
        level: O0 to O3; default: the plan's.
        backend: ``native`` is the device's own arithmetic; ``emulated`` stores the same tensors and
            computes in FP32; ``auto`` is native on accelerators and for BF16, emulated for FP16 on
            a CPU. The format is never changed.
        run: A run folder to write ``training.jsonl`` into: each step's loss, scale, skip and reason.
        dtype, operation_casts, keep_batch_norm_fp32, master_weights: Overrides of the level's
            properties, see ``levels``.
        loss_scale: Override of the loss scale, see ``levels.scaler_of``.
        fp32_modules: Names of further modules to run in FP32.
        fp32_operations, low_operations: Names of operations to run in FP32, or in low precision,
            wherever they occur (level O1).
        max_skips: So many steps skipped in a row end training with ``TrainingDiverged``.
        process_group: The ranks that must agree; default: all.
        check_tensor_cores: After the first steps on a GPU, profile one and log whether Tensor Cores
            are in use, with the cause if not; the answer is ``tensor_cores``.
        fp16_accumulation: Add up products and reductions in FP16, as no kernel need do: an ablation,
            emulated only.
        names: What the models' names begin with in the plan, one for each model; default: nothing.

    Raises:
        UsageError: If an argument makes no sense, a model is not FP32, or another live
            ``MixedPrecision`` holds it.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        plan: PrecisionPlan | str | os.PathLike[str],
        *,
        level: str | None = None,
        backend: Backend = "auto",
        run: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | str | None = None,
        operation_casts: bool | None = None,
        keep_batch_norm_fp32: bool | None = None,
        master_weights: bool | None = None,
        loss_scale: object = None,
        fp32_modules: Sequence[str] = (),
        fp32_operations: Sequence[str] = (),
        low_operations: Sequence[str] = (),
        max_skips: int = 8,
        process_group: Any = None,
        check_tensor_cores: bool = True,
        fp16_accumulation: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        self.plan = plan if isinstance(plan, PrecisionPlan) else PrecisionPlan.load(plan)
        models = arguments.listed(model, nn.Module, "model")
        optimizers = arguments.listed(optimizer, Optimizer, "optimizer")
        if type(max_skips) is not int or max_skips < 1:
            message = f"max_skips must be a whole number of at least 1, not {max_skips!r}"
            raise UsageError(message)
        precision = levels.resolve(
            self.plan,
            level,
            dtype=dtype,
            operation_casts=operation_casts,
            keep_batch_norm_fp32=keep_batch_norm_fp32,
            master_weights=master_weights,
        )
        scaler = levels.scaler_of(self.plan.loss_scale, precision, loss_scale)
        overrides = arguments.operation_rules(fp32_operations, low_operations, precision)
        _refuse_live(models)
        refuse_low_precision(models)
        device = arguments.device_of(models)
        self.backend = arguments.choose_backend(backend, precision, device, models)
        if fp16_accumulation and self.backend != "emulated":
            message = "fp16_accumulation is emulated: it needs FP16 and backend='emulated'"
            raise UsageError(message)
        wrapped = Wrapped(models, optimizers, precision, device.type, names)
        try:
            wrapped.apply(self.plan, fp32_modules, overrides)
            ranks.apply_reduction(models, self.plan.reduction)
        except BaseException:
            wrapped.release()
            raise
        journal = None
        if run is not None:
            journal = Journal(run, self.plan, precision, self.backend, wrapped)
        super().__init__(
            self.plan,
            precision,
            scaler,
            wrapped,
            Emulation(low_sums=fp16_accumulation) if self.backend == "emulated" else None,
            device=device,
            max_skips=max_skips,
            group=process_group,
            journal=journal,
        )
        self._capsules = 0
        if check_tensor_cores and precision.level != "O0":
            native = self.backend == "native"
            self._check = check_for(models[0], device, native=native, rank=ranks.rank())
        self._release = weakref.finalize(self, _give_back, wrapped, journal, self._guard)
        for held in models:
            _live[held] = weakref.ref(self)

    def __repr__(self) -> str:
        return (
            f"<MixedPrecision {self.precision.format} {self.precision.level} ({self.backend}), loss "
            f"scale {self.loss_scale:g}, {self.steps} steps, {self.skipped} of them skipped>"
        )

    # -- life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give models and optimizers back in FP32, with full weights; twice does no harm."""
        for model in self._wrapped.models:
            holder = _live.get(model)
            if holder is not None and holder() is self:
                del _live[model]
        if self._check is not None:
            self._check.close()
        self._release()

    def __enter__(self) -> MixedPrecision:  # noqa: PYI034 - typing.Self is Python 3.11's
        """Nothing more than the constructor did."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Close; an exception marks the run as failed."""
        if self.journal is not None and kind is not None:
            self.journal.close("failed")
        self.close()

    def log_metric(self, name: str, value: float, *, higher_is_better: bool = True) -> None:
        """Write a figure of merit into the run, for ``mpdiag compare``."""
        if self.journal is None:
            message = "log_metric() needs a run folder: pass run= to MixedPrecision"
            raise UsageError(message)
        self.journal.note_metric(name, value, higher_is_better=higher_is_better)

    def _check_batch(self, batch: Any) -> None:
        if self.journal is None:
            message = "step(batch=…) writes capsules of skipped steps into a run: pass run="
            raise UsageError(message)
        if len(self._wrapped.models) != 1:
            message = "step(batch=…) writes capsules of one model, and this trainer has several"
            raise UsageError(message)
        if not self.steps:  # batches are of one form
            refuse_odd_batch(batch)

    def _keep(self, batch: Any, result: StepResult) -> None:
        if self.journal is None or self._capsules == _MAX_CAPSULES or result.rank != 0:
            return
        self._capsules += 1
        folder = self.journal.folder / "capsules" / f"step{result.step:06d}"
        model = self._wrapped.models[0]
        try:
            save_capsule(
                folder,
                weights=self.fp32_state_dict(model),
                random=self._wrapped.random,
                batch=batch,
                facts={
                    "step": result.step,
                    "scale": result.scale,
                    "reason": result.reason,
                    "model": f"{type(model).__module__}.{type(model).__qualname__}",
                    "training": model.training,
                    "level": self.precision.level,
                    "backend": self.backend,
                    "device": self._device.type,
                    "plan": self.plan.to_json(),
                },
            )
        except OSError as error:
            warnings.warn(
                f"cannot write the capsule {folder} ({error}); training goes on without it",
                RuntimeWarning,
                stacklevel=3,
            )

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit for bit, models and optimizers included.

        Plain values and tensors: ``torch.load(weights_only=True)`` reads it.
        """
        if self._pending:
            message = (
                "state_dict() in the middle of an accumulation would lose its gradients: step first"
            )
            raise UsageError(message)
        progress = checkpoint.Progress(self._scaler, self.steps, self.skipped, self._in_a_row)
        return checkpoint.save(self.plan, self.precision, progress, self._wrapped)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            StateMismatch: If it belongs to another plan, level or model.
        """
        loaded = checkpoint.load(state, self.plan, self.precision, self._wrapped)
        self._scaler = loaded.scaler
        self.steps, self.skipped, self._in_a_row = loaded.steps, loaded.skipped, loaded.in_a_row
        self._pending.clear()
        self._unscaled.clear()
        self._wrapped.fresh = True

    def fp32_state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """A model's state dict with its full FP32 weights, whatever the level holds.

        Args:
            model: Which model; default: the first.
        """
        chosen = self._wrapped.models[0] if model is None else model
        state = dict(chosen.state_dict())
        for name, parameter in chosen.named_parameters(remove_duplicate=False):
            state[name] = self._wrapped.masters.master(parameter).detach().float().clone()
        return state


def _give_back(wrapped: Wrapped, journal: Journal | None, guard: StepGuard) -> None:
    guard.release()
    wrapped.release()
    if journal is not None:
        journal.close()


def _refuse_live(models: Sequence[nn.Module]) -> None:
    for model in models:
        holder = _live.get(model)
        if holder is not None and holder() is not None:
            message = (
                "another MixedPrecision holds this model already: close() it, or drop it, before "
                "wrapping the model again"
            )
            raise UsageError(message)
