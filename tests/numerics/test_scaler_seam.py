"""A loss scaler that only this file knows works everywhere: one class, and its entry in SCALERS."""

import json
import math
import types
from dataclasses import dataclass, replace
from typing import ClassVar

import calls
import made_runs
import numpy as np
import pytest
import torch
from support import backoff, batch, constant, network

import mpdiag
from mpdiag.analysis.plan_check import check_plan
from mpdiag.analysis.scaling.method import choose_method, gradient_history
from mpdiag.analysis.scaling.replay import replay_run
from mpdiag.errors import DamagedPlan, StateMismatch, UsageError
from mpdiag.exports.registry import BLOCK_ENGINES, EXPORTERS, export_plan
from mpdiag.integrations.shared import TrainingState, dump_scaler, load_scaler
from mpdiag.integrations.torch_amp import grad_scaler
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.loss_scalers import (
    SCALERS,
    LogNormal,
    Scaler,
    ScaleRange,
    scaler_named,
    state,
)
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.training.options import PrecisionOverrides


@dataclass(frozen=True)
class PeakHold(Scaler):
    """Keep the largest gradient of all steps ``margin`` powers of two below FP16's maximum."""

    name: ClassVar[str] = "peakhold"
    label: ClassVar[str] = "PeakHold"
    needs_absmax: ClassVar[bool] = True

    init_scale: float = 1024.0
    margin: int = 2
    peak: float = state(0.0)

    @property
    def scale(self):
        if self.peak == 0:
            return self.init_scale
        return 2.0 ** math.floor(math.log2(FP16.max / self.peak) - self.margin)

    def adjust(self, absmax):
        seen = absmax if math.isfinite(absmax) else 2 * FP16.max / self.scale
        return replace(self, peak=max(self.peak, seen))

    @classmethod
    def proposals(cls, found):
        yield cls(found.first, margin=max(1, found.upper - found.safe))

    def describe(self):
        return f"PeakHold({self.margin})"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(SCALERS, PeakHold.name, PeakHold)


def plan(scale=2.0**10, **settings) -> PrecisionPlan:
    held = LossScalePlan(method="peakhold", init_scale=scale, recommended=scale, settings=settings)
    return PrecisionPlan(loss_scale=held)


def constant_with(**settings) -> PrecisionPlan:
    return PrecisionPlan(loss_scale=LossScalePlan(method="constant", settings=settings))


@pytest.fixture
def run(tmp_path):
    return made_runs.write_run(tmp_path / "run")


def train(mp, model, steps=3):
    """Results, and the largest unscaled gradient of each step, clear of the trainer's own check."""
    results, largest = [], []
    for i in range(steps):
        x, y = batch(i)
        with mp.autocast():
            loss = torch.nn.functional.cross_entropy(model(x), y)
        mp.backward(loss)
        mp.unscale()
        largest.append(max(float(p.grad.abs().max()) for p in model.parameters()))
        results.append(mp.step())
    return results, largest


@pytest.mark.parametrize("name", [*SCALERS, "peakhold"])
def test_settings_and_state_are_told_apart_without_a_list_of_names(name):
    scaler = scaler_named(name)
    assert (scaler.name, bool(scaler.label)) == (name, True)
    moved = scaler.adjust(0.25).adjust(math.inf)
    assert moved.to_plan() == scaler.to_plan()
    assert scaler.from_plan(moved.to_plan()) == scaler
    assert (moved != scaler) == scaler.adaptive
    assert set(scaler.to_plan()) == {"method", *scaler.setting_names()}
    small, large = (scaler.adjust(absmax) for absmax in (0.0, 0.125))
    assert (small != large) == scaler.needs_absmax


def test_its_settings_survive_the_plan(tmp_path):
    scaler = PeakHold(256.0, margin=5, peak=3.0)
    made = PrecisionPlan(loss_scale=LossScalePlan().with_scaler(scaler))
    assert made.to_json()["loss_scale"]["settings"] == {"margin": 5}
    made.save(tmp_path / "plan.json")
    again = PrecisionPlan.load(tmp_path / "plan.json")
    assert again == made
    assert again.loss_scale.scaler() == PeakHold(256.0, margin=5)
    assert again.loss_scale.adaptive
    scaler = LogNormal(8.0, beta1=0.5, quantile=2.0, max_scale=4096.0)
    scale = LossScalePlan().with_scaler(scaler)
    assert (scale.settings, scale.max_scale) == ({"beta1": 0.5, "quantile": 2.0}, 4096.0)
    assert scale.scaler() == scaler


@pytest.mark.parametrize("made", [PrecisionPlan(), constant(8.0), backoff(64.0), plan()])
def test_a_plan_without_such_settings_has_the_keys_it_always_had(made):
    assert list(made.to_json()["loss_scale"]) == [
        *("need", "method", "recommended", "lower", "upper", "init_scale", "growth_factor"),
        *("backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale"),
        *("reason", "evidence"),
    ]


def test_a_scaler_or_a_setting_that_is_not_there_is_refused_by_name(monkeypatch):
    document = json.loads(json.dumps(plan(margin=3).to_json()))
    for wrong, name in ((plan(margins=3), "'margins'"), (constant_with(margin=1), "'margin'")):
        with pytest.raises(DamagedPlan, match=name):
            PrecisionPlan.from_json(wrong.to_json())
    monkeypatch.delitem(SCALERS, "peakhold")
    known = r"'peakhold'.* none, constant, backoff, lognormal"
    with pytest.raises(DamagedPlan, match=known):
        PrecisionPlan.from_json(document)
    with pytest.raises(UsageError, match=known):
        trainer(network(), plan=plan())


def test_it_is_replayed_over_a_recording(run):
    played = replay_run(run, "peakhold", margin=3, growth_interval=7, init_scale=None)
    assert played.scale[0] == 1024.0
    peaks = np.maximum.accumulate(played.absmax)[:-1]
    assert np.array_equal(played.scale[1:], 2.0 ** np.floor(np.log2(65504 / peaks) - 3))


def test_the_choice_of_a_method_replays_what_it_proposes(monkeypatch):
    history = gradient_history(np.arange(4), np.full(4, 2.0**17), [], FP16, 0.01)
    choice = choose_method(history, ScaleRange(0, -4, -2), headroom=2, scaled=True)
    assert choice.chosen.method == "constant"  # simpler, and enough
    jump = np.array([2.0**-10, 2.0**12, 2.0**-10, 2.0**12] * 200)
    history = gradient_history(np.arange(800), jump, [], FP16, 0.01)
    for name in ("constant", "backoff", "lognormal"):
        monkeypatch.setattr(SCALERS[name], "proposals", Scaler.proposals)  # none
    choice = choose_method(history, ScaleRange(5, 1, 3), headroom=2, scaled=True)
    assert choice.chosen.to_json()["method"] == "peakhold"
    assert choice.chosen.fits
    told = "replayed over the recorded gradients, PeakHold(2) skips 1 of 800 steps"
    assert choice.describe() == told
    assert LossScalePlan().with_scaler(choice.chosen.scaler).scaler() == PeakHold(8.0)


def test_a_stored_plan_is_checked_by_whether_its_scale_adapts():
    now = PrecisionPlan(loss_scale=LossScalePlan(need="needed", lower=2.0**12, upper=2.0**14))
    assert check_plan(plan(8.0), now).holds  # it may grow to what is needed
    assert not check_plan(constant(8.0), now).holds


def trainer(model, **options):
    return mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), **options)


def test_it_trains_and_is_told_the_true_maximum():
    model = network()
    mp = trainer(model, plan=plan(256.0, margin=4))
    results, largest = train(mp, model)
    assert not any(r.skipped for r in results)
    assert results[0].scale == 256.0
    assert isinstance(mp.loss_scaler, PeakHold)
    assert mp.loss_scaler.peak == pytest.approx(max(largest), rel=1e-6)
    expected = 2.0 ** math.floor(math.log2(65504 / mp.loss_scaler.peak) - 4)
    assert results[-1].next_scale == mp.loss_scaler.scale == expected


@pytest.mark.parametrize(
    "override", ["peakhold", {"method": "peakhold", "margin": 3}, PeakHold(8.0)]
)
def test_it_can_be_asked_for_in_place_of_the_plans(override):
    mp = trainer(network(), plan=constant(8.0), overrides=PrecisionOverrides(loss_scale=override))
    assert isinstance(mp.loss_scaler, PeakHold)


def test_an_object_that_is_no_scaler_is_refused():
    silent = types.SimpleNamespace(scale=8.0, adjust=lambda absmax: silent)
    with pytest.raises(UsageError, match=r"a Scaler \(see mpdiag\.numerics\.loss_scalers\)"):
        trainer(network(), plan=plan(), overrides=PrecisionOverrides(loss_scale=silent))


def test_its_state_is_saved_and_loaded_again():
    model = network()
    mp = trainer(model, plan=plan(256.0))
    train(mp, model)
    again = trainer(network(), plan=plan(256.0))
    again.load_state_dict(mp.state_dict())
    assert again.loss_scaler == mp.loss_scaler
    other = trainer(network(), plan=plan(256.0))
    TrainingState(other).load_state_dict(json.loads(json.dumps(TrainingState(mp).state_dict())))
    assert (other.loss_scaler, other.steps) == (mp.loss_scaler, 3)
    with pytest.raises(StateMismatch, match="PeakHold, but the plan uses LogNormal"):
        load_scaler(LogNormal(), dump_scaler(mp.loss_scaler))
    with pytest.raises(StateMismatch, match="'pike'"):
        load_scaler(PeakHold(), {"kind": "PeakHold", "pike": 1.0})


def test_torchs_own_grad_scaler_follows_it():
    scaler = grad_scaler(plan(256.0), "cpu")
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler.scale((weight * torch.tensor([3.0, 5.0])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == PeakHold(256.0, peak=5.0).scale


def test_the_command_line_takes_it_by_name_and_names_the_one_that_was_meant(run):
    done = calls.run("replay", run, "--scaler", "peakhold", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == replay_run(run, "peakhold").to_json()
    done = calls.run("replay", run, "--scaler", "peakhol")
    assert done.exit_code == 2
    words = " ".join(done.stderr.replace("│", " ").split())
    assert "no loss scaler 'peakhol' (did you mean peakhold?)" in words
    assert "choose one of constant, backoff, lognormal, peakhold" in words


@pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare
def test_the_dashboard_offers_it(root, run, monkeypatch):
    testing = pytest.importorskip("streamlit.testing.v1", reason="needs Streamlit, of extra `app`")
    monkeypatch.setenv("MPDIAG_RUNS", str(run))
    test = testing.AppTest.from_file(str(root / "app" / "main.py"), default_timeout=60)
    test.query_params["tab"] = "Loss-scale replay"
    test = test.switch_page("views/training.py").run()
    choice = test.selectbox(key="scaler")
    assert (choice.value, choice.options) == ("backoff", list(SCALERS))
    test = choice.set_value("peakhold").run()
    assert not test.exception
    shown = {metric.label: metric.value for metric in test.metric}
    assert shown["Scale at the end"] == f"{replay_run(run, 'peakhold').final_scale:g}"


@pytest.mark.parametrize("framework", sorted(set(EXPORTERS) - set(BLOCK_ENGINES)))
def test_an_export_says_that_its_framework_has_no_such_scaler(framework):
    export = export_plan(plan(64.0, margin=3), framework)
    assert any("loss scaler is PeakHold" in n and "has none like it" in n for n in export.notes)
    assert "margin is 3 in the plan; it cannot be set here." in export.notes
