"""Exports for TensorFlow: Keras and the graph rewrite.

Sources: Keras' documentation of ``mixed_precision`` and ``LossScaleOptimizer``; NVIDIA's of
TensorFlow's automatic mixed precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.exports.export import Export, format_of, make, number, scaling_of
from mpdiag.exports.notes import Support

if TYPE_CHECKING:
    from mpdiag.plan import PrecisionPlan


def keras(plan: PrecisionPlan) -> Export:
    """A global dtype policy and a ``LossScaleOptimizer``."""
    support = Support("Keras", methods=("backoff",), settings=("growth_interval", "checks"))
    scaling = scaling_of(plan)
    policy = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16", "fp32": "float32"}[
        format_of(plan, support)
    ]
    settings: dict[str, Any] = {"policy": policy}
    body = f"import keras\n\nkeras.mixed_precision.set_global_policy({policy!r})\n"
    extra = []
    if scaling.kind != "none":
        steps = plan.loss_scale.growth_interval
        if scaling.kind == "constant":
            steps = 2**31 - 1  # it never grows; an overflow still halves it
        settings |= {"initial_scale": float(scaling.scale), "dynamic_growth_steps": steps}
        body += f"""optimizer = keras.optimizers.LossScaleOptimizer(
    optimizer, initial_scale={number(scaling.scale)}, dynamic_growth_steps={steps}
)
"""
    elif policy == "mixed_float16":
        extra.append(
            "under mixed_float16 compile() adds a dynamic scale by itself; the plan asks for none: "
            "compile(…, auto_scale_loss=False)."
        )
    return make(plan, "keras", support, "python", body, settings, *extra)


def tensorflow(plan: PrecisionPlan) -> Export:
    """The environment variable of the graph rewrite, and the optimizer it belongs to."""
    support = Support(
        "TensorFlow", formats=("fp16",), settings=("growth_interval", "growth_factor", "checks")
    )
    chosen, scaling = format_of(plan, support), scaling_of(plan)
    settings: dict[str, Any] = {"TF_ENABLE_AUTO_MIXED_PRECISION": int(chosen != "fp32")}
    extra = []
    body = f"""
import os

os.environ["TF_ENABLE_AUTO_MIXED_PRECISION"] = "{int(chosen != "fp32")}"

import tensorflow as tf
"""
    if chosen != "fp32":
        if scaling.kind == "dynamic":
            scale = plan.loss_scale
            settings["loss_scale"] = {
                "initial_loss_scale": float(scaling.scale),
                "increment_period": scale.growth_interval,
                "multiplier": scale.growth_factor,
            }
            chosen_scale = (
                "tf.compat.v1.mixed_precision.DynamicLossScale(\n"
                f"    initial_loss_scale={number(scaling.scale)}, "
                f"increment_period={scale.growth_interval}, multiplier={scale.growth_factor!r}\n)"
            )
            if scale.backoff_factor * scale.growth_factor != 1:
                extra.append("TensorFlow backs off by 1/multiplier.")
        else:
            settings["loss_scale"] = scaling.scale
            chosen_scale = number(scaling.scale)
        body += f"""
loss_scale = {chosen_scale}
optimizer = tf.compat.v1.mixed_precision.enable_mixed_precision_graph_rewrite(
    optimizer, loss_scale=loss_scale
)
"""
        extra.append(
            "the variable alone turns the rewrite and a dynamic scale on in NVIDIA's builds; the call "
            "gives it the plan's scale, in TensorFlow's own builds, too. Use it for graphs, not for "
            "Keras (mpdiag export --to keras)."
        )
    return make(plan, "tensorflow", support, "python", body, settings, *extra)
