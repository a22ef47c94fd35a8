"""Exports for frameworks whose development has ended: one table of templates, one function.

A framework is data: what it can hold, the names of its settings, and the text, in parts that stand
there under conditions. Its values are facts of the plan (``$scale``, ``$half`` …) and the
framework's own words for them (``$dtype``).

Sources: NVIDIA, *Training with Mixed Precision User Guide* (sections on MXNet, Theano, the Cognitive
Toolkit, NVCaffe and Caffe2); OpenSeq2Seq, *Mixed Precision Training*; Chainer's documentation of
``mixed16`` and of its optimizers; cutorch's of ``torch.CudaHalfTensor``; NVCaffe's ``caffe.proto`` for
``global_grad_scale`` and the types of a single layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from string import Template
from typing import TYPE_CHECKING, Any

from mpdiag.exports.export import (
    Export,
    TextLanguage,
    constant_scale,
    format_of,
    make,
    number,
    one_line,
    scaling_of,
)
from mpdiag.exports.notes import Support, modules_in_fp32

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpdiag.exports.export import Exporter
    from mpdiag.plan import PrecisionPlan


@dataclass(frozen=True)
class Piece:
    """A piece of a text.

    Attributes:
        text: A template; ``$name`` stands for a fact or a word.
        when: Conditions that must all hold: ``fp16`` or ``fp32``, ``scaled`` (the constant scale is
            not 1), ``dynamic`` or ``constant`` (the plan's scale), ``lognormal``, ``masters`` (they
            are needed), an opt level.
    """

    text: str
    when: str = ""


@dataclass(frozen=True)
class Value:
    """A named value: a setting, or a word of the templates. Of two that apply, the later counts.

    Attributes:
        name: The framework's name for it.
        value: A value, a template, or a mapping of such; ``$name`` alone keeps the fact's type.
        when: As in ``Piece``.
    """

    name: str
    value: Any
    when: str = ""


@dataclass(frozen=True)
class LegacyFramework:
    """A framework whose development has ended.

    Attributes:
        name: The name given to ``--to``.
        support: What it can hold.
        language: What the text is written in.
        settings: The plan's decisions under the framework's own names.
        body: The text.
        words: The framework's words in the templates.
        notes: What else a user must know.
        fp32_module: A template for each module that the plan keeps in FP32, joined in ``$modules``;
            the module's name is ``$module``.
    """

    name: str
    support: Support
    language: TextLanguage
    settings: tuple[Value, ...]
    body: tuple[Piece, ...]
    words: tuple[Value, ...] = ()
    notes: tuple[Piece, ...] = ()
    fp32_module: str = ""


def write(framework: LegacyFramework, plan: PrecisionPlan) -> Export:
    """The plan as the framework's settings.

    Raises:
        UsageError: If the framework cannot train in the plan's format.
    """
    conditions, facts = _conditions(framework, plan), _facts(framework, plan)
    facts |= _values(framework.words, conditions, facts)
    settings = _values(framework.settings, conditions, facts)
    body = "".join(_texts(framework.body, conditions, facts))
    notes = _texts(framework.notes, conditions, facts)
    support, language = framework.support, framework.language
    return make(plan, framework.name, support, language, body, settings, *notes)


def _conditions(framework: LegacyFramework, plan: PrecisionPlan) -> set[str]:
    """What holds, as ``Piece.when`` names it."""
    found = {format_of(plan, framework.support), scaling_of(plan).kind, plan.level}
    if constant_scale(plan) != 1.0:
        found.add("scaled")
    if plan.loss_scale.method == "lognormal":
        found.add("lognormal")
    if plan.master_weights.needed:
        found.add("masters")
    return found


def _facts(framework: LegacyFramework, plan: PrecisionPlan) -> dict[str, Any]:
    """What the templates may use of a plan."""
    half, scale = format_of(plan, framework.support) == "fp16", constant_scale(plan)
    names = modules_in_fp32(plan) if half else []
    each = Template(framework.fp32_module)
    return {
        "half": half,
        "scale": scale,
        "inverse": 1.0 / scale,
        "start": f"{scaling_of(plan).scale:g}",
        "interval": plan.loss_scale.growth_interval,
        "fp32_modules": names,
        "modules": "".join(
            each.substitute(module=one_line(name) or "the whole model") for name in names
        ),
    }


def _values(
    values: Iterable[Value], conditions: set[str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        value.name: _filled(value.value, facts)
        for value in values
        if conditions.issuperset(value.when.split())
    }


def _filled(value: Any, facts: Mapping[str, Any]) -> Any:
    """A value with its templates filled in."""
    if isinstance(value, Mapping):
        return {name: _filled(inner, facts) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    return facts[value[1:]] if value[1:] in facts else _text(value, facts)


def _texts(parts: Iterable[Piece], conditions: set[str], facts: Mapping[str, Any]) -> list[str]:
    return [_text(part.text, facts) for part in parts if conditions.issuperset(part.when.split())]


def _text(template: str, facts: Mapping[str, Any]) -> str:
    shown = {k: number(v) if isinstance(v, float) else v for k, v in facts.items()}
    return Template(template).substitute(shown)


# -- the frameworks --------------------------------------------------------------------------------

_FP16, _CONSTANT = ("fp16",), ("constant",)
_MASTERS = ("O0", "O2")  # FP16 weights with FP32 masters are level O2

OPENSEQ2SEQ = LegacyFramework(  # LogNormal is called LogMax there
    "openseq2seq",
    Support("OpenSeq2Seq", _FP16, ("constant", "backoff", "lognormal"), levels=_MASTERS),
    "python",
    words=(Value("scaler", "Backoff"), Value("scaler", "LogMax", "lognormal")),
    settings=(
        Value("dtype", "tf.float32"),
        Value("dtype", "mixed", "fp16"),
        Value("automatic_loss_scaling", "$scaler", "fp16 dynamic"),
        Value("loss_scale", "$scale", "fp16 constant"),
    ),
    body=(
        Piece("import tensorflow as tf\n\n", "fp32"),
        Piece("base_params = {\n    # … what your model has there\n"),
        Piece('    "dtype": tf.float32,\n', "fp32"),
        Piece('    "dtype": "mixed",\n', "fp16"),
        Piece('    "automatic_loss_scaling": "$scaler",\n', "fp16 dynamic"),
        Piece('    "loss_scale": $scale,\n', "fp16 constant"),
        Piece("}\n"),
    ),
    notes=(
        Piece(
            "$scaler begins where OpenSeq2Seq chooses: the plan's $start is not set.",
            "fp16 dynamic",
        ),
        Piece(
            "LogMax takes 65536 for a logarithm after an overflow and recovers late.", "lognormal"
        ),
    ),
)

MXNET = LegacyFramework(
    "mxnet",
    Support("MXNet", _FP16, _CONSTANT, levels=_MASTERS),
    "python",
    words=(Value("dtype", "float32"), Value("dtype", "float16", "fp16")),
    settings=(
        Value("dtype", "$dtype"),
        Value("grad_scale", "$scale"),
        Value("rescale_grad", "$inverse"),
        Value("multi_precision", "$half"),
    ),
    body=(
        Piece("""
import mxnet
import numpy

DTYPE = numpy.$dtype
LOSS_SCALE = $scale


def network(data, label, body):
    output = body(mxnet.sym.Cast(data=data, dtype=DTYPE))
    output = mxnet.sym.Cast(data=output, dtype=numpy.float32)  # before the softmax
    return mxnet.sym.SoftmaxOutput(output, label, grad_scale=LOSS_SCALE)


def optimizer(batch_size, **settings):
    return mxnet.optimizer.SGD(
        multi_precision=$half, rescale_grad=1.0 / (LOSS_SCALE * batch_size), **settings
    )
"""),
    ),
    notes=(
        Piece("rescale_grad also divides by the batch, as Module.fit does when it is not given."),
    ),
)

CHAINER = LegacyFramework(
    "chainer",
    Support("Chainer", _FP16, settings=("growth_interval",), levels=_MASTERS),
    "python",
    words=(Value("dtype", "numpy.float32"), Value("dtype", "chainer.mixed16", "fp16")),
    settings=(
        Value("dtype", "float32"),
        Value("dtype", "mixed16", "fp16"),
        Value("use_fp32_update", "$half"),
        Value("loss_scaling", {"interval": "$interval", "scale": None}, "fp16 dynamic"),
        Value("loss_scaling", {"scale": "$scale"}, "fp16 constant"),
    ),
    body=(
        Piece("import chainer\n"),
        Piece("import numpy\n", "fp32"),
        Piece("\nchainer.global_config.dtype = $dtype\n\n# once the optimizer is made\n"),
        Piece("optimizer.use_fp32_update()\n", "fp16"),
        Piece("optimizer.loss_scaling(interval=$interval, scale=None)\n", "fp16 dynamic"),
        Piece("optimizer.loss_scaling(scale=$scale)\n", "fp16 constant"),
    ),
    notes=(
        Piece(
            "a dynamic scale begins where Chainer chooses: the plan's $start is not set.",
            "fp16 dynamic",
        ),
        Piece(
            "NVIDIA's guide says of Chainer that it runs on Volta without its Tensor Cores.", "fp16"
        ),
    ),
)

THEANO = LegacyFramework(
    "theano",
    Support("Theano", _FP16, _CONSTANT, levels=("O0", "O3")),
    "shell",
    words=(Value("float", "float32"), Value("float", "float16", "fp16")),
    settings=(
        Value("floatX", "$float"),
        Value("dnn.conv.algo_fwd", "time_once", "fp16"),
        Value("dnn.conv.algo_bwd_filter", "time_once", "fp16"),
        Value("dnn.conv.algo_bwd_data", "time_once", "fp16"),
        Value("loss_scale", "$scale", "scaled"),
    ),
    body=(
        Piece('export THEANO_FLAGS="floatX=$float'),
        Piece(
            ",dnn.conv.algo_fwd=time_once,dnn.conv.algo_bwd_filter=time_once"
            ",dnn.conv.algo_bwd_data=time_once",
            "fp16",
        ),
        Piece('"\n'),
    ),
    notes=(
        Piece(
            "Theano has no setting for a loss scale: take theano.grad of $scale * loss, and divide "
            "the gradients by $scale in FP32 before the update.",
            "scaled",
        ),
        Piece(
            "floatX=float16 holds FP16 weights; keep FP32 shared variables as their masters.",
            "fp16 masters",
        ),
    ),
)

CNTK = LegacyFramework(  # the guide knows no FP16 training in CNTK
    "cntk",
    Support("CNTK", _FP16, _CONSTANT, levels=_MASTERS),
    "python",
    words=(Value("dtype", "float32"), Value("dtype", "float16", "fp16")),
    settings=(Value("dtype", "$dtype"), Value("loss_scale", "$scale", "scaled")),
    body=(
        Piece("""
import cntk
import numpy

with cntk.default_options(dtype=numpy.$dtype):
    model = make_model(cntk.cast(features, numpy.$dtype))
output = cntk.cast(model, numpy.float32)  # the loss in FP32
"""),
        Piece(
            """
LOSS_SCALE = $scale
loss = LOSS_SCALE * cntk.cross_entropy_with_softmax(output, label)


def unscaled(learning_rate, l2_regularization_weight):
    return learning_rate / LOSS_SCALE, l2_regularization_weight / LOSS_SCALE
""",
            "scaled",
        ),
    ),
    notes=(
        Piece(
            "NVIDIA's guide says of CNTK that it supports no FP16 storage and so uses no Tensor "
            "Cores; float16 came with CNTK 2.4. With an older one, train in FP32.",
            "fp16",
        ),
        Piece(
            "CNTK's learners have no setting for a loss scale: the learning rate is divided by it, "
            "which suits SGD and momentum, not Adam.",
            "scaled",
        ),
    ),
)

TORCH7 = LegacyFramework(
    "torch7",
    Support("Torch7", _FP16, _CONSTANT, levels=_MASTERS),
    "lua",
    words=(Value("tensor", "CudaTensor"), Value("tensor", "CudaHalfTensor", "fp16")),
    settings=(Value("type", "torch.$tensor"), Value("loss_scale", "$scale")),
    body=(
        Piece("""
require 'cutorch'
local lossScale = $scale

model = model:type('torch.$tensor')
local parameters, gradients = model:getParameters()
local masters = parameters:type('torch.CudaTensor'):clone()

-- feval of optim.sgd and its kin, which is given the masters
local function feval(x)
  parameters:copy(x)
  gradients:zero()
  local output = model:forward(input:type('torch.$tensor')):type('torch.CudaTensor')
  local loss = criterion:forward(output, target)
  local gradOutput = criterion:backward(output, target):mul(lossScale)
  model:backward(input:type('torch.$tensor'), gradOutput:type('torch.$tensor'))
  return loss, gradients:type('torch.CudaTensor'):div(lossScale)
end

optim.sgd(feval, masters, settings)
"""),
    ),
    notes=(
        Piece(
            "NVIDIA's guide says of Torch that it runs on Volta without its Tensor Cores.", "fp16"
        ),
    ),
)

# The gradients stay scaled: what applies them is divided instead, the learning rate and the weight
# decay, each by the scale.
CAFFE2 = LegacyFramework(
    "caffe2",
    Support("Caffe2", _FP16, _CONSTANT, levels=_MASTERS),
    "python",
    words=(
        Value("dtype", "float"),
        Value("dtype", "float16", "fp16"),
        Value("initializer", "Initializer"),
        Value("initializer", "pFP16Initializer", "fp16"),
        Value("flag", ""),
        Value("flag", " --enable-tensor-core", "fp16"),
    ),
    settings=(
        Value("dtype", "$dtype"),
        Value("enable_tensor_core", "$half"),
        Value("loss_scale", "$scale"),
        Value("base_learning_rate_divided_by", "$scale"),
        Value("weight_decay_divided_by", "$scale"),
    ),
    body=(
        Piece("""
from caffe2.python import model_helper
from caffe2.python.modeling.initializers import $initializer

LOSS_SCALE = $scale

arguments = {
    "enable_tensor_core": $half,
    # for brew.conv and brew.fc: FP16 parameters with an FP32 copy that the optimizer updates
    "WeightInitializer": $initializer,
    "BiasInitializer": $initializer,
}
# resnet50_trainer.py takes the same as: --dtype $dtype$flag


def scaled_loss(model, logits, label):"""),
        Piece(
            """
    # back to FP32 before the softmax
    logits = model.net.HalfToFloat(logits, "logits_fp32")
""",
            "fp16",
        ),
        Piece('''
    softmax, loss = model.net.SoftmaxWithLoss([logits, label], ["softmax", "loss"])
    return [model.net.Scale(loss, scale=LOSS_SCALE)]


def unscaled(base_learning_rate, weight_decay):
    """What the optimizer is given: gradients carry the scale, so these are divided by it."""
    return base_learning_rate / LOSS_SCALE, weight_decay / LOSS_SCALE
'''),
    ),
    notes=(
        Piece(
            "dividing the learning rate suits optimizers that are linear in the gradient, such as "
            "SGD with momentum; Adam and its kin hardly notice the scale, and must keep their rate.",
            "scaled",
        ),
        Piece(
            "the weight decay is divided by the scale, too, as NVIDIA's guide asks; where the decay "
            "times the weight is added to the scaled gradient, this weakens it by the scale squared, "
            "and multiplying it by the scale would keep it.",
            "scaled",
        ),
    ),
)

# FP16 storage, FP32 arithmetic and FP32 solver data are level O2: the solver holds the masters.
NVCAFFE = LegacyFramework(
    "nvcaffe",
    Support("NVCaffe", _FP16, _CONSTANT, fp32_modules=True, levels=("O0", "O2", "O3")),
    "prototxt",
    words=(
        Value("storage", "FLOAT"),
        Value("storage", "FLOAT16", "fp16"),
        Value("solver", "FLOAT"),
        Value("solver", "FLOAT16", "O3"),
    ),
    settings=(
        Value("default_forward_type", "$storage"),
        Value("default_backward_type", "$storage"),
        Value("default_forward_math", "$solver"),
        Value("default_backward_math", "$solver"),
        Value("solver_data_type", "$solver"),
        Value("global_grad_scale", "$scale", "scaled"),
        Value("fp32_layers", "$fp32_modules"),
    ),
    body=(
        Piece("""
# train_val.prototxt, at its top
default_forward_type: $storage
default_backward_type: $storage
default_forward_math: $solver
default_backward_math: $solver
"""),
        Piece("global_grad_scale: $scale\n", "scaled"),
        Piece("""$modules
# solver.prototxt
solver_data_type: $solver
"""),
    ),
    fp32_module="""
# in the layer of $module:
#   forward_type: FLOAT
#   backward_type: FLOAT
""",
)

FRAMEWORKS = (OPENSEQ2SEQ, MXNET, CHAINER, THEANO, CNTK, TORCH7, CAFFE2, NVCAFFE)

EXPORTERS: Mapping[str, Exporter] = {
    framework.name: partial(write, framework) for framework in FRAMEWORKS
}
