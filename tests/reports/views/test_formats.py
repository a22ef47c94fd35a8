"""The view of block formats, on a recorded training of two layers, one of which has outliers."""

import pytest
import torch
from receipt_checks import same_numbers
from recorded_steps import record_steps
from torch import nn

from mpdiag.analysis.analyzer import analyze
from mpdiag.emulation.block_rounding import fake_quantize
from mpdiag.numerics.block_formats import BLOCK_FORMATS
from mpdiag.numerics.block_recipes import BLOCK_RECIPES
from mpdiag.reports.contents import read_contents
from mpdiag.reports.views import formats


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(32, 64)
    x[:, ::16] *= 30
    folder = tmp_path_factory.mktemp("formats") / "run"
    loss = lambda model, _: model(x).square().mean()  # noqa: E731
    run = record_steps(folder, model, loss, rate=1e-3, every=1, operations=1, blocks=True)
    return read_contents(analyze(run)), x


def test_a_cell_is_the_operand_farthest_below_par(found):
    contents, _ = found
    picture = formats.below_par(str(contents.folder), contents.blocks)
    frame = picture.frame.set_index(["layer", "target"])
    assert len(frame) == 2 * len(BLOCK_RECIPES)
    worst = frame.loc["0", "MXFP4"]
    assert tuple(worst[["operand", "gemm"]]) == ("input", "fprop")
    assert worst["finding"] == "outliers: rotation helps"
    assert frame["below_db"].idxmax() == ("0", "MXFP4")
    assert "input of fprop of 0 in MXFP4" in picture.caption
    for (layer, label), row in frame.iterrows():
        (blocks,) = (b for b in contents.blocks.values() if b.recipe.label == label)
        below = [one.format.par_db - one.sqnr_db for one in blocks.of(layer)]
        assert row["below_db"] == max(below)


def test_depths_are_in_units_of_the_scale(found):
    contents, x = found
    for target, name in (("mxfp8", "mxfp8_e4m3"), ("mxfp4", "mxfp4")):
        (one,) = (
            one
            for one in formats.drawn(contents.blocks[target])
            if one.operand.key == ("0", "linear", 0, None, "fprop", "input")
        )
        picture = formats.depths(str(contents.folder), one)
        element = BLOCK_FORMATS[name].element
        frame = picture.frame
        lost = int(frame["count"][frame["exponent"] < element.zero_exponent].sum())
        assert lost == int(((fake_quantize(x, name) == 0) & (x != 0)).sum())
        assert frame["exponent"].max() <= element.max_exponent
        assert int(frame["count"].sum()) == x.numel()
        same_numbers(picture, needed=("exponent", "count"))


def test_rules_are_beside_the_plan(found):
    contents, _ = found
    picture = formats.choices(str(contents.folder), contents.blocks)
    left = picture.frame.set_index(["format", "rule"])["rise"]
    for blocks in contents.blocks.values():
        evidence, label = blocks.plan.evidence, blocks.recipe.label
        assert left[label, "this plan"] == evidence["rise"]
        assert left[label, "nothing in BF16"] == evidence["rise_all_quantised"]
        for rule in blocks.baselines:
            assert ((label, rule.name) in left.index) == bool(rule.kept)
    assert not list(formats.drawn(contents.blocks["nvfp4"]))
    assert [p.key for p in formats.reported(contents)][-1] == "block-depths"
