"""Exports for NVCaffe and Caffe2.

Sources: NVIDIA, *Training with Mixed Precision User Guide* (sections on NVCaffe and Caffe2);
NVCaffe's ``caffe.proto`` for ``global_grad_scale`` and the types of a single layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.exports.export import Export, constant_scale, format_of, make, number, one_line
from mpdiag.exports.notes import Able, modules_in_fp32

if TYPE_CHECKING:
    from mpdiag.plan import PrecisionPlan


def nvcaffe(plan: PrecisionPlan) -> Export:
    """Lines for the net's and the solver's prototxt.

    FP16 storage, FP32 arithmetic and FP32 solver data are level O2: the solver holds the masters.
    """
    able = Able(
        "NVCaffe",
        formats=("fp16",),
        methods=("constant",),
        levels=("O0", "O2", "O3"),
        fp32_modules=True,
    )
    chosen, scale = format_of(plan, able), constant_scale(plan)
    storage = "FLOAT16" if chosen == "fp16" else "FLOAT"
    solver = "FLOAT16" if plan.level == "O3" else "FLOAT"
    settings: dict[str, Any] = {
        "default_forward_type": storage,
        "default_backward_type": storage,
        "default_forward_math": solver,
        "default_backward_math": solver,
        "solver_data_type": solver,
    }
    if scale != 1.0:
        settings["global_grad_scale"] = scale
    rows = "\n".join(
        f"{key}: {number(value) if isinstance(value, float) else value}"
        for key, value in settings.items()
        if key != "solver_data_type"
    )
    names = modules_in_fp32(plan) if chosen == "fp16" else []
    layers = "".join(
        f"\n# in the layer of {one_line(name) or 'the whole model'}:\n"
        "#   forward_type: FLOAT\n#   backward_type: FLOAT\n"
        for name in names
    )
    body = f"""
# train_val.prototxt, at its top
{rows}
{layers}
# solver.prototxt
solver_data_type: {solver}
"""
    settings["fp32_layers"] = names
    return make(plan, "nvcaffe", able, "prototxt", body, settings)


def caffe2(plan: PrecisionPlan) -> Export:
    """Code for a Caffe2 training script.

    The gradients stay scaled: what applies them is divided instead, the learning rate and the
    weight decay, each by the scale.
    """
    able = Able("Caffe2", formats=("fp16",), methods=("constant",), levels=("O0", "O2"))
    chosen, scale = format_of(plan, able), constant_scale(plan)
    half = chosen == "fp16"
    settings: dict[str, Any] = {
        "dtype": "float16" if half else "float",
        "enable_tensor_core": half,
        "loss_scale": scale,
        "base_learning_rate_divided_by": scale,
        "weight_decay_divided_by": scale,
    }
    initializer = "pFP16Initializer" if half else "Initializer"
    cast = (
        """
    # back to FP32 before the softmax
    logits = model.net.HalfToFloat(logits, "logits_fp32")
"""
        if half
        else ""
    )
    flag = " --enable-tensor-core" if half else ""
    body = f"""
from caffe2.python import model_helper
from caffe2.python.modeling.initializers import {initializer}

LOSS_SCALE = {number(scale)}

arguments = {{
    "enable_tensor_core": {half},
    # for brew.conv and brew.fc: FP16 parameters with an FP32 copy that the optimizer updates
    "WeightInitializer": {initializer},
    "BiasInitializer": {initializer},
}}
# resnet50_trainer.py takes the same as: --dtype {settings["dtype"]}{flag}


def scaled_loss(model, logits, label):{cast}
    softmax, loss = model.net.SoftmaxWithLoss([logits, label], ["softmax", "loss"])
    return [model.net.Scale(loss, scale=LOSS_SCALE)]


def unscaled(base_learning_rate, weight_decay):
    \"\"\"What the optimizer is given: gradients carry the scale, so these are divided by it.\"\"\"
    return base_learning_rate / LOSS_SCALE, weight_decay / LOSS_SCALE
"""
    extra = []
    if scale != 1.0:
        extra.append(
            "dividing the learning rate suits optimizers that are linear in the gradient, such as SGD "
            "with momentum; Adam and its kin hardly notice the scale, and must keep their rate."
        )
        extra.append(
            "the weight decay is divided by the scale, too, as NVIDIA's guide asks; where the decay "
            "times the weight is added to the scaled gradient, this weakens it by the scale squared, "
            "and multiplying it by the scale would keep it."
        )
    return make(plan, "caffe2", able, "python", body, settings, *extra)
