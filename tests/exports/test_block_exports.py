"""Exports of block recipes: the libraries that read them convert the planned layers and no other.

torchao runs where it is installed. torchtitan 0.3.0, ModelOpt 0.47 and nvdlfw-inspect 0.2.2 live in an
environment of their own (``pip install --no-deps``); without them their tests are skipped.
"""

import importlib
import json
import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from mpdiag.errors import UsageError
from mpdiag.exports.block_layers import exactly, exclude, include
from mpdiag.exports.registry import BLOCK_ENGINES, EXPORTERS, export_plan
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, OPERANDS, WIDE
from mpdiag.plan import BlockLayer, BlockPlan, Fp32Choice, PrecisionPlan
from mpdiag.training.setup import fingerprint_of

SIZE, LAYERS = 128, 12  # layers 1, 10 and 11: parts of names that contain each other


def linear(bias=False):
    return nn.Linear(SIZE, SIZE, bias=bias)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("w1", "w2", "w3"):
            setattr(self, name, nn.Parameter(torch.randn(2, SIZE, SIZE)))


def gpt():
    def layer():
        return nn.ModuleDict({name: linear(bias=True) for name in ("c_attn", "c_fc", "c_proj")})

    body = nn.ModuleDict({"h": nn.ModuleList(layer() for _ in range(LAYERS))})
    return nn.ModuleDict({"transformer": body, "lm_head": linear(bias=True)})


def llama():
    def layer():
        attention = nn.ModuleDict({n: linear() for n in ("wq", "wk", "wv", "wo")})
        feed_forward = nn.ModuleDict({n: linear() for n in ("w1", "w2", "w3")})
        return nn.ModuleDict({"attention": attention, "feed_forward": feed_forward})

    return nn.ModuleDict(
        {"layers": nn.ModuleList(layer() for _ in range(LAYERS)), "output": linear()}
    )


def moe():
    def layer():
        parts = {"router": linear(), "experts": Experts(), "shared": linear()}
        return nn.ModuleDict(
            {"attention": nn.ModuleDict({"wo": linear()}), "moe": nn.ModuleDict(parts)}
        )

    return nn.ModuleDict(
        {"layers": nn.ModuleList(layer() for _ in range(LAYERS)), "output": linear()}
    )


MODELS = {"gpt": gpt, "llama": llama, "moe": moe}
KEPT = re.compile(r"(h|layers)\.(1|10)\.|layers\.3\.attention|lm_head|^output|router")


def layers_planned(model, target, wide_wgrad=()):
    """A plan's layers for a model: what ``KEPT`` matches stays in BF16."""

    def layer(name, parameter, kind):
        kept = KEPT.search(name) is not None
        wide = OPERANDS if kept else ("wgrad",) if name in wide_wgrad else ()
        products = [WIDE if gemm in wide else target for gemm in OPERANDS]
        return BlockLayer(name, parameter, kind, *products)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield layer(name, "weight", "linear")
        elif isinstance(module, Experts):
            yield from (layer(name, parameter, "grouped") for parameter in ("w1", "w2", "w3"))


def plan_of(model, target, **options) -> PrecisionPlan:
    layers = tuple(layers_planned(model, target, **options))
    blocks = BlockPlan(target, BLOCK_RECIPES[target].formats(), layers)
    return PrecisionPlan(target="bf16", blocks=blocks, model=fingerprint_of(model))


def planned(plan, kind="linear", products=tuple(OPERANDS)):
    name = "{0.module}" if kind == "linear" else "{0.module}.{0.parameter}"
    return {
        name.format(layer)
        for layer in plan.blocks.layers
        if layer.kind == kind and layer.quantised == products
    }


def some_planned(model, target):
    return sorted(planned(plan_of(model, target)))[:2]


def linears(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def run_text(export, **names):
    """Run an export as the file that it is."""
    exec(compile(export.text, "export.py", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        *((shape, target) for shape in MODELS for target in ("mxfp8", "nvfp4", "fp8-row")),
        ("gpt", "fp8-tensor"),
        ("moe", "fp8-block"),
        ("gpt", "fp8-block"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_torchao_converts_the_planned_layers(shape, target, monkeypatch):
    pytest.importorskip("torchao")
    blocks = importlib.import_module("torchao.prototype.blockwise_fp8_training.linear")
    monkeypatch.setattr(blocks, "is_sm_at_least_90", lambda: True)  # as on a GPU that has them
    model = MODELS[shape]()
    before = {name: type(module) for name, module in model.named_modules()}
    wide = some_planned(model, target) if target in ("mxfp8", "fp8-row") else ()
    plan = plan_of(model, target, wide_wgrad=wide)
    export = export_plan(plan, "torchao")
    assert not any("cannot split" in note for note in export.notes)
    biased = {name for name in linears(model) if model.get_submodule(name).bias is not None}
    noted = any(f"{len(biased & planned(plan))} of " in note for note in export.notes)
    assert noted == (target == "fp8-block" and bool(biased))
    run_text(export, model=model)
    changed = {name for name, module in model.named_modules() if type(module) is not before[name]}
    wrapped = {name for name, p in model.named_parameters() if "Wrapper" in type(p.data).__name__}
    both = planned(plan) | planned(plan, products=("fprop", "dgrad"))
    assert both
    if target == "mxfp8":
        assert {name.removesuffix(".weight") for name in wrapped} == both | planned(plan, "grouped")
        keeps = [model.get_submodule(name).weight.data.config.wgrad_with_hp for name in wide]
    else:
        assert changed == both - (biased if target == "fp8-block" else set())
        assert wrapped == (planned(plan, "grouped") if target == "fp8-row" else set())
        wgrads = [model.get_submodule(n).config.cast_config_input_for_grad_weight for n in wide]
        keeps = [cast.scaling_type.value == "disabled" for cast in wgrads]
    assert all(keeps)


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("target", ["mxfp8", "nvfp4", "fp8-row"])
def test_torchtitan_s_lists_select_the_planned_layers(shape, target):
    """By the converters' own condition, as it stands in torchtitan 0.3.0 and in its main branch."""
    model = MODELS[shape]()
    plan = plan_of(model, target)
    settings = export_plan(plan, "torchtitan").settings
    if target == "fp8-row":
        found = {n for n in linears(model) if not any(f in n for f in settings["filter_fqns"])}
    else:
        assert settings["fqns"]  # none would convert every layer
        found = {n for n in linears(model) if any(f in n for f in settings["fqns"])}
    assert found == planned(plan)


@pytest.mark.parametrize("target", ["mxfp8", "nvfp4", "fp8-row"])
@pytest.mark.filterwarnings("ignore")
def test_torchtitan_s_converters_convert_the_planned_layers(target, monkeypatch):
    quantization = pytest.importorskip("torchtitan.components.quantization")
    common = importlib.import_module("torchtitan.models.common.linear")
    for name in ("float8", "mx", "nvfp4"):  # as on a GPU that has the format
        module = importlib.import_module(f"torchtitan.components.quantization.{name}")
        monkeypatch.setattr(module, "has_cuda_capability", lambda *_: True)
    registry = importlib.import_module("torchtitan.models.llama3").model_registry
    tree = registry("debugmodel").model
    known = [fqn for fqn, *_ in tree.traverse(common.Linear.Config)]
    layers = [
        BlockLayer(n, "weight", "linear", *[WIDE if "layers.1." in n else target] * 3)
        for n in known
    ]
    plan = PrecisionPlan(target="bf16", blocks=BlockPlan(target, {}, tuple(layers)))
    names = run_text(export_plan(plan, "torchtitan"))
    (config,) = names["CONVERTERS"]
    converted = config.build().convert(tree)
    kinds = {n: type(c) for n, c, *_ in converted.traverse(common.Linear.Config)}
    quantised = {n for n, kind in kinds.items() if kind is not common.Linear.Config}
    assert quantization
    assert quantised == planned(plan)


@pytest.mark.parametrize(
    ("shape", "target"),
    [("gpt", "mxfp8"), ("llama", "nvfp4"), ("moe", "fp8-tensor"), ("gpt", "mxfp6")],
)
@pytest.mark.filterwarnings("ignore")
def test_modelopt_enables_the_planned_quantizers(shape, target):
    pytest.importorskip("modelopt.torch.quantization")
    model = MODELS[shape]()
    plan = plan_of(model, target)
    export = export_plan(plan, "modelopt")
    uncalibrated = replace(export, text=export.text.replace("model(x)", "None"))
    names = run_text(uncalibrated, model=model)
    enabled = {n for n, m in names["model"].named_modules() if getattr(m, "is_enabled", False)}
    expected = {f"{n}.{o}_quantizer" for n in planned(plan) for o in ("input", "weight")}
    assert enabled == expected


@pytest.mark.parametrize("shape", MODELS)
def test_transformer_engine_s_sections_find_the_layers(shape, tmp_path):
    model = MODELS[shape]()
    wide = some_planned(model, "nvfp4")
    plan = plan_of(model, "nvfp4", wide_wgrad=wide)
    config = export_plan(plan, "transformer_engine").settings["config"]

    def found(section):
        pattern = re.compile(config[section]["layers"]["layer_name_regex_pattern"])
        return {name for name in linears(model) if pattern.search(f"model.{name}")}

    assert found("wgrad") == set(wide)
    assert found("bf16") == linears(model) - planned(plan) - set(wide)
    manager = pytest.importorskip("nvdlfw_inspect.config_manager")
    (tmp_path / "layers.yaml").write_text(json.dumps(config))
    names = ("DisableQuantizationLayer", "DisableQuantizationGEMM")
    registry = {"transformer_engine": type("", (), {"features": names})}
    importlib.import_module("nvdlfw_inspect.logging").initialize_logger(str(tmp_path))
    try:
        manager.ConfigManager._load_config(str(tmp_path / "layers.yaml"), registry)
        for name in linears(model):
            of_layer = manager.ConfigManager.get_config_for_layer(f"model.{name}")
            features = set(of_layer.get("transformer_engine", {}))
            assert features == (
                set() if name in planned(plan) else {names[1 if name in wide else 0]}
            )
    finally:
        manager.ConfigManager.reset()


@pytest.mark.parametrize(
    ("chosen", "others", "patterns", "wrong"),
    [
        (["layers.1.w"], ["layers.11.w"], ("layers.1.",), ()),
        (["layers.1.w1", "layers.1.w2"], ["layers.1.w3"], ("layers.1.w1", "layers.1.w2"), ()),
        (["head"], ["body.head_norm"], (), ("head",)),
        (["a.b.c", "a.d"], [], ("a.",), ()),
        (["encoder.0.w"], ["decoder.encoder.0.w"], (), ("encoder.0.w",)),
        (["w"], [], ("w",), ()),
    ],
)
def test_parts_of_names_select_layers(chosen, others, patterns, wrong):
    found = include(chosen, others)
    assert (found.patterns, found.wrong) == (patterns, wrong)
    kept = exclude(chosen, others)
    assert all(any(p in name for p in kept.patterns) for name in chosen)
    assert set(kept.wrong) == {n for n in others if any(p in n for p in kept.patterns)}
    assert all(re.search(exactly(chosen), f"model.module.{name}") for name in chosen)
    assert not any(re.search(exactly(chosen), name) for name in others)


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_framework_writes_a_block_recipe_that_it_holds_or_names_one(name):
    held = 0
    for target, recipe in BLOCK_RECIPES.items():
        plan = plan_of(llama(), target)
        if name in recipe.engines or name == "fsdp2":
            text = export_plan(plan, name).text
            compile(text, name, "exec")
            held += name in recipe.engines
        else:
            with pytest.raises(UsageError, match=recipe.engines[0]):
                export_plan(plan, name)
    assert (held > 0) == (name in BLOCK_ENGINES)


@pytest.mark.parametrize("name", BLOCK_ENGINES)
def test_a_plan_without_quantised_layers_is_not_written(name):
    with pytest.raises(UsageError, match="--target"):
        export_plan(PrecisionPlan(target="bf16"), name)
    layers = (BlockLayer("fc", "weight", "linear", WIDE, WIDE, WIDE),)
    with pytest.raises(UsageError, match="nothing to convert"):
        export_plan(PrecisionPlan(target="bf16", blocks=BlockPlan("mxfp8", {}, layers)), name)


def test_fsdp2_keeps_the_planned_modules_in_fp32(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = PrecisionPlan(target="bf16", fp32_modules=(Fp32Choice("", "1"),))
    export = export_plan(plan, "fsdp2")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        seen = {}
        for name, module in model.named_children():
            module.register_forward_pre_hook(
                lambda module, _, name=name: seen.update({name: module.weight.dtype})
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_text(export, model=model)
            model(torch.randn(4, 8)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert seen == {"0": torch.bfloat16, "1": torch.float32}
