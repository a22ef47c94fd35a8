"""What a trainer is made of, put together; and the models that trainers hold."""

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from mpdiag.display.wording import some_of
from mpdiag.emulation import recurrent
from mpdiag.emulation.mode import Emulation
from mpdiag.errors import UsageError
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, BlockRecipe
from mpdiag.plan import PrecisionPlan, ReductionPlan
from mpdiag.tracing.fingerprint import (
    ModelFingerprint,
    compare_models,
    fingerprint,
    other_model,
    share_a_layer,
)
from mpdiag.tracing.precision_share import PrecisionShare
from mpdiag.tracing.uncompiled import lets_compile, prepare
from mpdiag.training import arguments, collectives, levels
from mpdiag.training.callers import loop_stacklevel
from mpdiag.training.casting import Casting
from mpdiag.training.judgement import rank, ranks_of
from mpdiag.training.levels import DTYPES, Precision
from mpdiag.training.monitor import DriftWatch, StepMonitor
from mpdiag.training.movement import AverageWatch, OptimizerWatch
from mpdiag.training.options import AS_PLANNED, DEFAULT_OPTIONS, PrecisionOverrides, TrainerOptions
from mpdiag.training.run_log import RunLog
from mpdiag.training.scaling import GradientScaling
from mpdiag.training.stepping import StepContext
from mpdiag.training.tensor_core_check import check_for
from mpdiag.training.weights.masters import refuse_low_precision
from mpdiag.training.weights.wrapping import Wrapped

logger = logging.getLogger("mpdiag")

_holders: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Setup:
    """How a trainer works, resolved, and its parts.

    Attributes:
        plan: The plan obeyed.
        precision: The level's properties, overrides applied.
        backend: ``native`` or ``emulated``.
        context: The parts.
    """

    plan: PrecisionPlan
    precision: Precision
    backend: str
    context: StepContext

    def release(self) -> None:
        """Give models and optimizers back in FP32, and finish the run log."""
        self.context.wrapped.release()
        if self.context.monitor.log is not None:
            self.context.monitor.log.close()


@dataclass(frozen=True, eq=False)
class Request:
    """What a caller asks for; each field as ``MixedPrecision`` takes it."""

    level: str | None = None
    backend: str = "auto"
    run: str | os.PathLike[str] | None = None
    overrides: PrecisionOverrides = AS_PLANNED
    options: TrainerOptions = DEFAULT_OPTIONS


@dataclass(frozen=True, eq=False)
class Surroundings:
    """How a trainer speaks, and what the trainers of one script share.

    Attributes:
        advice: How to learn the cause of a skip, for the message that ends a training.
        say: Takes alarms; default: warnings.
        first_step: The first step's number.
        share: Counts what runs in half precision; default: one of this trainer alone.
    """

    advice: str
    say: Callable[[str], None] | None = None
    first_step: int = 0
    share: PrecisionShare = field(default_factory=PrecisionShare)


def set_up(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    plan: PrecisionPlan,
    request: Request,
    around: Surroundings,
) -> Setup:
    """Check what was asked for, wrap the models and put the parts together.

    Args:
        models: FP32 models that no other trainer holds.
        optimizers: What steps them.
        plan: The plan.
        request: What was asked for beside it.
        around: What the trainer has from outside.

    Raises:
        UsageError: If something makes no sense; nothing is changed then.
    """
    overrides, options, share = request.overrides, request.options, around.share
    _check_model(plan, models, options.names, around.say)
    precision = levels.resolve(plan, request.level, overrides)
    scaler = levels.scaler_of(plan.loss_scale, precision, overrides.loss_scale)
    rules = arguments.operation_rules(
        overrides.fp32_operations, overrides.low_operations, precision
    )
    _refuse_unholdable(models)
    refuse_low_precision(models)
    device = next((p.device for m in models for p in m.parameters()), torch.device("cpu"))
    chosen = arguments.choose_backend(request.backend, precision, device, models)
    wrapped = Wrapped(
        models, optimizers, precision, device.type, options.names, half_outputs=options.half_outputs
    )
    try:
        if chosen == "emulated" and precision.low_precision_model:
            wrapped.hold(recurrent.in_one_piece())
        wrapped.apply(plan, overrides.fp32_modules, rules)
        apply_reduction(models, plan.reduction)
    except BaseException:
        wrapped.release()
        raise
    if any(isinstance(m, torch.jit.ScriptModule) for model in models for m in model.modules()):
        share.stop("a TorchScript module shows no operations")
    share.begin()
    emulation = Emulation() if chosen == "emulated" else None
    blocks = wrapped.policy.products
    chosen = "emulated" if blocks is not None else chosen
    log = None
    if request.run is not None:
        log = RunLog(request.run, plan, precision, chosen, wrapped, share)
    check = None
    if options.check_tensor_cores and precision.level != "O0" and blocks is None:
        check = check_for(models[0], device, native=chosen == "native", rank=rank())
    monitor = StepMonitor(
        DriftWatch(plan, around.say),
        log,
        check,
        share,
        max_skips=options.max_skips,
        advice=around.advice,
        first_step=around.first_step,
    )
    if blocks is not None:
        blocks.step = partial(getattr, monitor, "steps")
        blocks.note = partial(_note_blocks, monitor, BLOCK_RECIPES[precision.blocks])
    context = StepContext(
        wrapped,
        wrapped.masters,
        Casting(wrapped, emulation, share),
        GradientScaling(scaler),
        monitor,
        OptimizerWatch(wrapped.masters, wrapped.names_of, monitor.note_finding),
        AverageWatch(wrapped, monitor.note_average) if precision.low_precision_model else None,
        ranks_of(device, options.process_group, models),
    )
    prepare()
    wrapped.masters.note_written = _noting_once(wrapped, monitor)
    wrapped.note_eager = partial(_note_eager, monitor)
    if not (wrapped.compiles or lets_compile()):
        logger.warning("%s", _RUNS_EAGERLY)
    return Setup(plan, precision, chosen, context)


def _noting_once(wrapped: Wrapped, monitor: StepMonitor) -> Callable[[Sequence[Tensor]], None]:
    """Says once in the log that a script writes into half-precision weights, and which."""

    def note(parameters: Sequence[Tensor]) -> None:
        wrapped.masters.note_written = lambda _parameters: None
        names = wrapped.names_of([wrapped.masters.master(p) for p in parameters])
        message = (
            f"weights were written into the model ({some_of(names)}) before step {monitor.steps}: what "
            f"was written is in the FP32 masters now, as {wrapped.precision.format.upper()} holds it"
        )
        _note(monitor, message, written=names)

    return note


def _note(monitor: StepMonitor, message: str, level: int = logging.INFO, **fields: Any) -> None:
    logger.log(level, "%s", message)
    if monitor.log is not None:
        monitor.log.note({**fields, "before_step": monitor.steps, "message": message})


_RUNS_EAGERLY = "compiled code runs eagerly: this version of torch cannot keep a part of it in FP32"


def _note_eager(monitor: StepMonitor, name: str) -> None:
    """Say in the log that a compiled module runs eagerly, and what compiles it."""
    message = (
        f"{name or 'the model'} runs eagerly, though it is compiled: the plan keeps an operation in it "
        "in FP32. Compile the module around it instead, as one graph."
    )
    _note(monitor, message, logging.WARNING, eager=name)


def _note_blocks(
    monitor: StepMonitor, recipe: BlockRecipe, missing: list[str], padded: list[str]
) -> None:
    """Say in the log where a block format is not emulated, and which sizes no engine takes."""
    if missing:
        message = (
            f"mpdiag found no product of {some_of(missing)} to run in {recipe.label}, so it stays in "
            "BF16. Fused attention and transposed convolutions are not emulated."
        )
        _note(monitor, message, logging.WARNING, missing=missing)
    if padded:
        message = (
            f"products of {some_of(padded)} have sizes that engines do not take for {recipe.label} "
            f"(multiples of {recipe.multiple}). Zeros fill up the last block here."
        )
        _note(monitor, message, padded=padded)


def _check_model(
    plan: PrecisionPlan,
    models: Sequence[nn.Module],
    names: Sequence[str],
    say: Callable[[str], None] | None,
) -> None:
    """Refuse a plan of another model, and name the layers that it does not know.

    A model with fewer than half of the plan's layers may be a part of that model under another name:
    there it is only said, as long as one of its layers has the shapes of one of the plan's. A model
    without any such layer is another, whatever its layers are called, unless the plan knows only some
    layers of its model.

    Raises:
        UsageError: If the plan is of another model.
    """
    if plan.model is None:
        return
    prefixes = names or [""] * len(models)
    found = [fingerprint_of(model, name) for model, name in zip(models, prefixes, strict=True)]
    live = [model for model in found if model is not None]
    differences = [compare_models(plan.model, model) for model in live]
    layers = sum(len(model.layers) for model in live)
    another = all(d.disjoint for d in differences) and 2 * layers >= len(plan.model.layers)
    shared = not plan.model.complete or any(share_a_layer(plan.model, model) for model in live)
    if live and (another or not shared):
        raise UsageError(other_model(differences[0], plan.model, live[0], "training"))
    unknown = [layer for d in differences for layer in d.only_second]
    resized = [layer for d in differences for layer in d.changed]
    messages = {
        "the plan was made without these layers of the model and knows nothing about them: "
        f"{some_of(unknown)}": unknown,
        f"layers of the model have other sizes than in the plan's recording ({some_of(resized)}): "
        "the loss scale and the sizes to pad may no longer fit": resized,
    }
    for message in (message for message, layers in messages.items() if layers):
        if say is not None:
            say(message)
        else:
            warnings.warn(message, RuntimeWarning, stacklevel=loop_stacklevel())


def fingerprint_of(model: nn.Module, prefix: str = "") -> ModelFingerprint | None:
    """The fingerprint of a live model; None if it has no parameters, or none with a name."""
    begin = f"{prefix}." if prefix else ""
    return fingerprint(
        (begin + name, None if isinstance(p, UninitializedParameter) else tuple(p.shape))
        for name, p in model.named_parameters()
    )


def hold(models: Sequence[nn.Module], owner: object) -> None:
    """Note that a trainer holds some models, as long as it lives."""
    for model in models:
        _holders[model] = weakref.ref(owner)


def let_go(models: Sequence[nn.Module], owner: object) -> None:
    """The trainer is done with the models it still holds."""
    for model in models:
        holder = _holders.get(model)
        if holder is not None and holder() is owner:
            del _holders[model]


def _refuse_unholdable(models: Sequence[nn.Module]) -> None:
    for model in models:
        if isinstance(model, torch.jit.ScriptModule):
            raise UsageError(
                "a TorchScript module takes no hooks: give MixedPrecision the eager model, or put the "
                "module inside another (nn.Sequential(model))"
            )
        holder = _holders.get(model)
        if holder is not None and holder() is not None:
            raise UsageError(
                "another MixedPrecision holds this model already: close() it, or drop it, before "
                "wrapping the model again"
            )


def apply_reduction(models: list[nn.Module], plan: ReductionPlan | None) -> None:
    """Reduce the gradients of DDP models as the plan says; other models are left alone.

    Raises:
        UsageError: If the plan names a dtype that cannot be reduced in.
    """
    if plan is None:
        return
    dtype = DTYPES.get(plan.dtype)
    if dtype is None:
        message = f"the plan reduces gradients in {plan.dtype!r}: choose one of {', '.join(DTYPES)}"
        raise UsageError(message)
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            group = model.process_group
            model.register_comm_hook((group, dtype, plan.pre_divide), _reduce)


def _reduce(state: tuple[Any, torch.dtype, bool], bucket: Any) -> Any:
    """A DDP communication hook: the mean over ranks, in a dtype, divided before or after the sum."""
    group, dtype, pre_divide = state
    size = distributed.get_world_size(group)
    gradients = bucket.buffer()
    narrow = gradients.to(dtype)
    if narrow is gradients:
        narrow = gradients.clone()
    if pre_divide:
        narrow.div_(size)
    sum_ = distributed.all_reduce(narrow, group=group, async_op=True).get_future()

    def finish(future: Any) -> torch.Tensor:
        total = future.value()[0].to(gradients.dtype)
        if not pre_divide:
            total = total.div(size)
        gradients.copy_(total)
        return gradients  # type: ignore[no-any-return]

    # NCCL's futures are done here, as its sums wait in a stream. With others, ``finish`` would run in a
    # thread of the process group, which may still ask for Python's lock when Python shuts down.
    if not sum_.done():
        sum_.wait()
    collectives.keep([narrow])
    return sum_.then(finish)


# DDP compares a hook's annotations with types; here they are strings.
_reduce.__annotations__ = {}
