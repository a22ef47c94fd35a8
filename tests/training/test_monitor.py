"""The alarm when training leaves what was recorded; and its silence when it does not."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from support import batch, network
from torch import nn

import mpdiag
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.training.monitor import DriftWatch, _tail

scipy_stats = pytest.importorskip("scipy.stats", reason="SciPy is the oracle; pip install scipy")


def recorded_plan(folder, steps=60):
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.01)
    with mpdiag.record(model, sgd, folder):
        for i in range(steps):
            x, y = batch(i)
            sgd.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            sgd.step()
    return mpdiag.analyze(folder).plan


def train(plan, factor=1.0, steps=60, **options):
    model = network()
    mp = mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.01), plan, **options)
    for i in range(steps):
        x, y = batch(i)
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y) * factor
        mp.step(loss)
    mp.close()
    return mp


def test_a_training_like_the_recorded_one_raises_no_alarm(tmp_path):
    plan = recorded_plan(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(plan).alarms == ()


def test_gradients_far_beyond_the_recorded_ones_are_an_alarm(tmp_path):
    plan = recorded_plan(tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="octaves beyond") as said:
        mp = train(plan, factor=64.0, run=tmp_path / "trained")
    assert len(said) == 1  # once, however often it is seen
    (alarm,) = mp.alarms
    assert alarm.observed / alarm.predicted == pytest.approx(64, rel=0.5)
    lines = (tmp_path / "trained" / "training.jsonl").read_text().splitlines()
    assert alarm.to_json() in [json.loads(line) for line in lines]


def test_gradients_that_vanish_are_an_alarm(tmp_path):
    plan = recorded_plan(tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="are zero"):
        mp = train(plan, factor=2.0**-24)
    assert [a.alarm for a in mp.alarms] == ["underflow"]


def test_more_skips_than_predicted_are_an_alarm():
    plan = PrecisionPlan(
        loss_scale=LossScalePlan(method="constant", evidence={"predicted_overflow_rate": 0.001})
    )
    watch = DriftWatch(plan)
    for step in range(100):
        assert watch.note_skip(step, skipped=False) is None
    assert watch.note_skip(100, skipped=True) is None
    assert watch.note_skip(101, skipped=True) is None
    with pytest.warns(RuntimeWarning, match="predicted at most 0.10 %"):
        for step in range(102, 106):
            watch.note_skip(step, skipped=True)
    assert watch.alarms[0].observed > 0.02


def test_without_a_recording_there_is_nothing_to_drift_from():
    watch = DriftWatch(PrecisionPlan())
    assert not watch.due(0)
    assert all(watch.note_skip(i, skipped=True) is None for i in range(10))


@pytest.mark.parametrize(("count", "size", "rate"), [(3, 200, 0.001), (1, 10, 0.2), (8, 200, 0.01)])
def test_the_chance_of_so_many_is_poissons(count, size, rate):
    assert _tail(count, size, rate) == pytest.approx(scipy_stats.poisson.sf(count - 1, size * rate))
