"""What the scale is said to do: below 1, in each late part, within what so many steps allow."""

import json

import numpy as np
import pytest
import torch
from recorded_steps import Layers, record_steps
from row_buffer import write_rows
from torch import nn

import mpdiag
from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.scaling.windows import late_windows, unseen_windows


def record(folder, values, steps=None, **meta):
    """A run whose gradients in each step are given: by layer, one array a step."""
    length = len(next(iter(values.values())))
    rows = [
        (step, "weight_grad" if "." in name else "activation_grad", name, of_layer[i])
        for i, step in enumerate(range(length) if steps is None else steps)
        for name, of_layer in values.items()
    ]
    return write_rows(folder, rows, **{"steps": length} | meta)


def around(exponent, spread=2.0, n=400, seed=0):
    return np.exp2(np.random.default_rng(seed).normal(exponent, spread, n))


@pytest.mark.parametrize("top", [17.0, 20.5, 30.0])
def test_a_scale_below_1_fits_where_gradients_overflow_and_small_ones_do_not_matter(tmp_path, top):
    """The plan's own scale keeps all gradients in range: this is no training that cannot."""
    values = {"layer": [around(top - 8)] * 30, "layer.weight": [[2.0**top]] * 30}
    analysis = analyze(record(tmp_path / "run", values))
    plan = analysis.plan.loss_scale
    assert analysis.verdict.level == "expected"
    assert "no-loss-scale-fits" not in {f.code for f in analysis.findings}
    assert plan.need == "needed"
    assert "overflow FP16 in 30 of 30 recorded steps" in plan.reason
    assert plan.lower <= plan.recommended <= plan.upper < 1
    assert plan.recommended * 2.0**top < 65504
    small = around(top - 8)
    lost = small[np.float16(small * plan.recommended) == 0].sum() / small.sum()
    assert lost <= 0.01


def test_losses_that_trainings_have_borne_are_no_reason_to_say_it_cannot(tmp_path):
    """Between what matters and what made trainings fail nothing is known: a warning, no refusal."""
    for small, level in ((8000, "cannot"), (200, "expected")):
        tiny = np.concatenate([np.full(small, 2.0**-26), np.full(small, 2.0**-25)])
        g = np.concatenate([tiny, np.full(100, 2.0**-20)])
        lost = small * 2.0**-26 / g.sum()  # at a scale of 2
        assert lost > 0.25 if level == "cannot" else 0.01 < lost < 0.1
        values = {"layer": [g] * 30, "layer.weight": [[20000.0]] * 30}
        analysis = analyze(record(tmp_path / level, values))
        assert analysis.loss_scale.plan.upper == 2
        assert analysis.verdict.level == level
        tight = "loss-scale-tight" in {f.code for f in analysis.findings}
        assert tight == (level == "expected")


def test_what_no_admissible_scale_brings_back_is_no_reason_to_say_it_cannot(tmp_path):
    """It is lost with a scale and without one: the scale is for the other layers."""
    for name, other, need in (("a", around(-14.0), "not needed"), ("b", around(-30.0), "needed")):
        values = {"far": [np.full(9, 2.0**-70)] * 30, "other": [other] * 30}
        values |= {"other.weight": [[0.5]] * 30, "far.weight": [[2.0**-60]] * 30}
        analysis = analyze(record(tmp_path / name, values))
        scale = analysis.loss_scale
        assert (analysis.verdict.level, scale.plan.need) == ("expected", need)
        assert scale.plan.lower <= scale.plan.recommended <= scale.plan.upper == 2**16
        assert scale.out_of_reach == {"far"}
        told = next(f for f in analysis.findings if f.code == "loss-scale-tight")
        assert (told.severity, told.evidence["layers"]) == ("warning", ["far"])
        assert scale.to_json()["out_of_reach"] == ["far"]


def test_late_is_a_part_of_the_training_and_not_of_the_recorded_steps():
    """Dense first, then sparse: the median recorded step of 200 is step 14."""
    steps = np.concatenate([np.arange(20), np.arange(20, 200, 20)])
    assert [(w.name, w.first, w.end, w.recorded) for w in late_windows(steps, 200)] == [
        ("the later half of the training", 100, 200, 5),
        ("the fourth fifth of the training", 120, 160, 2),
        ("the last fifth of the training", 160, 200, 2),
    ]
    # A recording that ends early has no late part of the training.
    early = np.arange(50)
    assert late_windows(early, 1000)[0].name == "the later half of the recorded steps"
    assert unseen_windows(early, 1000) == ("the later half of the training",)
    assert unseen_windows(np.arange(700), 1000) == ("the last fifth of the training",)
    assert unseen_windows(np.arange(1000), 1000) == ()
    assert late_windows(np.array([0]), 1)[0].recorded == 1


def test_a_last_fifth_that_loses_much_is_seen(tmp_path):
    """Pooled over the later half it vanishes among the larger gradients before it."""
    large, small = around(-12.0), around(-28.0)
    values = {"layer": [large] * 160 + [small] * 40}
    analysis = analyze(record(tmp_path / "run", values))
    pooled = np.concatenate([np.tile(large, 60), np.tile(small, 40)])
    assert pooled[np.float16(pooled) == 0].sum() / pooled.sum() < 0.01
    truth = small[np.float16(small) == 0].sum() / small.sum()
    assert truth > 0.25
    scale = analysis.loss_scale
    assert scale.plan.need == "needed"
    assert scale.worst_before == pytest.approx(truth, rel=1e-3)
    assert scale.window.name == "the last fifth of the training"
    assert "in the last fifth of the training" in scale.plan.reason
    kept = small[np.float16(small * scale.plan.recommended) == 0].sum() / small.sum()
    assert kept <= 0.01


def test_no_overflow_seen_is_a_bound_with_its_steps_and_no_probability(tmp_path):
    values = {"layer": [around(-14.0)] * 69, "layer.weight": [[2.0**-6]] * 69}
    analysis = analyze(record(tmp_path / "run", values))
    document = json.loads(json.dumps(analysis.to_json(), allow_nan=False))["loss_scale"]
    assert (document["overflowing_steps"], document["finite_steps"]) == (0, 69)
    assert document["predicted_overflow_rate"] == pytest.approx(0.0425, abs=1e-4)
    assert any("0 of 69" in clause and "4.2" in clause for clause in analysis.verdict.evidence)


def test_one_spike_does_not_rule_out_a_scale_that_skips_it(tmp_path):
    steps = [*range(20), *range(20, 300, 20)]
    tops = np.full(len(steps), 2.0**-6)
    tops[30] = 2.0**14
    values = {"layer": [around(-30.0)] * len(steps), "layer.weight": [[top] for top in tops]}
    analysis = analyze(record(tmp_path / "run", values, steps, steps_seen=300))
    assert analysis.verdict.level == "expected"
    assert analysis.loss_scale.overflowing_steps == 1
    assert "skips 1 of" in analysis.plan.loss_scale.reason


def test_nothing_is_claimed_of_a_run_that_explodes(tmp_path):
    tops = np.exp2(np.linspace(0, 127, 40))
    values = {"": [np.full(4, x) for x in tops], "w.w": [[x] for x in tops]}
    analysis = analyze(record(tmp_path / "run", values))
    document = json.loads(json.dumps(analysis.to_json(), allow_nan=False))
    plan = analysis.plan.loss_scale
    assert (analysis.verdict.level, "diverges" in analysis.verdict.text) == ("cannot", True)
    assert (plan.need, plan.recommended, plan.method) == ("unknown", 1.0, "none")
    assert document["loss_scale"]["predicted_overflow_rate"] is None
    assert analysis.findings[0].code == "exploding-gradients"
    assert "not needed" not in json.dumps(document["verdict"])


def test_a_step_that_was_not_finite_in_a_training_that_went_on_is_no_divergence(tmp_path):
    values = [around(-14.0) for _ in range(30)]
    values[12] = np.full(4, np.nan)
    analysis = analyze(record(tmp_path / "run", {"layer": values}))
    codes = {f.code for f in analysis.findings}
    assert "non-finite-steps" in codes
    assert "non-finite-gradients" not in codes
    assert analysis.verdict.level == "expected"


def test_no_scale_below_the_smallest_sensible_one_is_recommended(tmp_path):
    """Maxima that leap over the whole range call for endless headroom; none is worth 2^-190."""
    tops = np.where(np.arange(40) % 2, 2.0**-100, 2.0**30)
    values = {"layer": [around(0)] * 40, "layer.weight": [[top] for top in tops]}
    plan = analyze(record(tmp_path / "run", values)).plan.loss_scale
    assert 2.0**-24 <= plan.recommended <= 1


def test_steps_of_one_optimizer_say_nothing_of_the_next_ones_of_another(tmp_path):
    """A generator's gradients are larger than its discriminator's, and grow no more for it."""
    models = {name: nn.Linear(2, 2) for name in ("small", "large")}
    optimizers = [torch.optim.SGD(model.parameters(), 1e-6) for model in models.values()]
    with mpdiag.record(models, optimizers, tmp_path / "run", every=1, operations=0):
        for step in range(21):
            at = step % 2
            (list(models.values())[at](torch.ones(2, 2)) * 1000**at).sum().backward()
            optimizers[at].step()
            optimizers[at].zero_grad()
    found = analyze(tmp_path / "run").to_json()["loss_scale"]
    assert (found["method"], found["evidence"]["headroom_exponents"]) == ("none", 2)


def recorded(folder, unit):
    """A small displacement, trained by its own slope: its gradients have two sizes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    model = Layers(lambda m, x: 1e-4 * m.net(x), net=net)

    def loss(model, step):
        x = torch.rand(16, 1, generator=torch.Generator().manual_seed(step)).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope - unit * 1e-4 * torch.cos(x)).div(unit).square().mean()

    return record_steps(folder, model, loss, 12, torch.optim.Adam, 1e-3)


def test_weights_gradients_that_a_gradient_of_a_gradient_hides_make_a_scale_needed(tmp_path):
    analysis = mpdiag.analyze(recorded(tmp_path / "run", 1.0))
    scale = analysis.plan.loss_scale
    assert scale.needed
    assert "of all weight gradients in the later half" in scale.reason
    lost = analysis.figures.find("all-weights-sum")
    assert lost is not None
    assert lost.value > 0.9
    assert analysis.figures.find("layer-sum").value < 0.25
    smallest = 2.0**-25 / scale.recommended
    gradients = analysis.layers.of_kind("weight_grad").histograms
    assert float(gradients.abs_sum(-25).value.sum()) > 0
    assert smallest < float(gradients.absmax.max())


def test_without_a_loss_of_weights_gradients_nothing_is_said_of_them(tmp_path):
    analysis = mpdiag.analyze(recorded(tmp_path / "run", 1e-4))
    assert analysis.figures.find("all-weights-sum") is None
