"""Exports for TensorFlow and what stands on it: Keras, the graph rewrite, OpenSeq2Seq.

Sources: Keras' documentation of ``mixed_precision`` and ``LossScaleOptimizer``; NVIDIA's of
TensorFlow's automatic mixed precision; OpenSeq2Seq, *Mixed Precision Training*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.exports.export import Export, constant_scale, format_of, make, number, scaling_of
from mpdiag.exports.notes import Able

if TYPE_CHECKING:
    from mpdiag.plan import PrecisionPlan


def keras(plan: PrecisionPlan) -> Export:
    """A global dtype policy and a ``LossScaleOptimizer``."""
    able = Able("Keras", methods=("backoff",), settings=("growth_interval", "checks"))
    scaling = scaling_of(plan)
    policy = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16", "fp32": "float32"}[
        format_of(plan, able)
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
    return make(plan, "keras", able, "python", body, settings, *extra)


def tensorflow(plan: PrecisionPlan) -> Export:
    """The environment variable of the graph rewrite, and the optimizer it belongs to."""
    able = Able(
        "TensorFlow", formats=("fp16",), settings=("growth_interval", "growth_factor", "checks")
    )
    chosen, scaling = format_of(plan, able), scaling_of(plan)
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
    return make(plan, "tensorflow", able, "python", body, settings, *extra)


def openseq2seq(plan: PrecisionPlan) -> Export:
    """``base_params`` of an OpenSeq2Seq configuration; LogNormal is called LogMax there.

    Its wrapper holds FP16 weights with FP32 masters, which is level O2.
    """
    able = Able(
        "OpenSeq2Seq",
        formats=("fp16",),
        methods=("constant", "backoff", "lognormal"),
        levels=("O0", "O2"),
    )
    chosen, scaling = format_of(plan, able), scaling_of(plan)
    settings: dict[str, Any] = {"dtype": "mixed" if chosen == "fp16" else "tf.float32"}
    extra = []
    if chosen == "fp16" and scaling.kind == "dynamic":
        name = "LogMax" if plan.loss_scale.method == "lognormal" else "Backoff"
        settings["automatic_loss_scaling"] = name
        extra.append(
            f"{name} begins where OpenSeq2Seq chooses: the plan's {scaling.scale:g} is not set."
        )
    elif chosen == "fp16" and scaling.kind == "constant":
        settings["loss_scale"] = constant_scale(plan)
    if plan.loss_scale.method == "lognormal":
        extra.append("LogMax takes 65536 for a logarithm after an overflow and recovers late.")
    rows = "".join(
        f'    "{key}": {value if value == "tf.float32" else _literal(value)},\n'
        for key, value in settings.items()
    )
    body = "import tensorflow as tf\n\n" if chosen == "fp32" else ""
    body += f"base_params = {{\n    # … what your model has there\n{rows}}}\n"
    return make(plan, "openseq2seq", able, "python", body, settings, *extra)


def _literal(value: Any) -> str:
    return number(value) if isinstance(value, float) else f'"{value}"'
