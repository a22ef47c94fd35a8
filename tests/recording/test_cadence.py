"""The cadence and its budget: the cost of recording is measured, and steps are thinned."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from support import batch, network

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.recording.cadence import ALLOWANCE, SPARSE_EVERY, Cadence, Governor
from mpdiag.recording.ledger import Ledger
from mpdiag.recording.recorder import Recorder


class Clock:
    """A clock that others move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def govern(cost, steps, budget=0.02, plain=1.0, waits=True, device=0.0):
    """A training in which a recorded step costs ``cost(step)`` seconds more; the recorded steps."""
    clock = Clock()
    governor, cadence = Governor(budget, SPARSE_EVERY, clock), Cadence(budget=budget)
    recorded = []
    for step in range(steps):
        wanted = cadence.records(step, len(recorded), governor.thin)
        clock.now += plain
        if wanted:
            recorded.append(step)
            with governor, governor:  # hooks within hooks count once
                clock.now += cost(step)
            clock.now += device
        governor.step_ended(step + 1, recorded=wanted, ordinary=True, waits=waits)
    return governor, recorded


def steady(steps):
    """How far apart the last steps are."""
    return set(np.diff(steps[-4:]).tolist())


def test_a_cheap_recording_is_not_thinned():
    governor, recorded = govern(lambda step: 0.39, 2_000)
    assert recorded == [*range(20), *range(20, 2_000, 20)]
    assert governor.changes == []
    assert governor.spent == pytest.approx(0.39 * len(recorded))
    assert governor.elapsed == pytest.approx(2_000 + governor.spent)


@pytest.mark.parametrize(("cost", "every"), [(0.41, 40), (0.79, 40), (1.0, 80), (20.0, 1280)])
def test_thinned_by_powers_of_two_until_the_budget_holds(cost, every):
    governor, recorded = govern(lambda step: cost, 20_000)
    assert steady(recorded) == {every}
    assert cost / every <= 0.02 < 2 * cost / every
    assert [change["every"] for change in governor.changes][-1] == every
    assert set(recorded) <= {
        *range(20),
        *range(0, 20_000, 20),
    }  # some of the usual steps, no others


def test_nothing_is_thinned_before_the_allowance_is_spent():
    governor, recorded = govern(lambda step: 0.9, 2_000)
    first = governor.changes[0]["step"]
    spent_then = 0.9 * sum(step < first for step in recorded)
    assert ALLOWANCE < spent_then <= ALLOWANCE + 0.9 + 1e-9


def test_an_extreme_cost_thins_the_dense_beginning_too():
    _, recorded = govern(lambda step: 6.0, 2_000)
    assert recorded[:4] == [0, 1, 16, 320]  # 6 s in 1 s: a sixteenth of the steps, dense or not


def test_it_grows_dense_again_when_recording_has_become_cheap():
    governor, recorded = govern(lambda step: 2.0 if step < 3_000 else 0.1, 20_000)
    assert max(change["every"] for change in governor.changes) == 160
    assert steady(recorded) == {20}


def test_a_cost_near_an_edge_does_not_swing():
    noise = np.random.default_rng(0).uniform(0.35, 0.45, 20_000)
    governor, _ = govern(lambda step: float(noise[step]), 20_000)
    assert len(governor.changes) <= 1


def test_no_budget_and_no_step_time_thin_nothing():
    assert govern(lambda step: 5.0, 200, budget=None)[0].thin == 1
    assert govern(lambda step: 5.0, 200, plain=0.0)[0].thin == 1


def test_an_accelerator_that_works_on_is_seen_in_whole_steps():
    assert govern(lambda step: 0.3, 4_000, waits=False, device=1.0)[0].thin == 4  # 1.3 / 0.02 / 20
    assert govern(lambda step: 0.3, 4_000, waits=True, device=1.0)[0].thin == 1


# -- in a recording --------------------------------------------------------------------------------


def train(folder, steps, monkeypatch, cadence, cost=0.2):
    """A training of 1 s a step in which counting a tensor takes ``cost`` seconds; its weights."""
    clock = Clock()
    count = Ledger.count

    def slow_count(self, tensor):
        clock.now += cost
        return count(self, tensor)

    monkeypatch.setattr(Ledger, "count", slow_count)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = batch()
    recorder = Recorder(model, [optimizer], folder, cadence, clock=clock)
    with recorder:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            clock.now += 1.0
    monkeypatch.undo()
    return [p.detach().clone() for p in model.parameters()]


def test_what_was_thinned_stands_in_the_run_and_is_said_once(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "mpdiag"):
        thinned = train(tmp_path / "run", 700, monkeypatch, Cadence())
    run = mpdiag.open_run(tmp_path / "run")
    cadence = run.meta["cadence"]
    assert cadence["budget"] == 0.02
    assert cadence["thinned"]
    assert cadence["seconds_recording"] > ALLOWANCE
    steps = np.unique(run.records.step)
    assert len(steps) == run.meta["steps_recorded"] < 54
    every = cadence["thinned"][-1]["every"]
    assert all(step % every == 0 for step in steps if step >= 20)
    (said,) = [r.getMessage() for r in caplog.records]
    assert f"at last every {every}th" in said
    assert str(tmp_path / "run") in said

    plain = train(tmp_path / "all", 700, monkeypatch, Cadence(budget=None))
    assert len(np.unique(mpdiag.open_run(tmp_path / "all").records.step)) == 20 + 34
    assert all(torch.equal(a, b) for a, b in zip(thinned, plain, strict=True))
    assert len(caplog.records) == 1


def test_an_explicit_every_is_never_thinned(tmp_path, monkeypatch, caplog):
    train(tmp_path / "run", 60, monkeypatch, Cadence(every=3, budget=0.001), cost=5.0)
    run = mpdiag.open_run(tmp_path / "run")
    assert np.unique(run.records.step).tolist() == list(range(0, 60, 3))
    assert run.meta["cadence"]["thinned"] == []
    assert run.meta["cadence"]["seconds_recording"] > 100
    assert not caplog.records


@pytest.mark.parametrize("budget", [0, -0.1, 1.5, "2%", True, float("nan")])
def test_a_budget_that_is_none_is_refused(tmp_path, budget):
    model = network()
    with pytest.raises(UsageError, match="budget"):
        mpdiag.record(model, None, tmp_path / "run", budget=budget)
