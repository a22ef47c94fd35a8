"""Exports for PyTorch and libraries built on it: torch.amp, Lightning, Transformers, Accelerate.

Sources: PyTorch's documentation of ``torch.amp``; Lightning's of its ``MixedPrecision`` plugin;
Transformers' of ``TrainingArguments``; Accelerate's of ``GradScalerKwargs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.exports.export import Export, format_of, make, scaling_of
from mpdiag.exports.notes import Support, modules_in_fp32

if TYPE_CHECKING:
    from mpdiag.plan import PrecisionPlan

GRAD_SCALER = ("growth_factor", "backoff_factor", "growth_interval", "checks")
NEVER = 2**31 - 1
"""A growth interval that no training reaches; GradScaler's counter is an int32."""
ALMOST_ONE = 1 - 2**-53
"""A backoff factor below 1, as GradScaler demands, that leaves an FP32 scale unchanged."""

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_OFF = "mixed precision is off: the plan is for FP32 (O0)."


def autocast_settings(plan: PrecisionPlan, support: Support) -> dict[str, Any]:
    """The arguments of ``torch.autocast`` except the device; the dtype by name."""
    chosen = format_of(plan, support)
    return {"dtype": DTYPES[chosen], "enabled": chosen != "fp32"}


def scaler_settings(plan: PrecisionPlan) -> dict[str, Any]:
    """The arguments of ``torch.amp.GradScaler`` except the device.

    A constant scale is checked as well: it never grows, and backing off leaves it unchanged.
    """
    scaling, scale = scaling_of(plan), plan.loss_scale
    if scaling.kind == "none":
        return {"enabled": False}
    constant = scaling.kind == "constant"
    return {
        "init_scale": float(scaling.scale),
        "growth_factor": scale.growth_factor,
        "backoff_factor": ALMOST_ONE if constant else scale.backoff_factor,
        "growth_interval": NEVER if constant else scale.growth_interval,
    }


def arguments(settings: dict[str, Any]) -> str:
    """Settings as keyword arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def torch(plan: PrecisionPlan) -> Export:
    """A training loop with ``torch.autocast`` and ``torch.amp.GradScaler``."""
    support = Support("torch.amp", settings=GRAD_SCALER, fp32_modules=True)
    cast, scaler = autocast_settings(plan, support), scaler_settings(plan)
    names = modules_in_fp32(plan) if cast["enabled"] else []
    constant = scaling_of(plan).kind == "constant"
    remark = (
        "# a constant scale: it never grows, and backing off rounds to itself\n" if constant else ""
    )
    body = f"""
import torch

device = next(model.parameters()).device.type
{keep_fp32(names)}{remark}scaler = torch.amp.GradScaler(device, {arguments(scaler)})

for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.{cast["dtype"]}, enabled={cast["enabled"]}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # clip after this, if you clip
    scaler.step(optimizer)
    scaler.update()
"""
    settings = {"autocast": cast, "grad_scaler": scaler, "fp32_modules": names}
    return make(plan, "torch", support, "python", body, settings)


def keep_fp32(names: list[str]) -> str:
    """Code that takes modules of ``model`` out of autocast on ``device``; empty without names."""
    if not names:
        return ""
    rows = "".join(f"    {name!r},\n" for name in names)
    return f"""

def keep_fp32(module):
    forward = module.forward

    def wide(value):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.float() if floating else value

    def forward_in_fp32(*args, **kwargs):
        args, kwargs = torch.utils._pytree.tree_map(wide, (args, kwargs))
        with torch.autocast(device, enabled=False):
            return forward(*args, **kwargs)

    module.forward = forward_in_fp32


for name in [
{rows}]:
    keep_fp32(model.get_submodule(name))

"""


def lightning(plan: PrecisionPlan) -> Export:
    """A Lightning ``Trainer`` with the ``MixedPrecision`` plugin, or ``mpdiag``'s own."""
    support = Support("Lightning", settings=GRAD_SCALER)
    cast, scaler = autocast_settings(plan, support), scaler_settings(plan)
    precision = {"float16": "16-mixed", "bfloat16": "bf16-mixed", "float32": "32-true"}[
        cast["dtype"]
    ]
    settings: dict[str, Any] = {"precision": precision}
    extra = []
    if precision != "16-mixed":
        body = f"import lightning\n\ntrainer = lightning.Trainer(precision={precision!r})\n"
        if scaler.get("enabled", True):
            extra.append(f"Lightning scales no loss at {precision!r}.")
    else:
        settings["grad_scaler"] = scaler
        body = f"""
import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision

device = "cuda"
scaler = torch.amp.GradScaler(device, {arguments(scaler)})
trainer = lightning.Trainer(plugins=MixedPrecision({precision!r}, device, scaler))
"""
    return make(
        plan, "lightning", support, "python", body, settings, *extra, *_whole("lightning", plan)
    )


def huggingface(plan: PrecisionPlan) -> Export:
    """``TrainingArguments``, and the scaler, for which they have no argument."""
    support = Support("Transformers", settings=GRAD_SCALER)
    cast, scaler = autocast_settings(plan, support), scaler_settings(plan)
    settings: dict[str, Any] = {
        "fp16": cast["dtype"] == "float16",
        "bf16": cast["dtype"] == "bfloat16",
    }
    body = f"""
from transformers import Trainer, TrainingArguments

training_arguments = TrainingArguments(output_dir="output", {arguments(settings)})
"""
    extra = []
    if settings["fp16"]:
        body = f"import torch\n{body.lstrip()}"
        body += f"""
trainer = Trainer(model=model, args=training_arguments, train_dataset=train_dataset)
trainer.accelerator.scaler = torch.amp.GradScaler("cuda", {arguments(scaler)})
"""
        settings["grad_scaler"] = scaler
    elif scaler.get("enabled", True) and cast["enabled"]:
        extra.append("Transformers scales no loss with bf16=True.")
    return make(
        plan, "huggingface", support, "python", body, settings, *extra, *_whole("huggingface", plan)
    )


def accelerate(plan: PrecisionPlan) -> Export:
    """An ``Accelerator`` with ``GradScalerKwargs``."""
    support = Support("Accelerate", settings=GRAD_SCALER)
    cast, scaler = autocast_settings(plan, support), scaler_settings(plan)
    precision = {"float16": "fp16", "bfloat16": "bf16", "float32": "no"}[cast["dtype"]]
    settings: dict[str, Any] = {"mixed_precision": precision}
    inside, extra = f"mixed_precision={precision!r}", []
    if precision == "fp16":
        settings["grad_scaler"] = scaler
        handler = f"kwargs_handlers=[GradScalerKwargs({arguments(scaler)})]"
        inside = f"\n    {inside},\n    {handler},\n"
    elif scaler.get("enabled", True) and cast["enabled"]:
        extra.append("Accelerate scales no loss with mixed_precision='bf16'.")
    body = f"""
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs

accelerator = Accelerator({inside})
"""
    return make(
        plan, "accelerate", support, "python", body, settings, *extra, *_whole("accelerate", plan)
    )


def _whole(library: str, plan: PrecisionPlan) -> tuple[str, ...]:
    """A note on the integration that applies the whole plan."""
    if plan.level == "O0":
        return (_OFF,)
    return (f"mpdiag.integrations.{library} applies the whole plan, with what is missing below.",)
