"""The cadence and its budget: the cost of recording is measured, and steps are thinned."""

import logging

import numpy as np
import pytest
import torch
from support import batch, network

import mpdiag
from mpdiag.numerics.periods import LARGEST_PERIOD
from mpdiag.recording.cadence import (
    ALLOWANCE,
    DENSE_STEPS,
    OPERATIONS_ALLOWANCE,
    SPARSE_EVERY,
    Cadence,
    Governor,
)
from mpdiag.recording.ledger import Ledger
from mpdiag.recording.recorder import Recorder
from mpdiag.recording.run_folder import RecordingOptions

STEPS = [30, 59, 61, 82, 104, 136, 150, 169, 181, 205, 226]


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
        dense = governor.is_dense(step)
        wanted = cadence.records(step, len(recorded), governor.thin, dense=dense)
        clock.now += plain
        if wanted:
            recorded.append(step)
            with governor, governor:  # hooks within hooks count once
                clock.now += cost(step)
            clock.now += device
        governor.step_ended(step + 1, recorded=wanted, ordinary=True, waits=waits)
    return governor, recorded


def steady(steps, every):
    """Whether each of the last strata of so many steps holds one recorded step."""
    return set(np.diff(np.array(steps[-4:]) // every).tolist()) == {1}


def usual(steps):
    """The recorded steps of a training that is never thinned."""
    cadence = Cadence()
    return [step for step in range(steps) if cadence.records(step, 0)]


def test_after_the_dense_beginning_one_step_of_each_stratum_is_recorded():
    recorded = usual(4_000)
    assert recorded[:DENSE_STEPS] == list(range(DENSE_STEPS))
    sparse = np.array(recorded[DENSE_STEPS:])
    assert (sparse // SPARSE_EVERY).tolist() == list(range(1, 200))
    assert len(set((sparse % SPARSE_EVERY).tolist())) == SPARSE_EVERY  # at every offset


def test_any_2000_steps_hold_every_phase_of_every_period_of_up_to_16_steps():
    steps = 1_000_000
    sparse = np.array(usual(steps)[DENSE_STEPS:])
    for period in range(2, LARGEST_PERIOD + 1):
        for phase in range(period):
            met = sparse[sparse % period == phase]
            # Between two such steps no window of 2,000 steps fits, nor before the first.
            assert np.diff(met, prepend=-1, append=steps).max() <= 2_000, (period, phase)


def test_the_recorded_steps_depend_on_nothing_but_their_number():
    """Fixed for good: a recording can be repeated by another process, machine and version."""
    assert usual(240)[DENSE_STEPS:] == STEPS
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert usual(240)[DENSE_STEPS:] == STEPS
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("thin", [2, 8, 64])
def test_a_thinner_cadence_records_one_step_of_each_wider_stratum_and_no_others(thin):
    cadence = Cadence()
    wide = SPARSE_EVERY * thin
    thinned = [s for s in range(DENSE_STEPS, 40 * wide) if cadence.records(s, 0, thin)]
    denser = {s for s in thinned if cadence.records(s, 0, thin // 2)}
    assert set(thinned) == denser
    strata = [step // wide for step in thinned]
    assert strata == list(range(strata[0], 40))
    places = {step % wide // SPARSE_EVERY for step in thinned}
    assert len(places) > thin / 4  # not always the same place of it


def test_the_first_steps_of_a_phase_are_recorded_as_those_of_the_training_are():
    free, every, few = Cadence(), Cadence(every=7), Cadence(max_steps=30)
    assert all(free.records_in_phase(n, 25) for n in range(DENSE_STEPS))
    assert not free.records_in_phase(DENSE_STEPS + 1, 25)
    assert [n for n in range(DENSE_STEPS) if free.records_in_phase(n, 25, 8)] == [0, 8, 16]
    assert not any(every.records_in_phase(n, 25) for n in range(DENSE_STEPS))  # it is exact
    assert not few.records_in_phase(0, 30)


@pytest.mark.parametrize(
    ("cost", "options", "until", "words"),
    [
        (lambda step: 0.019, {}, 200, "took 1.9 % of the time of usual steps, within its budget"),
        (lambda step: 5.0 if step == 0 else 0.019, {}, 200, "1.9 %"),  # the first one compiles
        (
            lambda step: 0.021,
            {},
            20,
            "took 2.1 % of the time of usual steps, over its budget of 2 %",
        ),
        (lambda step: 0.01 if step < 50 else 0.1, {}, 57, "over its budget"),
        (lambda step: 0.021, {"budget": 0.03}, 200, "within its budget of 3 %"),
        (lambda step: 0.001, {"waits": False, "device": 0.1}, 20, "9.2 %"),
        (lambda step: 0.001, {"plain": 0.0}, 20, "took 100 %"),
    ],
)
def test_the_beginning_is_dense_for_as_long_as_recording_is_cheap(cost, options, until, words):
    governor, recorded = govern(cost, 260, **options)
    told = governor.to_json()["dense"]
    assert told["until"] == until
    assert words in told["reason"]
    assert recorded == sorted({*range(until), *usual(260)})


def test_on_an_accelerator_the_beginning_goes_on_once_plain_steps_have_shown_what_recording_costs():
    governor, recorded = govern(lambda step: 0.001, 260, waits=False, device=0.01)
    assert governor.dense_until == 200
    resumed = next(step for step in range(DENSE_STEPS, 260) if {step, step + 1} <= set(recorded))
    assert sum(step not in recorded for step in range(DENSE_STEPS, resumed)) == 8
    assert recorded == sorted({*range(resumed, 200), *usual(260)})


@pytest.mark.parametrize("budget", [0.02, None])
def test_what_a_short_recording_says_of_its_dense_beginning(budget):
    governor, recorded = govern(lambda step: 0.0, 12, budget=budget)
    assert recorded == list(range(12))
    always = {"until": None, "reason": "the first 20 steps are always recorded"}
    assert governor.to_json()["dense"] == (None if budget is None else always)
    unlimited = govern(lambda step: 0.0, 260, budget=budget)[1]
    assert unlimited == (usual(260) if budget is None else sorted({*range(200), *usual(260)}))


def test_a_round_of_several_optimizers_is_judged_once():
    clock = Clock()
    governor = Governor(0.02, SPARSE_EVERY, clock)

    def end(recording):
        clock.now += 1.0
        with governor:
            clock.now += recording
        governor.step_ended(1, recorded=True, ordinary=True, waits=True)

    end(0.0)
    end(0.01)
    assert governor.is_dense(20)
    end(0.2)
    assert governor.is_dense(20)  # its second step too
    assert not governor.is_dense(21)
    assert governor.dense_until == 21


def test_a_cheap_recording_is_not_thinned():
    governor, recorded = govern(lambda step: 0.39, 2_000)
    assert recorded == usual(2_000)
    assert governor.changes == []
    assert governor.spent == pytest.approx(0.39 * len(recorded))
    assert governor.elapsed == pytest.approx(2_000 + governor.spent)


@pytest.mark.parametrize(("cost", "every"), [(0.41, 40), (0.79, 40), (1.0, 80), (20.0, 1280)])
def test_thinned_by_powers_of_two_until_the_budget_holds(cost, every):
    governor, recorded = govern(lambda step: cost, 20_000)
    assert steady(recorded, every)
    assert cost / every <= 0.02 < 2 * cost / every
    assert [change["every"] for change in governor.changes][-1] == every
    assert set(recorded) <= set(usual(20_000))  # some of the usual steps, no others


def test_nothing_is_thinned_before_the_allowance_is_spent():
    governor, recorded = govern(lambda step: 0.9, 2_000)
    first = governor.changes[0]["step"]
    spent_then = 0.9 * sum(0 < step < first for step in recorded)
    assert ALLOWANCE < spent_then <= ALLOWANCE + 0.9 + 1e-9


def test_a_first_step_that_compiles_thins_nothing():
    governor, recorded = govern(lambda step: 30.0 if step == 0 else 0.45, DENSE_STEPS)
    assert recorded == list(range(DENSE_STEPS))
    assert governor.spent > ALLOWANCE


def test_an_extreme_cost_thins_the_dense_beginning_too_and_a_cheap_one_grows_dense_again():
    _, recorded = govern(lambda step: 6.0, 2_000)
    assert recorded[:4] == [0, 1, 2, 16]  # 6 s in 1 s: a sixteenth of the steps, dense or not
    assert steady(recorded, 320)
    governor, recorded = govern(lambda step: 2.0 if step < 3_000 else 0.1, 20_000)
    assert max(change["every"] for change in governor.changes) == 160
    assert steady(recorded, 20)


def test_a_cost_near_an_edge_does_not_swing():
    noise = np.random.default_rng(0).uniform(0.35, 0.45, 20_000)
    governor, _ = govern(lambda step: float(noise[step]), 20_000)
    assert len(governor.changes) <= 1


def test_what_thins_nothing_and_an_accelerator_that_works_on_is_seen_in_whole_steps():
    assert govern(lambda step: 5.0, 200, budget=None)[0].thin == 1
    assert govern(lambda step: 5.0, 200, plain=0.0)[0].thin == 1
    assert govern(lambda step: 0.3, 4_000, waits=False, device=1.0)[0].thin == 4  # 1.3 / 0.02 / 20
    assert govern(lambda step: 0.3, 4_000, waits=True, device=1.0)[0].thin == 1


def dear(governor, clock, cost, *, effects):
    """A step of a second, and ``cost`` more for its operations."""
    with governor:
        clock.now += cost
    clock.now += 1.0
    governor.step_ended(0, recorded=True, ordinary=False, waits=True, effects=effects)


def test_operations_wait_until_the_budget_has_room_for_them():
    clock = Clock()
    governor = Governor(0.02, SPARSE_EVERY, clock)
    dear(governor, clock, 40.0, effects=False)  # the first step compiles, and counts for nothing
    assert governor.affords_operations(effects=True)
    dear(governor, clock, 2.0, effects=True)
    dear(governor, clock, 0.5, effects=False)
    assert OPERATIONS_ALLOWANCE < 4.5 + 1.5
    waits = {}
    for effects in (False, True):
        while not governor.affords_operations(effects=effects):
            clock.now += 1.0
            governor.step_ended(0, recorded=False, ordinary=True, waits=True)
        waits[effects] = governor.elapsed
    assert waits[False] == pytest.approx((2.5 + 1.5) / 0.02, abs=1.0)
    assert waits[True] == pytest.approx((2.5 + 3.0) / 0.02, abs=1.0)
    assert Governor(None, SPARSE_EVERY, clock).affords_operations(effects=True)


def train(folder, steps, monkeypatch, cadence, cost=0.16):
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
    recorder = Recorder(model, [optimizer], folder, RecordingOptions(cadence), clock=clock)
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
    assert steady(steps, every)
    (said,) = [r.getMessage() for r in caplog.records]
    assert f"at last one in {every};" in said
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
