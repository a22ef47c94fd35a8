"""Exports for MXNet, Theano, CNTK, Chainer and Torch7.

Sources: NVIDIA, *Training with Mixed Precision User Guide* (sections on MXNet, Theano and the
Cognitive Toolkit); Chainer's documentation of ``mixed16`` and of its optimizers; cutorch's of
``torch.CudaHalfTensor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.exports.export import Export, constant_scale, format_of, make, number, scaling_of
from mpdiag.exports.notes import Able

if TYPE_CHECKING:
    from mpdiag.plan import PrecisionPlan


def mxnet(plan: PrecisionPlan) -> Export:
    """FP16 data, ``grad_scale`` on the loss, ``rescale_grad`` and masters in the optimizer."""
    able = Able("MXNet", formats=("fp16",), methods=("constant",), levels=("O0", "O2"))
    chosen, scale = format_of(plan, able), constant_scale(plan)
    half = chosen == "fp16"
    settings: dict[str, Any] = {
        "dtype": "float16" if half else "float32",
        "grad_scale": scale,
        "rescale_grad": 1.0 / scale,
        "multi_precision": half,
    }
    body = f"""
import mxnet
import numpy

DTYPE = numpy.{settings["dtype"]}
LOSS_SCALE = {number(scale)}


def network(data, label, body):
    output = body(mxnet.sym.Cast(data=data, dtype=DTYPE))
    output = mxnet.sym.Cast(data=output, dtype=numpy.float32)  # before the softmax
    return mxnet.sym.SoftmaxOutput(output, label, grad_scale=LOSS_SCALE)


def optimizer(batch_size, **settings):
    return mxnet.optimizer.SGD(
        multi_precision={half}, rescale_grad=1.0 / (LOSS_SCALE * batch_size), **settings
    )
"""
    extra = ["rescale_grad also divides by the batch, as Module.fit does when it is not given."]
    return make(plan, "mxnet", able, "python", body, settings, *extra)


def theano(plan: PrecisionPlan) -> Export:
    """``floatX`` and the cuDNN algorithms that reach Tensor Cores, as an environment variable."""
    able = Able("Theano", formats=("fp16",), methods=("constant",), levels=("O0", "O3"))
    chosen, scale = format_of(plan, able), constant_scale(plan)
    settings: dict[str, Any] = {"floatX": "float16" if chosen == "fp16" else "float32"}
    if chosen == "fp16":
        settings |= {
            f"dnn.conv.algo_{way}": "time_once" for way in ("fwd", "bwd_filter", "bwd_data")
        }
    flags = ",".join(f"{key}={value}" for key, value in settings.items())
    body = f'export THEANO_FLAGS="{flags}"\n'
    extra = []
    if scale != 1.0:
        settings["loss_scale"] = scale
        extra.append(
            f"Theano has no setting for a loss scale: take theano.grad of {number(scale)} * loss, and "
            f"divide the gradients by {number(scale)} in FP32 before the update."
        )
    if chosen == "fp16" and plan.master_weights.needed:
        extra.append(
            "floatX=float16 holds FP16 weights; keep FP32 shared variables as their masters."
        )
    return make(plan, "theano", able, "shell", body, settings, *extra)


def cntk(plan: PrecisionPlan) -> Export:
    """The default dtype; the guide knows no FP16 training in CNTK."""
    able = Able("CNTK", formats=("fp16",), methods=("constant",), levels=("O0", "O2"))
    chosen, scale = format_of(plan, able), constant_scale(plan)
    settings: dict[str, Any] = {"dtype": "float16" if chosen == "fp16" else "float32"}
    body = f"""
import cntk
import numpy

with cntk.default_options(dtype=numpy.{settings["dtype"]}):
    model = make_model(cntk.cast(features, numpy.{settings["dtype"]}))
output = cntk.cast(model, numpy.float32)  # the loss in FP32
"""
    extra = []
    if chosen == "fp16":
        extra.append(
            "NVIDIA's guide says of CNTK that it supports no FP16 storage and so uses no Tensor Cores; "
            "float16 came with CNTK 2.4. With an older one, train in FP32."
        )
    if scale != 1.0:
        settings["loss_scale"] = scale
        body += f"""
LOSS_SCALE = {number(scale)}
loss = LOSS_SCALE * cntk.cross_entropy_with_softmax(output, label)


def unscaled(learning_rate, l2_regularization_weight):
    return learning_rate / LOSS_SCALE, l2_regularization_weight / LOSS_SCALE
"""
        extra.append(
            "CNTK's learners have no setting for a loss scale: the learning rate is divided by it, "
            "which suits SGD and momentum, not Adam."
        )
    return make(plan, "cntk", able, "python", body, settings, *extra)


def chainer(plan: PrecisionPlan) -> Export:
    """``mixed16``, FP32 updates, and the optimizer's own loss scaling."""
    able = Able("Chainer", formats=("fp16",), levels=("O0", "O2"), settings=("growth_interval",))
    chosen, scaling = format_of(plan, able), scaling_of(plan)
    half = chosen == "fp16"
    settings: dict[str, Any] = {"dtype": "mixed16" if half else "float32", "use_fp32_update": half}
    kind = "chainer.mixed16" if half else "numpy.float32"
    body = "import chainer\n" + ("" if half else "import numpy\n")
    body += f"\nchainer.global_config.dtype = {kind}\n\n# once the optimizer is made\n"
    if half:
        body += "optimizer.use_fp32_update()\n"
    extra = []
    if half and scaling.kind == "dynamic":
        interval = plan.loss_scale.growth_interval
        settings["loss_scaling"] = {"interval": interval, "scale": None}
        body += f"optimizer.loss_scaling(interval={interval}, scale=None)\n"
        extra.append(
            f"a dynamic scale begins where Chainer chooses: the plan's {scaling.scale:g} is not set."
        )
    elif half and scaling.kind == "constant":
        settings["loss_scaling"] = {"scale": scaling.scale}
        body += f"optimizer.loss_scaling(scale={number(scaling.scale)})\n"
    if half:
        extra.append(
            "NVIDIA's guide says of Chainer that it runs on Volta without its Tensor Cores."
        )
    return make(plan, "chainer", able, "python", body, settings, *extra)


def torch7(plan: PrecisionPlan) -> Export:
    """A Lua fragment: an FP16 network, FP32 masters, and the scale by hand."""
    able = Able("Torch7", formats=("fp16",), methods=("constant",), levels=("O0", "O2"))
    chosen, scale = format_of(plan, able), constant_scale(plan)
    tensor = "CudaHalfTensor" if chosen == "fp16" else "CudaTensor"
    settings: dict[str, Any] = {"type": f"torch.{tensor}", "loss_scale": scale}
    body = f"""
require 'cutorch'
local lossScale = {number(scale)}

model = model:type('torch.{tensor}')
local parameters, gradients = model:getParameters()
local masters = parameters:type('torch.CudaTensor'):clone()

-- feval of optim.sgd and its kin, which is given the masters
local function feval(x)
  parameters:copy(x)
  gradients:zero()
  local output = model:forward(input:type('torch.{tensor}')):type('torch.CudaTensor')
  local loss = criterion:forward(output, target)
  local gradOutput = criterion:backward(output, target):mul(lossScale)
  model:backward(input:type('torch.{tensor}'), gradOutput:type('torch.{tensor}'))
  return loss, gradients:type('torch.CudaTensor'):div(lossScale)
end

optim.sgd(feval, masters, settings)
"""
    extra = []
    if chosen == "fp16":
        extra.append("NVIDIA's guide says of Torch that it runs on Volta without its Tensor Cores.")
    return make(plan, "torch7", able, "lua", body, settings, *extra)
