"""A recorded model's matrix work from its modules alone, against torch's own count, and what to pad."""

import json
from pathlib import Path

import pytest
import torch
from calls import printed
from recorded_steps import Layers, recorded_twice
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mpdiag
from mpdiag.analysis.shapes.advice import advise_shapes, recorded_generation
from mpdiag.analysis.shapes.recorded import from_modules, module_work
from mpdiag.analysis.shapes.solution import Wanted, solve_sizes
from mpdiag.exports.registry import export_plan
from mpdiag.reports.text.analysis import analysis_text

DAMAGED = Path(__file__).with_name("damaged_modules.jsonl").read_text("utf-8").splitlines()


def pictures_model():
    convolutions = {"first": nn.Conv2d(3, 16, 3), "deep": nn.Conv2d(16, 24, 3, groups=2, stride=2)}
    convolutions |= {"depth": nn.Conv2d(24, 24, 3, groups=24)}
    rest = {"up": nn.ConvTranspose2d(24, 12, 2, stride=2), "head": nn.Linear(12, 10)}
    return Layers(
        lambda m, x: m.head(m.up(m.depth(m.deep(m.first(x)))).mean((2, 3))), **convolutions, **rest
    )


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """An LSTM language model with tied weights and an odd vocabulary."""
    torch.manual_seed(0)
    parts = {"encoder": nn.Embedding(519, 24), "rnn": nn.LSTM(24, 24, num_layers=2)}
    model = Layers(
        lambda m, x: m.decoder(m.rnn(m.encoder(x))[0]), **parts, decoder=nn.Linear(24, 519)
    )
    model.decoder.weight = model.encoder.weight
    return recorded_twice(
        model, torch.randint(0, 519, (7, 5)), tmp_path_factory.mktemp("l") / "run"
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    return recorded_twice(pictures_model(), x, tmp_path_factory.mktemp("p") / "run")


def by_module(run):
    return {w.module: w for w in module_work(run.modules())}


def test_flops_are_torchs(pictures):
    """Forward, input gradient and weight gradient: three times those of the forward pass."""
    works = by_module(pictures)
    model = pictures_model()
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(4, 3, 16, 16))
    counted = counter.get_flop_counts()
    for name, work in works.items():
        assert work.flops == 3 * sum(counted[f"Layers.{name}"].values()), name
    assert set(works) == {"first", "deep", "depth", "up", "head"}


def test_an_lstms_work(language):
    work = by_module(language)["rnn"]
    assert (work.batch, work.flops) == ((5, 1), 3 * 35 * 2 * 4 * 24 * 2 * 48)


def test_attention(tmp_path):
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    attending = Layers(lambda m, x: m.attend(x, x, x)[0], attend=model)
    run = recorded_twice(attending, torch.randn(3, 10, 32), tmp_path / "run")
    work = by_module(run)["attend"]
    x = torch.randn(3, 10, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x, x, x, need_weights=True)
    assert work.flops / 3 + work.scores * 2 / 7 == counter.get_total_flops()
    solved = solve_sizes(from_modules(run.modules(), [work]), Wanted("fp16"))
    assert {
        d.name: solved.new(d.size) for d in solved.model.dimensions if d.name != "embed_dim"
    } == {"sequence": 16}


def test_what_is_worth_a_finding(pictures, language):
    found = {f.code: f for f in mpdiag.analyze(pictures).findings}
    layout = found["channels-last"]
    assert layout.evidence["modules"] == ["first", "deep", "depth"]
    assert layout.evidence["share_of_flops"] > 0.5
    assert set(found["shapes-to-pad"].evidence["modules"]) == {
        "first", "deep", "depth", "up", "head",
    }  # fmt: skip
    codes = {f.code for f in mpdiag.analyze(language).findings}
    assert "channels-last" not in codes
    assert "shapes-to-pad" in codes


def test_a_model_in_channels_last_is_not_told_to_be_so(tmp_path):
    model = pictures_model().to(memory_format=torch.channels_last)
    run = recorded_twice(model, torch.randn(4, 3, 16, 16), tmp_path / "run")
    assert "channels-last" not in {f.code for f in mpdiag.analyze(run).findings}


def test_an_aligned_model_is_left_alone(tmp_path):
    run = recorded_twice(nn.Linear(16, 8), torch.randn(8, 16), tmp_path / "run")
    analysis = mpdiag.analyze(run)
    assert analysis.plan.shapes == ()
    assert "Shapes to pad" not in printed(analysis_text(analysis))


@pytest.mark.parametrize(("width", "worth"), [(256, False), (32, True)])
def test_what_is_padded_is_a_finding_too(tmp_path, width, worth):
    """Of an output layer of 10 classes; the export says what to do with the added ones."""
    body, head = nn.Linear(width, width), nn.Linear(width, 10)
    model = Layers(lambda m, x: m.head(m.body(x)), body=body, head=head)
    analysis = mpdiag.analyze(recorded_twice(model, torch.randn(8, width), tmp_path / "run"))
    padded = [(s.module, s.size, s.padded) for s in analysis.plan.shapes]
    assert padded == ([("head", 10, 16)] if worth else [])
    assert any(f.code == "shapes-to-pad" for f in analysis.findings) == worth
    notes = export_plan(analysis.plan, "torch").notes
    assert (
        any(n.startswith("pad out_features of head from 10 to 16 in the model; ") for n in notes)
        == worth
    )


@pytest.mark.parametrize(
    ("target", "gpu", "padded", "words"),
    [
        ("fp16", "volta", 520, "cuBLAS before 11"),
        ("fp16", "ampere", 520, "8 FP16 values"),
        ("fp16", "hopper", 520, "kernels older than Hopper's"),
        ("fp8_e4m3", "hopper", 528, "multiples of 16"),
    ],
)
def test_the_rule_is_that_of_format_and_generation(language, target, gpu, padded, words):
    found, _ = advise_shapes(language, Wanted(target, gpu))
    (advice,) = (a for a in found if a.dimension == "out_features")
    assert advice.padded == padded
    assert words in advice.reason


def test_the_generation_a_run_was_recorded_on():
    device = {"type": "cuda", "name": "Tesla V100-SXM2-16GB", "compute_capability": "7.0"}
    assert recorded_generation({"device": device}) == "volta"
    assert recorded_generation({"device": {"type": "cpu"}}) is None
    assert recorded_generation({}) is None


@pytest.mark.parametrize("row", DAMAGED)
def test_a_module_that_was_not_called_or_is_damaged_has_no_work(row):
    assert module_work([{"what": "module", "name": "m", "type": "Linear", **json.loads(row)}]) == ()
