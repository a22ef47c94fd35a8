"""What stays in BF16: by effect for its FLOPs, within a budget, and beside rules of thumb."""

import json
import math
from dataclasses import replace
from shutil import copytree

import pytest
import torch
import torch.nn.functional as F
from calls import printed
from schemas import assert_described
from torch import nn

import mpdiag
from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.blocks.choice import baselines, choose, late_over_early, left_of
from mpdiag.analysis.blocks.effects import LayerEffect
from mpdiag.analysis.blocks.story import explain_blocks
from mpdiag.analysis.blocks.verdict import judge_blocks
from mpdiag.analysis.plan_check import check_plan
from mpdiag.analysis.verdict.probe import Probe, write_probe
from mpdiag.errors import DamagedRun, LayerNotFound, UsageError
from mpdiag.plan import PrecisionPlan
from mpdiag.reports.text.analysis import settling_command
from mpdiag.reports.text.blocks import block_layer_text, blocks_text
from mpdiag.runs.results import StoredComparison, write_comparison


def effect(name, rise, flops=1.0, *, output=0.1, wgrad=0.1, steps=(1.0, 1.0)):
    by_step = {n: rise * factor for n, factor in enumerate(steps)}
    return LayerEffect(name, "weight", "linear", flops, 128, 128, 128, rise, output, wgrad, by_step)


LAYERS = [effect("a", 0.1), effect("b", 0.4, 4.0), effect("c", 0.2), effect("d", 0.01, output=0.5)]


def names(kept):
    return sorted(module for module, _ in kept)


@pytest.mark.parametrize(
    ("budget", "harmless", "kept"),
    [
        (0.0, 0.0, []),
        (1.0, 0.0, ["c"]),
        (2.0, 0.0, ["a", "c"]),
        (5.0, 0.2, ["a", "c", "d"]),
        (5.0, 1.0, []),
        (7.0, 0.0, ["a", "b", "c", "d"]),
    ],
)
def test_the_most_effect_for_its_flops_stays(budget, harmless, kept):
    found, wide = choose(LAYERS, budget, harmless)
    assert names(found) == kept
    assert not wide
    rest = sum(e.rise for e in LAYERS if e.module not in kept)
    assert left_of(LAYERS, found) == pytest.approx(rest)


def test_a_noisy_gradient_keeps_wgrad_alone_and_an_unknown_effect_the_layer():
    layers = [effect("a", 0.001, 3.0, wgrad=0.9), effect("b", math.nan), effect("c", 0.001)]
    kept, wide = choose(layers, 1.0, 0.5)
    assert (names(kept), names(wide)) == (["b"], ["a"])
    assert choose(layers, 0.9, 0.5)[1] == {}


def test_rules_of_thumb_spend_as_much():
    found = {b.name: (names(b.kept), b.left) for b in baselines(LAYERS, 1.0)}
    assert {name: kept for name, (kept, _) in found.items()} == {
        "last layers": ["d"],
        "largest divergence": ["d"],
        "gradient score": ["c"],
    }
    assert found["last layers"][1] == pytest.approx(0.7)


def test_growth_is_the_last_step_beside_the_first():
    assert late_over_early([effect("a", 1.0, steps=(1.0, 6.0))]) == pytest.approx(6.0)
    # Initial weights do not count where others were recorded.
    assert late_over_early([effect("a", 1.0, steps=(1.0, 2.0, 6.0))]) == pytest.approx(3.0)
    assert math.isnan(late_over_early([effect("a", 1.0, steps=(1.0,))]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three linear layers, one of them with an odd size, and one that is never called."""
    folder = tmp_path_factory.mktemp("blocks") / "run"
    torch.manual_seed(0)
    sizes = ((64, 128), (128, 40), (40, 32))
    model = nn.Sequential(*(nn.Linear(*size) for size in sizes))
    model[0].spare = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with mpdiag.record(model, optimizer, folder, every=1, operations=2, blocks=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, 64)).square().mean().backward()
            optimizer.step()
    return folder


def test_a_recording_becomes_a_plan_in_the_words_of_its_schema(run, tmp_path):
    analysis = analyze(run, "mxfp8")
    document = analysis.to_json()
    assert_described("analyze", document)
    chosen = {
        layer.module: (layer.quantised, layer.reason) for layer in analysis.plan.blocks.layers
    }
    assert chosen["0"][0] == ("fprop", "dgrad", "wgrad")
    assert "padded to 64" in chosen["1"][1]
    assert "padded to 64" in chosen["2"][1]
    assert chosen["0.spare"] == ((), "no product of it was recorded")
    assert {row["keep"] for row in document["blocks"] if row["module"] == "0"} == {"mxfp8_e4m3"}
    assert {row["keep"] for row in document["blocks"] if row["module"] == "1"} == {"bf16"}
    assert document["target"] == analysis.plan.aim == "mxfp8"
    assert analysis.verdict.level == "expected"
    assert "Nothing was trained in MXFP8" in analysis.verdict.text
    assert any("is for a cross-entropy" in words for words in analysis.verdict.not_examined)
    analysis.plan.save(tmp_path / "plan.json")
    assert PrecisionPlan.load(tmp_path / "plan.json") == analysis.plan


def test_products_without_operands_are_named(run, tmp_path):
    folder = copytree(run, tmp_path / "run")
    meta = json.loads((folder / "meta.json").read_text())
    meta["blocks"]["not_recorded"] = [{"module": "rnn", "product": "lstm", "reason": "…"}]
    (folder / "meta.json").write_text(json.dumps(meta))
    analysis = analyze(folder, "mxfp8")
    assert analysis.plan.blocks.evidence["not_recorded"] == ["0.spare", "rnn"]
    assert "of the recorded matrix FLOPs" in analysis.verdict.text
    assert "rnn: mpdiag could not" in printed(*blocks_text(analysis))


def test_a_plan_with_blocks_is_another_training_than_one_without(run):
    plan, without = analyze(run, "mxfp8").plan, analyze(run, "bf16").plan
    assert plan.decisions() == {**without.decisions(), "blocks": plan.decisions()["blocks"]}
    assert "blocks" not in without.to_json()
    assert plan.digest() != without.digest() != analyze(run, "nvfp4").plan.digest()
    with pytest.raises(UsageError, match="--target mxfp8"):
        check_plan(plan, without, "")
    assert plan.next_call("plan") == without.next_call("plan")
    odd = [
        replace(c, dgrad="mxfp8", wgrad="mxfp8") if c.module == "1" else c
        for c in plan.blocks.layers
    ]
    bolder = replace(plan, blocks=replace(plan.blocks, layers=tuple(odd)))
    check = check_plan(bolder, plan, "")
    assert [f.message[:14] for f in check.findings if f.severity == "warning"] == ["dgrad, wgrad o"]
    assert not any(f.severity == "warning" for f in check_plan(plan, plan, "").findings)


def test_a_diverging_training_gets_no_recipe(run):
    found = analyze(run, "mxfp8").blocks
    verdict = judge_blocks(found, {"non-finite-losses"}, 3)
    assert verdict.level == "cannot"
    nothing = analyze(run, "nvfp4")  # 64 features are no multiple of 128
    assert nothing.verdict.level == "cannot"


def test_one_layer_is_explained(run):
    story = explain_blocks(run, None, "mxfp8")
    assert story.module == story.to_json()["worst"][0]
    assert_described("why", story.to_json())
    first = explain_blocks(run, "0", "mxfp8").to_json()["blocks"]
    assert {row["gemm"] for row in first} == {"fprop", "wgrad"}  # its input needs no gradient
    with pytest.raises(LayerNotFound, match="did you mean 0"):
        explain_blocks(run, "0.", "mxfp8")
    with pytest.raises(
        LayerNotFound, match=r"'nothing alike' was recorded: there are 0, 1, 2, 0.spare"
    ):
        explain_blocks(run, "nothing alike", "mxfp8")


@pytest.mark.parametrize(
    ("ended", "level", "words"),
    [
        (None, "expected", "Nothing was trained in MXFP8. (1 of 3 steps have operands)"),
        ("equivalent", "shown", "linear layers trained in MXFP8."),
        ("inconclusive", "expected", "3 trainings by this plan ended inconclusive"),
        ("different", "cannot", "MXFP8 does not work with this plan: b (3 seeds) ended"),
    ],
)
def test_trainings_by_the_plan_raise_and_refute_the_verdict(run, tmp_path, ended, level, words):
    folder = copytree(run, tmp_path / "run")
    plan = analyze(folder, "mxfp8").plan
    if ended:
        stored = StoredComparison("b", plan.digest(), ended, ("loss 2 beside 1",), 3, ended)
        write_comparison(folder, stored)
    verdict = analyze(folder, "mxfp8").verdict
    assert (verdict.level, words in verdict.text) == (level, True), verdict.text
    assert ("Nothing was trained" in verdict.text) == (ended is None)
    assert ("an actual training in MXFP8" in verdict.not_examined) == (ended is None)
    assert analyze(folder, "fp8-row").verdict.level == "expected"  # another plan


def test_a_probe_speaks_of_the_plan_that_it_trained(run, tmp_path):
    folder = copytree(run, tmp_path / "run")
    bf16, mxfp8 = analyze(folder, "bf16"), analyze(folder, "mxfp8")
    write_probe(folder, Probe((2.0, 1.0), (2.0, math.nan), 0, 2), bf16.plan.digest())
    assert analyze(folder, "bf16").verdict.level == "cannot"
    assert analyze(folder, "mxfp8").to_json() == mxfp8.to_json()
    near = Probe((2.0, 1.0), (2.0, 1.02), 0, 2, reference="BF16")
    write_probe(folder, near, mxfp8.plan.digest())
    probed = analyze(folder, "mxfp8")
    assert probed.probe == near
    assert probed.verdict.level == "expected"
    assert "In a probe of 2 steps the losses differ from BF16's" in probed.verdict.text
    assert "Nothing was trained" not in probed.verdict.text
    assert "an actual training in MXFP8 beyond its first 2 steps" in probed.verdict.not_examined
    text = " ".join(printed(*blocks_text(probed)).split())
    assert "mean loss 1.02 over the last 1, 1 in BF16; 0 skipped; the loss is 2.00 % higher" in text
    assert text.count("mean loss") == 1
    assert settling_command(mxfp8)[3:6] == ("--target", "mxfp8", "--probe")


class Several(nn.Module):
    """Weights of one module, which a recipe of multiples of 32 treats differently."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2)
        self.w1, self.w2 = (nn.Parameter(torch.randn(2, *size)) for size in ((32, 40), (32, 32)))

    def forward(self, x):
        x = self.attention(x, x, x)[0].flatten(0, 1).repeat(2, 1)
        ends = torch.tensor([15, 30], dtype=torch.int32)
        first, second = (F.grouped_mm(x, w, offs=ends) for w in (self.w1, self.w2))
        return (0.1 * first).square().sum() + second.square().sum()


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped products")
def test_each_weight_of_a_module_is_told_apart(tmp_path):
    torch.manual_seed(0)
    model = Several()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1, operations=1, blocks=True):
        model(torch.randn(5, 3, 32)).backward()
        optimizer.step()
    story = explain_blocks(tmp_path / "run", "w2", "mxfp8")
    found = story.blocks.plan
    kept = {c.name: c.quantised for c in found.layers if c.kind == "grouped"}
    assert kept == {"w1": (), "w2": ("fprop", "dgrad", "wgrad")}
    assert found.ragged == ["w2"]
    # The product of out_proj is its module's.
    assert "attention.out_proj" not in {c.module for c in found.layers}
    keep = [row["keep"] for row in story.to_json()["blocks"] if row["product"] == "grouped"]
    assert sorted(keep) == ["bf16"] * 12 + ["mxfp8_e4m3"] * 12
    text = printed(*block_layer_text(story.blocks, story.module))
    assert all(text.count(f"{weight} wgrad  input") == 1 for weight in ("w1", "w2"))
    assert "w2 in MXFP8: " in text


def test_a_recording_without_operands_says_how_to_get_them(tmp_path):
    model = nn.Linear(8, 8)
    with mpdiag.record(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run", every=1):
        model(torch.randn(4, 8)).sum().backward()
    with pytest.raises(DamagedRun, match="--blocks"):
        analyze(tmp_path / "run", "mxfp8")
