"""The gallery: every exhibit trains, the stored truth is of this gallery, and scoring counts right."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from mpdiag.errors import DamagedRun, UsageError
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.sensitivity.fp32_search import _finish, narrow_options
from mpdiag.training.trainer import MixedPrecision
from studies import exhibits as gallery
from studies.exhibits.scoring import Score, flag, judge, load_truth, score


@pytest.fixture(scope="module")
def truth(root):
    return load_truth(root / "studies" / "results" / "gallery-truth.json")


@pytest.mark.parametrize("name", gallery.names())
def test_every_exhibit_takes_a_step_and_is_evaluated(name):
    exhibit = gallery.load(name)
    torch.manual_seed(0)
    model = exhibit.model()
    generator = torch.Generator().manual_seed(0)
    loss = model(*exhibit.data(generator))
    loss.backward()
    assert loss.shape == ()
    assert math.isfinite(float(loss.detach()))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    twice = [exhibit.evaluate(model.state_dict()) for _ in range(2)]
    assert twice[0] == twice[1]
    assert math.isfinite(twice[0])


def test_batches_depend_on_the_seed_alone():
    exhibit = gallery.load("mlp")
    a, b, other = (exhibit.batches(seed) for seed in (3, 3, 4))
    assert all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )
    assert not torch.equal(a[0][0], other[0][0])


def test_the_truth_is_of_this_gallery_and_of_its_size(truth):
    assert set(truth) == set(gallery.names())
    needs = [t["needs_fp32"] for t in truth.values()]
    assert len(needs) >= 24
    assert 0.4 <= sum(needs) / len(needs) <= 0.6
    for name, t in truth.items():
        worse = [m is None or m > t["bound"] for m in t["narrow"]]
        assert t["needs_fp32"] == any(worse), name
        assert t["held_back"] == gallery.load(name).held_back
    assert {t["held_back"] for t in truth.values() if t["needs_fp32"]} == {True, False}
    assert {t["held_back"] for t in truth.values() if not t["needs_fp32"]} == {True, False}


@pytest.mark.parametrize("name", ["fourth_power", "attention_fill_1e9", "cubes", "rms_norm"])
def test_training_again_says_what_the_truth_says(name, truth):
    exhibit, known = gallery.load(name), truth[name]
    scale = LossScalePlan(method=known["method"], init_scale=known["loss_scale"])
    plan = PrecisionPlan(loss_scale=scale)
    model, optimizer, train = exhibit.build(0)
    with MixedPrecision(model, optimizer, plan, **narrow_options(plan, lists=False)) as trainer:
        metric = _finish(train, trainer)
    assert (not metric <= known["bound"]) == known["needs_fp32"]


def test_importing_the_gallery_loads_no_torch():
    code = "import studies.exhibits, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_exhibit_is_refused():
    with pytest.raises(UsageError, match="handmade_softmax"):
        gallery.load("softmax")


def test_a_flagger_looks_several_times_at_an_fp32_training():
    seen = []

    def flags(model, batch):
        seen.append(float(model(*batch).detach()))
        return {("criterion", f"look{len(seen)}")}

    found = flag(gallery.load("cubes"), flags)
    assert len(found) == len(seen) == 4
    assert seen[-1] < seen[0]


NEEDY = {
    "needs_fp32": True,
    "needs_fp32_beyond_lists": False,
    "fixes": [[["a.b", "exp"], ["a.b", "sum"]], [["a", "mul"]]],
    "fixing_modules": ["a"],
}


@pytest.mark.parametrize(
    ("flags", "covers", "spare"),
    [
        ({("a.b", "exp"), ("a.b", "sum")}, True, 0),
        ({("a.b", "exp")}, False, 0),
        ({("a", "mul"), ("c", "mul")}, True, 1),
        ({("a", "")}, True, 0),
        ({("", "")}, True, 1),
        ({("a", "exp"), ("a", "sum")}, True, 2),  # an operation of the module around
        (set(), False, 0),
    ],
)
def test_flags_cover_what_suffices(flags, covers, spare):
    found = judge("x", flags, NEEDY)
    assert (found.covers, found.spare) == (covers, spare)


def test_what_is_needed_beyond_the_lists_is_another_question():
    assert judge("x", set(), NEEDY).needs
    assert not judge("x", set(), NEEDY, beyond_lists=True).needs


def test_precision_and_recall_are_counted_over_exhibits():
    none = {"needs_fp32": False}
    some = {("a", "mul")}
    made = Score(
        tuple(
            judge(str(i), flags, known)
            for i, (flags, known) in enumerate(
                [(some, NEEDY), ({("z", "z")}, NEEDY), (set(), NEEDY), (some, none), (set(), none)]
            )
        )
    )
    assert made.precision == pytest.approx(2 / 3)
    assert made.recall == pytest.approx(2 / 3)
    assert made.covered == pytest.approx(1 / 3)
    assert made.mistakes == ("2", "3")
    assert Score(()).precision == Score(()).recall == 1.0


def test_a_flagger_is_scored_on_chosen_exhibits(truth):
    made = score(lambda _model, _batch: {("criterion", "pow")}, truth, ["fourth_power", "cubes"])
    assert (made.precision, made.recall, made.covered) == (0.5, 1.0, 1.0)


def test_a_missing_truth_is_said_so(tmp_path):
    with pytest.raises(DamagedRun, match="gallery_truth"):
        load_truth(tmp_path / "none.json")
