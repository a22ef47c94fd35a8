"""Exports: what runs is run, what another library reads is read by it, and nothing is dropped.

The whole of each export of one plan, with its settings, lies in ``tests/data/exports``;
``python tests/exports/test_exports.py`` writes it again.
"""

import ast
import inspect
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import backoff, batch, constant, network

from mpdiag.errors import UsageError
from mpdiag.exports.registry import BLOCK_ENGINES, EXPORTERS, export_plan, modules_in_fp32
from mpdiag.numerics.block_recipes import BLOCK_RECIPES
from mpdiag.plan import (
    BlockLayer,
    BlockPlan,
    Fp32Choice,
    LossScalePlan,
    PrecisionPlan,
    Verdict,
)

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "exports"
BF16 = (
    "torch",
    "lightning",
    "huggingface",
    "accelerate",
    "deepspeed",
    "megatron",
    "keras",
    "fsdp2",
)
FRAMEWORKS = [name for name in EXPORTERS if name not in BLOCK_ENGINES]
CONTROLS = "a\nimport os\x1b]0;title\x07\x1b[2J\x9b1m\u202egnp.exe\x00"


FULL = PrecisionPlan.load(GOLDEN / "plan.json")
HOSTILE = PrecisionPlan(
    run=CONTROLS, verdict=Verdict(text=CONTROLS), fp32_modules=(Fp32Choice("", CONTROLS),)
)
LOGNORMAL = PrecisionPlan(
    loss_scale=LossScalePlan(method="lognormal", init_scale=256.0, recommended=256.0)
)
PLANS = (PrecisionPlan(), constant(8.0), backoff(1024.0), LOGNORMAL, FULL)


def in_blocks(target: str) -> PrecisionPlan:
    """The full plan in a block format: a layer of each kind that exports tell apart."""
    layers = (
        BlockLayer("layers.1.w1", "weight", "linear", target, target, target),
        BlockLayer("layers.11.w1", "weight", "linear", target, target, "bf16"),
        BlockLayer("layers.11.w2", "weight", "linear", "bf16", target, "bf16"),
        BlockLayer("layers.1.experts", "w1", "grouped", target, target, target),
        BlockLayer("layers.1.router", "weight", "linear", "bf16", "bf16", "bf16"),
        BlockLayer("out", "weight", "linear", "bf16", "bf16", "bf16"),
        BlockLayer(
            *("layers.1.out", "weight", "linear", target, target, target),
            evidence={"tokens_padded": 64},
        ),
    )
    formats = BLOCK_RECIPES[target].formats()
    return replace(FULL, target="bf16", blocks=BlockPlan(target, formats, layers))


def document(name: str) -> str:
    """An export of the full plan, its settings with two other scales, and its notes on them."""
    if name in BLOCK_ENGINES:
        held = [t for t, recipe in BLOCK_RECIPES.items() if name in recipe.engines]
        return "\n".join(export_plan(in_blocks(target), name).text for target in held)
    rest = [export_plan(plan, name) for plan in (PrecisionPlan(), constant(8.0))]
    own = [json.dumps([export.settings, export.notes], indent=1) for export in rest]
    settings = json.dumps(export_plan(FULL, name).settings, indent=1)
    return "\n".join([export_plan(FULL, name).text, settings, *own]) + "\n"


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_export_is_what_it_was(name):
    assert document(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("plan", [*PLANS, HOSTILE], ids=range(6))
def test_every_text_is_of_its_language_and_commands_no_terminal(name, plan, level):
    export = export_plan(replace(plan, level=level), name)
    assert export.framework == name
    assert export.text.endswith("\n")
    if export.language == "python":
        ast.parse(export.text)
    elif export.language == "json":
        assert json.loads(export.text) == export.settings
    elif export.language == "shell":
        subprocess.run(["bash", "-n"], input=export.text, text=True, check=True)
    json.dumps(export.to_json(), allow_nan=False)
    assert all(c.isprintable() or c == "\n" for c in export.text)
    assert "import os" not in export.text.splitlines() or name == "tensorflow"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_other_formats_are_written_or_refused(name):
    plan = PrecisionPlan(target="bf16")
    if name in BF16:
        assert "bf16" in json.dumps(export_plan(plan, name).settings).replace("bfloat16", "bf16")
    else:
        with pytest.raises(UsageError, match="cannot train in BF16: analyze with --target fp16"):
            export_plan(plan, name)
    export = export_plan(replace(backoff(), target="fp8_e4m3"), name)
    assert any("FP8" in note for note in export.notes)


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
    assert not run_snippet(PrecisionPlan(), steps=1)["scaler"].is_enabled()


def test_torch_carries_the_scaler_settings_and_keeps_modules_in_fp32():
    model, seen = network(), {}
    for name in ("0", "4"):
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: output.dtype})
        )
    scaler = run_snippet(replace(FULL, fp32_operations=()), steps=1, model=model)["scaler"]
    assert seen == {"0": torch.float16, "4": torch.float32}
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (128.0, 4.0)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 321)


@pytest.mark.parametrize("scale", [1.0, 8.0, 3.0, 2.0**24, 1e-3])
def test_backing_off_a_constant_scale_rounds_to_itself(scale):
    settings = export_plan(constant(scale), "torch").settings["grad_scaler"]
    scaler = torch.amp.GradScaler("cpu", **settings)
    scaler.scale(torch.ones(1))
    found, factor = torch.ones(1), scaler.get_backoff_factor()
    torch._amp_update_scale_(scaler._scale, scaler._growth_tracker, found, 2.0, factor, 2**31 - 1)
    assert scaler._scale.item() == torch.tensor(scale, dtype=torch.float32).item()


def test_what_autocast_sees_to_needs_no_module_of_its_own():
    named = {"Softmax": "a", "BatchNorm2d": "b", "CrossEntropyLoss": "c", "Linear": "d"}
    choices = tuple(Fp32Choice(op, module) for op, module in named.items())
    assert modules_in_fp32(PrecisionPlan(fp32_operations=choices)) == ["d"]


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


def test_deepspeed_and_keras_read_it():
    config = pytest.importorskip("deepspeed.runtime.precision_config")
    read = config.get_float16_config(dict(export_plan(FULL, "deepspeed").settings))
    assert read.consecutive_hysteresis
    assert read.enabled
    assert read.dynamic_loss_scale_args()["init_scale"] == 128
    keras = pytest.importorskip("keras")
    names = {"optimizer": keras.optimizers.SGD(0.1)}
    exec(export_plan(FULL, "keras").text, names)
    assert names["optimizer"].dynamic_growth_steps == 321


def test_dividing_the_rate_undoes_the_scale_for_momentum_alone():
    """The note on Caffe2 by arithmetic: SGD with momentum follows, decay is weakened by scale²."""
    names, scale = {}, 128.0
    text = export_plan(constant(scale), "caffe2").text
    exec(text[text.index("LOSS_SCALE = ") : text.index("arguments")], names)
    exec(text[text.index("def unscaled") :], names)
    rate, decay = names["unscaled"](0.1, 0.01)
    assert (rate, decay) == (0.1 / scale, 0.01 / scale)

    def train(rate, decay, scale):
        w, velocity = 1.0, 0.0
        for _ in range(20):
            velocity = 0.9 * velocity + scale * w + decay * w
            w -= rate * velocity
        return w

    assert train(rate, 0.0, scale) == pytest.approx(train(0.1, 0.0, 1.0), rel=1e-12)
    assert train(rate, decay, scale) == pytest.approx(train(0.1, 0.01 / scale**2, 1.0), rel=1e-12)


if __name__ == "__main__":
    for framework in EXPORTERS:
        (GOLDEN / f"{framework}.txt").write_text(document(framework), encoding="utf-8")
