"""From arrays to the verdict, against numbers worked out with numpy's own FP16 casts."""

import json
import math

import numpy as np
import pytest
from row_buffer import UpdateCounts, write_rows

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.scaling.necessity import NEEDED, lost_by_scale
from mpdiag.analysis.scaling.replay import replay_run
from mpdiag.analysis.verdict.probe import Probe, write_probe
from mpdiag.errors import UsageError


def gradients(exponent: float, spread: float = 2.0, n: int = 4000, seed: int = 0):
    rng = np.random.default_rng(seed)
    return np.exp2(rng.normal(exponent, spread, n)).astype(np.float32) * rng.choice([-1, 1], n)


def simple_run(folder, exponent, steps=30):
    rows = []
    for step in range(steps):
        g = gradients(exponent, seed=step)
        update = {"update": UpdateCounts(g.size, 1, 1, 0, 0, 10, (g.size,))}
        rows += [
            (step, "activation_grad", "layer", g),
            (step, "weight_grad", "layer.weight", g * 64),
            (step, "activation", "layer", g * 0 + 1.5),
            (step, "update", "layer.weight", g, update),
        ]
    return write_rows(folder, rows, created="2026")


def test_underflow_is_exact_and_the_document_keeps_its_contract(tmp_path):
    run = simple_run(tmp_path / "run", -26.0)
    document = json.loads(json.dumps(analyze(run).to_json(), allow_nan=False))
    everything = np.concatenate([gradients(-26.0, seed=s) for s in range(30)])
    truth = np.mean(everything.astype(np.float16) == 0)
    layer = next(r for r in document["layers"] if r["kind"] == "activation_grad")
    assert layer["underflow"] == truth == document["loss_scale"]["underflow_before"]
    scale = document["loss_scale"]
    assert set(document["formats"]) == {"fp16", "bf16", "fp8_e4m3", "fp8_e5m2"}
    scaled = np.float16(everything * np.float32(scale["recommended"]))
    assert scale["underflow_after"] == np.mean(scaled == 0)
    largest = 64 * np.abs(everything).max()
    assert scale["upper"] * largest < 65504 <= 2 * scale["upper"] * largest
    assert scale["limiting_layer"] == "layer.weight"
    assert document["master_weights"]["swallowed_fraction"] == 1 / 4000
    assert not document["master_weights"]["needed"]


@pytest.mark.parametrize(
    ("exponent", "need"),
    [(-10.0, "not needed"), (-22.0, "not needed"), (-26.0, "advisable"), (-30.0, "needed")],
)
def test_an_alarm_is_earned(tmp_path, exponent, need):
    analysis = analyze(simple_run(tmp_path / "run", exponent))
    assert analysis.plan.loss_scale.need == need
    worst = lost_by_scale(analysis.loss_scale.late)[:, 0].max()
    assert (worst >= NEEDED) == (need == "needed")
    if need == "needed":
        plan = analysis.plan.loss_scale
        assert plan.lower <= plan.recommended <= plan.upper
        assert math.log2(plan.recommended).is_integer()


@pytest.mark.parametrize(("weight", "need"), [(0.07, "needed"), (0.03, "advisable")])
def test_many_small_pushes_that_are_all_lost_are_an_alarm(tmp_path, weight, need):
    """A softmax: one value in a hundred is large, the others together weigh a little beside it."""
    large = 99 * 2.0**-26 * (1 - weight) / weight
    g = np.where(np.arange(4000) % 100 == 0, large, 2.0**-26).astype(np.float32)
    rows = [(s, "activation_grad", "layer", g) for s in range(30)]
    analysis = analyze(write_rows(tmp_path / "run", rows))
    assert analysis.plan.loss_scale.need == need
    assert ("99.00 % of the values in layer's gradient" in analysis.plan.loss_scale.reason) == (
        need == "needed"
    )
    assert lost_by_scale(analysis.loss_scale.late)[:, 0].max() == pytest.approx(weight, rel=0.1)


def test_no_scale_fits_when_the_range_is_too_wide(tmp_path):
    layers = (("small", gradients(-26.5, 0.5)), ("huge", np.full(10, 30000.0)))
    rows = [(step, "activation_grad", *layer) for step in range(30) for layer in layers]
    analysis = analyze(write_rows(tmp_path / "run", rows))
    finding = analysis.findings[0]
    assert (finding.severity, finding.code) == ("error", "no-loss-scale-fits")
    assert "BF16" in finding.fix
    assert analysis.loss_scale.limiting_layer == "huge"
    assert (
        "no scaling method is good enough" in analysis.plan.loss_scale.reason
    )  # the closest is named all the same
    assert not analysis.loss_scale.fits
    assert analyze(tmp_path / "run", target="bf16").loss_scale.fits


def test_activations_past_the_range_stay_in_fp32(tmp_path):
    kinds = {"big": "Linear", "norm": "LayerNorm"}
    modules = [{"name": n, "what": "module", "type": t, "recorded": True} for n, t in kinds.items()]
    rows = [
        (step, *row)
        for step in range(20)
        for row in (
            ("activation", "big", np.array([1.0, 70000.0])),
            ("activation", "norm", np.ones(2)),
            ("activation_grad", "big", gradients(-5.0)),
        )
    ]
    analysis = analyze(write_rows(tmp_path / "run", rows, modules=modules))
    chosen = {c.module: c.op for c in analysis.plan.fp32_operations}
    assert (chosen, analysis.findings[0].code) == (kinds, "activation-overflow")


def test_a_training_that_turns_to_nan_is_told(tmp_path):
    rows = [(s, "activation_grad", "layer", np.full(4, np.nan if s else 0.5)) for s in range(3)]
    analysis = analyze(write_rows(tmp_path / "run", rows))
    json.dumps(analysis.to_json(), allow_nan=False)
    assert "non-finite-gradients" in {f.code for f in analysis.findings}
    assert "diverges in FP32" in analysis.verdict.text


def test_replay_is_exact_for_the_recorded_steps(tmp_path):
    run = simple_run(tmp_path / "run", -26.0)
    played = replay_run(run, "constant", init_scale=1024.0)
    for i, step in enumerate(played.steps):
        g = gradients(-26.0, seed=int(step))
        assert played.lost[i] == np.mean(np.float16(g * np.float32(1024)) == 0)
        assert played.absmax[i] == np.abs(g).max() * 64
    assert played.skips == 0
    wild = replay_run(simple_run(tmp_path / "large", -10.0), "backoff", init_scale=2.0**24)
    assert wild.overflow[0]
    assert not wild.overflow[-1]
    with pytest.raises(UsageError, match="lognormal"):
        replay_run(run, "magic")


FALLING = (2.0, 1.5, 1.2, 1.0)


@pytest.mark.parametrize(
    ("by_plan", "failure", "level"),
    [
        (FALLING, "", "expected"),
        ((*FALLING[:3], math.nan), "", "cannot"),
        ((2.0, 2.0, 2.0, 2.0), "", "expected"),
        (FALLING, "it ran out of memory", "cannot"),
    ],
)
def test_a_probe_is_kept_with_the_recording_for_a_plan_that_decides_the_same(
    tmp_path, by_plan, failure, level
):
    run = simple_run(tmp_path / "run", -14.0)
    before = analyze(run)
    probe = Probe(FALLING, by_plan, 1, 50, failure)
    told = before.with_probe(probe)
    write_probe(run, probe, before.plan.digest())
    later = analyze(run)
    assert (later.verdict.level, later.verdict.text) == (level, told.verdict.text)
    assert [f.to_json() for f in later.findings] == [f.to_json() for f in told.findings]
    assert later.probe.to_json() == probe.to_json()
    again = later.with_probe(Probe(FALLING, FALLING, 0, 4))  # a newer one takes its place
    assert again.verdict.text == before.with_probe(again.probe).verdict.text
    assert analyze(run, "bf16").probe is None  # another plan


def test_a_probe_of_another_plan_hides_none(tmp_path):
    run = simple_run(tmp_path / "run", -14.0)
    plans = [analyze(run, target).plan.digest() for target in ("fp16", "bf16")]
    probes = [Probe(FALLING, FALLING, skipped, 4) for skipped in range(3)]
    for probe, decisions in zip(probes, (*plans, plans[0]), strict=True):
        write_probe(run, probe, decisions)
    assert [analyze(run, t).probe.skipped for t in ("fp16", "bf16")] == [2, 1]
    assert len(json.loads((run / "probe.json").read_text())["earlier"]) == 1


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"decisions": "x"', "null"])
def test_a_probe_that_cannot_be_read_is_none(tmp_path, damage):
    run = simple_run(tmp_path / "run", -14.0)
    plan = analyze(run).plan
    write_probe(run, Probe(FALLING, FALLING, 0, 4), plan.digest())
    (run / "probe.json").write_text(damage)
    assert analyze(run).probe is None


@pytest.mark.parametrize("budget", [-0.1, 1.5, float("nan")])
def test_a_budget_that_is_no_share_is_refused(tmp_path, budget):
    with pytest.raises(ValueError, match="budget must be a share from 0 to 1"):
        analyze(tmp_path, "mxfp8", budget=budget)
