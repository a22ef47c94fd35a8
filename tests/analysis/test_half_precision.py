"""What is answered of a recording in BF16, and what is not: bounds, a choice, and no plan as FP32's."""

import json

import pytest
import torch
from audited_trainings import BF16, model, train
from torch import nn

import mpdiag
from mpdiag.numerics import formats
from mpdiag.plan import PrecisionPlan
from mpdiag.precision.half_choice import fp16_or_bf16
from mpdiag.reports.next_commands import NOTHING
from mpdiag.reports.text.analysis import after_analysis, settling_command

FP16 = torch.float16


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of recordings by the precision of their training."""
    place = tmp_path_factory.mktemp("runs")
    for name, dtype, autocast in (
        ("fp32", torch.float32, None),
        ("weights", BF16, None),
        ("autocast", torch.float32, BF16),
        ("fp16", torch.float32, FP16),
    ):
        net = model(dtype)
        sgd = torch.optim.SGD(net.parameters(), 0.01)
        train(net, sgd, place / name, autocast=autocast, steps=20)
    return place


def certainties(run, *, target="fp16"):
    found = mpdiag.analyze(run, target)
    return found, {a.question: a.answer for a in found.answers}


@pytest.mark.parametrize("name", ["weights", "autocast"])
def test_a_bf16_recording_answers_with_bounds(runs, name):
    found, answers = certainties(runs / name)
    assert found.verdict.level == "expected"
    assert "so these figures are bounds, up to one rounding to BF16." in found.verdict.text
    assert any("--fp32" in clause for clause in found.verdict.not_examined)
    low, high = found.loss_scale.bounds.lower
    assert low <= found.plan.loss_scale.lower <= high
    assert found.loss_scale.bounds.upper[0] == found.plan.loss_scale.upper
    assert {q for q, a in answers.items() if a == "bound"} == {
        "range of FP16 and loss scale",
        "FP8 formats",
        "drift of ranges over the steps",
    }
    assert answers["updates rounded away"] == "exact"
    assert answers["sensitive operations"] == "no"
    # What weights in BF16 rounded away is in no recording of them.
    assert found.plan.master_weights.needed == (name == "weights")
    assert settling_command(found)[:3] == ("mpdiag", "record", "--fp32")
    assert after_analysis(found, runs / name) == NOTHING  # no script recorded it


@pytest.mark.parametrize("name", ["fp32", "weights", "autocast", "fp16"])
def test_the_folder_says_what_the_analysis_says(runs, name):
    found = mpdiag.analyze(runs / name).to_json()["answers"]
    assert json.loads((runs / name / "meta.json").read_text("utf-8"))["answers"] == found
    assert mpdiag.audit(runs / name).to_json()["answers"] == found


def test_what_bf16_loses_is_not_claimed_by_itself(runs):
    found, _ = certainties(runs / "autocast", target="bf16")
    assert found.verdict.level == "cannot"
    assert found.loss_scale.bounds is None
    assert fp16_or_bf16(found) is None


def test_a_recording_in_fp16_answers_less(runs):
    found, answers = certainties(runs / "fp16")
    assert found.verdict.level == "cannot"
    assert fp16_or_bf16(found) is None
    assert [q for q, a in answers.items() if a != "no"] == ["updates rounded away"]


def test_a_recording_in_fp32_answers_as_before(runs):
    found, answers = certainties(runs / "fp32")
    assert found.loss_scale.bounds is None
    assert fp16_or_bf16(found) is None
    assert {q for q, a in answers.items() if a != "exact"} == {"block formats"}
    assert "underflow_bounds" not in found.formats["fp16"]["kinds"]["activation"]


def test_a_bf16_recording_confirms_no_plan(runs, tmp_path):
    plan = mpdiag.analyze(runs / "fp32").plan
    now = mpdiag.analyze(runs / "weights")
    found = mpdiag.analysis.plan_check.check_plan(plan, now.plan, now.unconfirming)
    assert [f.code for f in found.findings if f.severity == "error"] == ["plan-not-checked"]
    now.plan.save(tmp_path / "plan.json")
    assert "bounds, up to one rounding" in PrecisionPlan.load(tmp_path / "plan.json").verdict.text


class Scaled(nn.Module):
    """Its output is larger, and the gradients behind it are smaller, by a power of two."""

    def __init__(self, output=1.0, gradient=1.0):
        super().__init__()
        self.output, self.gradient = output, gradient

    def forward(self, x):
        y = x * self.output
        y.register_hook(lambda g: g * (self.gradient / self.output))
        return y


def recorded(folder, parts, autocast=True):
    """A training by Adam, which moves weights however small their gradients are."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), *parts[:-1], nn.Linear(16, 4), parts[-1])
    adam = torch.optim.Adam(net.parameters(), 0.01, eps=1e-30)
    train(net, adam, folder, autocast=BF16 if autocast else None, steps=20)
    return mpdiag.analyze(folder)


SMALL = (Scaled(gradient=2.0**-18),)
LARGE = (Scaled(output=2.0**17), Scaled(output=2.0**-17))
APART = (Scaled(gradient=2.0**-45), nn.Identity())


@pytest.mark.parametrize(
    ("parts", "answer", "words"),
    [
        ((nn.Identity(),), "either", "FP16 needs no loss scale"),
        (SMALL, "either", "FP16 needs a loss scale of "),
        ((*LARGE, nn.Identity()), "bf16", "outputs of 1 module overflow FP16"),
        (APART, "bf16", "loss scale"),
    ],
    ids=["plain", "small", "large", "apart"],
)
def test_the_choice_and_its_settings(tmp_path, parts, answer, words):
    choice = fp16_or_bf16(recorded(tmp_path / "run", parts))
    assert (choice.answer, words in choice.text) == (answer, True), choice.text
    in_fp16 = answer == "either"
    assert choice.settings["huggingface"]["fp16"] == in_fp16
    assert choice.settings["huggingface"]["bf16"] != in_fp16
    assert ("Rounding" in choice.grounds) == (parts[0] is not LARGE[0])  # FP16 cannot hold it
    both = choice.updates_rounded_away
    assert 0 <= both[formats.FP16.name] <= both[formats.BF16.name] <= 1


def test_the_choice_agrees_with_fp32(tmp_path):
    """The FP32 twin of a training that FP16 needs a scale for needs one, too."""
    bf16, fp32 = (recorded(tmp_path / str(on), SMALL, autocast=on) for on in (True, False))
    assert bf16.plan.loss_scale.need == fp32.plan.loss_scale.need == "needed"
    low, high = bf16.loss_scale.bounds.lower
    assert low / 2 <= fp32.plan.loss_scale.lower <= 2 * high  # trajectories part
