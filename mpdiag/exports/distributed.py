"""Exports for trainers of large models: DeepSpeed and Megatron-LM.

Sources: DeepSpeed's documentation of its JSON configuration (FP16 and BF16 training options);
Megatron-LM's command-line help (mixed precision).
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from mpdiag.exports.export import Export, format_of, make, number, scaling_of
from mpdiag.exports.notes import Support

if TYPE_CHECKING:
    from mpdiag.plan import PrecisionPlan

_WINDOW = ("growth_interval", "hysteresis", "min_scale", "checks")
_CONSECUTIVE = "consecutive_hysteresis"


def deepspeed(plan: PrecisionPlan) -> Export:
    """The ``fp16`` or ``bf16`` part of a DeepSpeed configuration, as JSON.

    DeepSpeed holds FP16 weights with FP32 masters, which is level O2. A dynamic scale is
    ``loss_scale`` 0.
    """
    settings = (*_WINDOW, _CONSECUTIVE)
    support = Support("DeepSpeed", settings=settings, levels=("O0", "O2"), reduction=True)
    chosen, scaling, scale = format_of(plan, support), scaling_of(plan), plan.loss_scale
    document: dict[str, Any] = {}
    extra = []
    if chosen == "bf16":
        document["bf16"] = {"enabled": True}
        if scaling.kind != "none":
            extra.append("DeepSpeed scales no loss in BF16.")
    elif chosen == "fp16":
        fp16: dict[str, Any] = {"enabled": True, "loss_scale": 0}
        if scaling.kind == "dynamic":
            power = round(math.log2(scaling.scale))
            if 2.0**power != scaling.scale:
                extra.append(
                    f"init_scale {scaling.scale:g} is no power of two; DeepSpeed begins at 2^{power}."
                )
            fp16 |= {
                "initial_scale_power": power,
                "loss_scale_window": scale.growth_interval,
                "hysteresis": scale.hysteresis,
                "min_loss_scale": scale.min_scale,
            }
            if _CONSECUTIVE in scale.settings:
                fp16[_CONSECUTIVE] = scale.settings[_CONSECUTIVE]
        else:
            fp16["loss_scale"] = scaling.scale
        document["fp16"] = fp16
    if plan.reduction is not None:
        document["communication_data_type"] = plan.reduction.dtype
        document["prescale_gradients"] = plan.reduction.pre_divide
    return make(
        plan, "deepspeed", support, "json", json.dumps(document, indent=2), document, *extra
    )


def megatron(plan: PrecisionPlan) -> Export:
    """Arguments for Megatron-LM's training scripts."""
    support = Support(
        "Megatron-LM",
        formats=("fp16", "bf16", "fp8_e4m3"),
        settings=_WINDOW,
        levels=("O0", "O2"),
        reduction=True,
    )
    chosen, scaling, scale = format_of(plan, support), scaling_of(plan), plan.loss_scale
    words: list[str] = []
    extra = []
    if chosen == "fp8_e4m3":
        words += ["--bf16", "--fp8-format e4m3"]
        extra.append("FP8 needs Transformer Engine, which scales its tensors; the rest is BF16.")
    elif chosen != "fp32":
        words.append(f"--{chosen}")
    if chosen == "fp16" and scaling.kind == "dynamic":
        words += [
            f"--initial-loss-scale {number(scaling.scale)}",
            f"--min-loss-scale {number(scale.min_scale)}",
            f"--loss-scale-window {scale.growth_interval}",
            f"--hysteresis {scale.hysteresis}",
        ]
    elif chosen == "fp16":
        words.append(f"--loss-scale {number(scaling.scale)}")
    elif scaling.kind != "none":
        extra.append("Megatron-LM scales no loss outside --fp16.")
    if plan.reduction is not None:
        if plan.reduction.dtype == "fp32" and chosen != "fp32":
            words.append("--accumulate-allreduce-grads-in-fp32")
        if plan.reduction.pre_divide:
            extra.append(
                "the plan divides gradients before they are summed over ranks; not set here."
            )
    settings = {word.split()[0].removeprefix("--"): [*word.split(), True][1] for word in words}
    body = " \\\n".join(words) if words else "# FP32: no argument at all"
    return make(plan, "megatron", support, "shell", body, settings, *extra)
