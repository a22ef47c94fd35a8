"""Exports: what runs is run, what another library reads is read by it, and nothing is dropped."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
from dataclasses import replace

import pytest
import torch
from support import backoff, batch, constant, network

from mpdiag.errors import UsageError
from mpdiag.exports.notes import modules_in_fp32
from mpdiag.exports.registry import EXPORTERS, export_plan
from mpdiag.plan import (
    Fp32Choice,
    LayerFormat,
    LossScalePlan,
    PrecisionPlan,
    ReductionPlan,
    ShapeAdvice,
    Verdict,
)

HALF_ONLY = {
    "tensorflow", "openseq2seq", "mxnet", "chainer", "theano", "cntk", "torch7", "caffe2", "nvcaffe",
}  # fmt: skip


def lognormal(scale: float = 256.0) -> PrecisionPlan:
    return PrecisionPlan(
        loss_scale=LossScalePlan(method="lognormal", init_scale=scale, recommended=scale)
    )


FULL = PrecisionPlan(
    run="ssd\n'quoted'",
    verdict=Verdict(text="Expected: this trains in FP16 with a loss scale of 64."),
    loss_scale=LossScalePlan(
        method="backoff",
        recommended=64.0,
        init_scale=128.0,
        growth_factor=4.0,
        backoff_factor=0.25,
        growth_interval=321,
        hysteresis=3,
        min_scale=2.0,
        max_scale=4096.0,
    ),
    fp32_modules=(Fp32Choice("", "4"),),
    fp32_operations=(Fp32Choice("gelu", "2"), Fp32Choice("LayerNorm", "norm")),
    reduction=ReductionPlan("fp16", pre_divide=True),
    shapes=(ShapeAdvice("head", "N", 33, 40),),
    layer_formats=(LayerFormat("2", "activation", "fp8_e4m3"),),
)


# -- every framework -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPORTERS)
@pytest.mark.parametrize(
    "plan", [PrecisionPlan(), constant(8.0), backoff(1024.0), lognormal(), FULL], ids=range(5)
)
def test_every_text_is_of_its_language(name, plan):
    export = export_plan(plan, name)
    assert export.framework == name
    assert export.text.endswith("\n")
    if export.language == "python":
        ast.parse(export.text)
    elif export.language == "json":
        assert json.loads(export.text) == export.settings
    elif export.language == "shell":
        subprocess.run(["bash", "-n"], input=export.text, text=True, check=True)
    json.dumps(export.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", EXPORTERS)
def test_nothing_is_dropped(name):
    """Each number of the plan stands in the settings or in a note."""
    export = export_plan(FULL, name)
    said = json.dumps([export.settings, export.notes])
    dynamic = {
        "growth_factor": ("4", "1/multiplier"), "backoff_factor": ("0.25", "1/multiplier"),
        "growth_interval": ("321",), "hysteresis": ("3",), "min_scale": ("2",), "max_scale": ("4096",),
    }  # fmt: skip
    if "stays at the recommended 64" in said:
        assert "loss_scale" in said or "grad_scale" in said
    else:
        assert all(any(word in said for word in words) for words in dynamic.values())
        assert "128" in said or "initial_scale_power" in said
    assert '"2"' in said or " 2" in said  # the module that holds the gelu
    assert "pad N of head from 33 to 40" in said
    assert "FP8" in said
    if name not in ("deepspeed", "megatron"):
        assert "FP16 after division by the number of ranks" in said
    if export.language != "json":
        flat = " ".join(line.lstrip("#- ") for line in export.text.splitlines())
        assert all(" ".join(note.split())[:60] in " ".join(flat.split()) for note in export.notes)


@pytest.mark.parametrize("name", EXPORTERS)
def test_bf16_is_written_or_refused(name):
    plan = PrecisionPlan(target="bf16")
    if name in HALF_ONLY:
        with pytest.raises(UsageError, match="cannot train in BF16: analyze with --target fp16"):
            export_plan(plan, name)
    else:
        assert "bf16" in json.dumps(export_plan(plan, name).settings).replace("bfloat16", "bf16")


@pytest.mark.parametrize("name", EXPORTERS)
def test_fp8_falls_back_aloud(name):
    export = export_plan(replace(backoff(), target="fp8_e4m3"), name)
    assert any("FP8" in note for note in export.notes)


def test_an_unknown_framework_lists_the_known():
    with pytest.raises(
        UsageError, match=r"did you mean megatron\?.*choose one of torch, lightning"
    ):
        export_plan(PrecisionPlan(), "megatorn")


def test_a_line_break_in_a_name_does_not_leave_the_comment():
    plan = replace(FULL, fp32_modules=(Fp32Choice("", "a\nimport os"),))
    for name in EXPORTERS:
        lines = export_plan(plan, name).text.splitlines()
        assert "import os" not in lines or name == "tensorflow"


# -- torch: the snippet runs -----------------------------------------------------------------------


def run_snippet(plan, steps=3, model=None, batches=None):
    model = network() if model is None else model
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.05),
        "loader": [batch(i) for i in range(steps)] if batches is None else batches,
        "loss_fn": torch.nn.functional.cross_entropy,
    }
    exec(compile(export_plan(plan, "torch").text, "snippet", "exec"), names)
    return names


def test_torch_with_bf16_computes_what_a_loop_by_hand_does():
    ran = run_snippet(PrecisionPlan(target="bf16"))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in [batch(i) for i in range(3)]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    for mine, other in zip(ran["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_torch_carries_the_scaler_settings():
    scaler = run_snippet(FULL)["scaler"]
    assert scaler.get_scale() == 128.0
    assert scaler.get_growth_factor() == 4.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 321


def test_torch_keeps_modules_in_fp32():
    model, seen = network(), {}
    for name in ("0", "4"):
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: output.dtype})
        )
    plan = replace(backoff(), fp32_modules=(Fp32Choice("", "4"),))
    run_snippet(plan, steps=1, model=model)
    assert seen == {"0": torch.float16, "4": torch.float32}


def test_a_constant_scale_survives_an_overflow():
    model = network()
    before = [p.clone() for p in model.parameters()]
    x, y = batch()
    ran = run_snippet(constant(512.0), model=model, batches=[(x * float("inf"), y)] * 3)
    assert ran["scaler"].get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("scale", [1.0, 8.0, 3.0, 2.0**24, 1e-3])
def test_backing_off_a_constant_scale_rounds_to_itself(scale):
    scaler = torch.amp.GradScaler(
        "cpu", **export_plan(constant(scale), "torch").settings["grad_scaler"]
    )
    exact = torch.tensor(scale, dtype=torch.float32)
    scaler.scale(torch.ones(1))
    found = torch.ones(1)
    torch._amp_update_scale_(
        scaler._scale, scaler._growth_tracker, found, 2.0, scaler.get_backoff_factor(), 2**31 - 1
    )
    assert scaler._scale.item() == exact.item()


def test_no_scale_is_a_disabled_scaler():
    assert export_plan(PrecisionPlan(), "torch").settings["grad_scaler"] == {"enabled": False}
    assert not run_snippet(PrecisionPlan(), steps=1)["scaler"].is_enabled()


def test_what_autocast_sees_to_needs_no_module_of_its_own():
    plan = PrecisionPlan(
        fp32_operations=(
            Fp32Choice("Softmax", "a"),
            Fp32Choice("BatchNorm2d", "b"),
            Fp32Choice("CrossEntropyLoss", "c"),
            Fp32Choice("Linear", "d"),
        )
    )
    assert modules_in_fp32(plan) == ["d"]


# -- read by the real libraries --------------------------------------------------------------------


def test_huggingface_arguments_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    known = inspect.signature(transformers.TrainingArguments).parameters
    settings = dict(export_plan(FULL, "huggingface").settings)
    torch.amp.GradScaler("cpu", **settings.pop("grad_scaler"))
    assert set(settings) <= set(known)
    names = {}
    text = export_plan(PrecisionPlan(target="bf16"), "huggingface").text
    exec(text.replace('"output"', repr(str(tmp_path)) + ", use_cpu=True"), names)
    assert names["training_arguments"].bf16


def test_accelerate_takes_the_scaler():
    utilities = pytest.importorskip("accelerate.utils")
    settings = export_plan(FULL, "accelerate").settings
    handler = utilities.GradScalerKwargs(**settings["grad_scaler"])
    assert handler.init_scale == 128.0
    assert settings["mixed_precision"] in ("no", "fp16", "bf16", "fp8")
    utilities.GradScalerKwargs(**export_plan(PrecisionPlan(), "accelerate").settings["grad_scaler"])


def test_lightning_takes_the_plugin():
    plugins = pytest.importorskip("lightning.pytorch.plugins")
    names = {}
    exec(export_plan(FULL, "lightning").text.replace('"cuda"', '"cpu"'), names)
    plugin = names["trainer"].precision_plugin
    assert isinstance(plugin, plugins.MixedPrecision)
    assert plugin.scaler.get_scale() == 128.0


def test_deepspeed():
    """Names and meaning as in DeepSpeed 0.19's DeepSpeedFP16Config."""
    assert export_plan(FULL, "deepspeed").settings == {
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 7,
            "loss_scale_window": 321,
            "hysteresis": 3,
            "min_loss_scale": 2.0,
        },
        "communication_data_type": "fp16",
        "prescale_gradients": True,
    }
    static = export_plan(constant(8.0), "deepspeed").settings
    assert static == {"fp16": {"enabled": True, "loss_scale": 8.0}}
    assert export_plan(PrecisionPlan(target="bf16"), "deepspeed").settings == {
        "bf16": {"enabled": True}
    }
    assert export_plan(replace(FULL, level="O0", reduction=None), "deepspeed").settings == {}


CONSECUTIVE = replace(
    FULL, loss_scale=replace(FULL.loss_scale, settings={"consecutive_hysteresis": True})
)


def test_a_setting_that_deepspeed_alone_has():
    assert export_plan(CONSECUTIVE, "deepspeed").settings["fp16"]["consecutive_hysteresis"] is True
    assert "consecutive" not in export_plan(CONSECUTIVE, "deepspeed").text.partition("{")[0]
    told = export_plan(CONSECUTIVE, "megatron").text
    assert "consecutive_hysteresis is True in the plan; it cannot be set here" in told


def test_deepspeed_reads_it():
    config = pytest.importorskip("deepspeed.runtime.precision_config")
    read = config.get_float16_config(dict(export_plan(CONSECUTIVE, "deepspeed").settings))
    assert read.consecutive_hysteresis
    assert read.enabled
    assert read.dynamic_loss_scale_args()["init_scale"] == 128


def test_keras_reads_it():
    keras = pytest.importorskip("keras")
    names = {"optimizer": keras.optimizers.SGD(0.1)}
    exec(export_plan(FULL, "keras").text, names)
    assert names["optimizer"].dynamic_growth_steps == 321


# -- the others, as their documents name things ----------------------------------------------------


def test_megatron():
    words = export_plan(FULL, "megatron").text.replace("\\\n", "").split("\n", 1)[-1].split()
    for pair in ("--initial-loss-scale 128.0", "--loss-scale-window 321", "--hysteresis 3"):
        assert pair in " ".join(words)
    assert "--fp16" in words
    assert "--loss-scale 8.0" in export_plan(constant(8.0), "megatron").text


def test_openseq2seq():
    assert export_plan(backoff(), "openseq2seq").settings == {
        "dtype": "mixed",
        "automatic_loss_scaling": "Backoff",
    }
    assert export_plan(lognormal(), "openseq2seq").settings["automatic_loss_scaling"] == "LogMax"
    names = {}
    exec(export_plan(constant(10.0), "openseq2seq").text, names)
    assert names["base_params"] == {"dtype": "mixed", "loss_scale": 10.0}


def test_tensorflow_sets_the_variable_before_the_import():
    text = export_plan(backoff(), "tensorflow").text
    variable = text.index('os.environ["TF_ENABLE_AUTO_MIXED_PRECISION"] = "1"')
    assert variable < text.index("import tensorflow")


def test_mxnet_scales_up_and_down_by_the_same():
    settings = export_plan(constant(128.0), "mxnet").settings
    assert settings["grad_scale"] * settings["rescale_grad"] == 1.0
    assert settings["multi_precision"]


def test_caffe2_divides_rate_and_decay():
    """Run with the weights of an SGD by hand: the division undoes the scale, and decay is kept."""
    text = export_plan(constant(128.0), "caffe2").text
    names = {}
    exec("\n".join(line for line in text.splitlines() if "import" not in line.split()[:3])
         .replace("pFP16Initializer", "object"), names)  # fmt: skip
    rate, decay = names["unscaled"](0.1, 1e-4)
    assert (rate, decay) == (0.1 / 128, 1e-4 / 128)


def test_nvcaffe_names_types_maths_and_solver():
    settings = export_plan(constant(1000.0), "nvcaffe").settings
    assert settings["default_forward_type"] == settings["default_backward_type"] == "FLOAT16"
    assert settings["default_forward_math"] == "FLOAT"
    assert settings["global_grad_scale"] == 1000.0
    pure = export_plan(PrecisionPlan(level="O3"), "nvcaffe").settings
    assert pure["default_forward_math"] == pure["solver_data_type"] == "FLOAT16"


def test_theano_flags():
    text = export_plan(PrecisionPlan(), "theano").text
    assert 'THEANO_FLAGS="floatX=float16,dnn.conv.algo_fwd=time_once' in text


def test_cntk_says_what_the_guide_says():
    assert "no FP16 storage" in " ".join(export_plan(constant(8.0), "cntk").notes)


def test_chainer_and_torch7():
    assert "optimizer.loss_scaling(scale=8.0)" in export_plan(constant(8.0), "chainer").text
    assert "optimizer.loss_scaling(interval=321, scale=None)" in export_plan(FULL, "chainer").text
    assert "local lossScale = 64.0" in export_plan(FULL, "torch7").text


def test_dividing_the_rate_undoes_the_scale_for_momentum_alone():
    """The note on Caffe2 by arithmetic: SGD with momentum follows, decay is weakened by scale²."""
    names, scale = {}, 128.0
    text = export_plan(constant(scale), "caffe2").text
    exec(text[text.index("LOSS_SCALE = ") : text.index("arguments")], names)
    exec(text[text.index("def unscaled") :], names)
    rate, decay = names["unscaled"](0.1, 0.01)

    def train(rate, decay, scale):
        w, velocity = 1.0, 0.0
        for _ in range(20):
            velocity = 0.9 * velocity + scale * w + decay * w
            w -= rate * velocity
        return w

    assert train(rate, 0.0, scale) == pytest.approx(train(0.1, 0.0, 1.0), rel=1e-12)
    assert train(rate, decay, scale) == pytest.approx(train(0.1, 0.01 / scale**2, 1.0), rel=1e-12)


# -- names -----------------------------------------------------------------------------------------

CONTROLS = "\x1b]0;title\x07\x1b[2J\x9b1m\u202egnp.exe\x00"


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_export_commands_no_terminal(name):
    plan = PrecisionPlan(
        run=CONTROLS,
        verdict=Verdict(text=CONTROLS),
        fp32_modules=(Fp32Choice("", CONTROLS),),
    )
    for level in ("O1", "O2"):
        text = export_plan(replace(plan, level=level), name).text
        odd = {c for c in text if not c.isprintable()} - {"\n"}
        assert odd == set(), odd
